//! How instances prove to each other that they are workers of one cluster. Whoever starts the transfer brings it; this crate reads no
//! certificate files and knows no roles by name.

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ServerConfig};
use std::sync::Arc;

/// Application protocol of the data plane in TLS (ALPN): a certificate of a worker shown to anything else is no greeting here. Both
/// configurations of [`Credentials`] name it and nothing else.
pub const ALPN: &[u8] = b"baton-kv";

/// What this instance shows its peers, and whom it believes. Asked anew for each connection, so that files may change meanwhile.
pub trait Credentials: Send + Sync {
    /// For connections that peers open: TLS 1.3, asks every client for a certificate of the cluster's authority.
    fn server(&self) -> Arc<ServerConfig>;
    /// For connections to peers: TLS 1.3, shows this instance's certificate.
    fn client(&self) -> Arc<ClientConfig>;
    /// The name that every worker's certificate carries, which the client side verifies.
    fn worker_name(&self) -> ServerName<'static>;
    /// Whether a client's certificates, which the authority signed, are those of a worker.
    fn is_worker(&self, chain: &[CertificateDer<'_>]) -> bool;
}
