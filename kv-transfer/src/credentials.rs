//! How instances prove to each other that they are workers of one cluster. The caller that starts the transfer provides the credentials:
//! this crate reads no certificate files and knows no roles by name.

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ServerConfig};
use std::sync::Arc;

/// Application protocol of the data plane in TLS (ALPN). It keeps a worker's certificate that is presented to another service from counting
/// as a greeting here. Both configurations of [`Credentials`] name it and no other protocol.
pub const ALPN: &[u8] = b"baton-kv";

/// The certificate that this instance presents, and the peers that it accepts. Queried for each connection, so that the files may change
/// meanwhile.
pub trait Credentials: Send + Sync {
    /// For connections that peers open: TLS 1.3; requires every client to present a certificate of the cluster's authority.
    fn server(&self) -> Arc<ServerConfig>;
    /// For connections to peers: TLS 1.3; presents this instance's certificate.
    fn client(&self) -> Arc<ClientConfig>;
    /// The name in every worker's certificate, which the client side verifies.
    fn worker_name(&self) -> ServerName<'static>;
    /// Whether a client's certificate chain, already verified against the authority, is that of a worker.
    fn is_worker(&self, chain: &[CertificateDer<'_>]) -> bool;
}
