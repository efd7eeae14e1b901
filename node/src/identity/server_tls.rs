//! TLS for clients that present no certificate: what the ports of an API show them.

use super::IdentityError;
use super::files::{Files, FolderSetting};
use super::followed::Followed;
use crate::config::{Check, Checker};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What a port for clients speaks.
#[derive(Clone, Copy, Debug)]
pub enum ClientProtocol {
    /// gRPC, over HTTP/2.
    Grpc,
    /// HTTP/1.1. Over HTTP/2 some clients do not read an answer that comes before the end of their request, such as a refused key.
    Http,
}

impl ClientProtocol {
    const fn alpn(self) -> &'static [u8] {
        match self {
            Self::Grpc => b"h2",
            Self::Http => b"http/1.1",
        }
    }
}

/// The certificate of the client ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerTlsConfig {
    /// Folder with `tls.crt` and `tls.key`. With it the client ports take TLS 1.3 only; unset: they do not encrypt.
    pub dir: Option<PathBuf>,
    /// Interval between reads of the files.
    pub reread_ms: u64,
}

impl Default for ServerTlsConfig {
    fn default() -> Self {
        Self { dir: None, reread_ms: 5_000 }
    }
}

impl Check for ServerTlsConfig {
    fn check(&self, at: &mut Checker) {
        at.range("reread_ms", self.reread_ms, 10..=600_000);
        let named = self.dir.as_ref().is_none_or(|path| !path.as_os_str().is_empty());
        at.require("dir", named, "the path of a folder");
    }
}

/// The configurations of new connections; the default has none. Clones share them.
#[derive(Clone, Default)]
pub struct ServerTls(Option<Arc<Followed<Configs>>>);

struct Configs {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerTls({})", if self.0.is_some() { "set" } else { "none" })
    }
}

impl ServerTls {
    /// Reads the configured files, and reads them again while this is used. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If files are missing, or the key is not that of the certificate.
    pub async fn start(config: &ServerTlsConfig) -> Result<Self, IdentityError> {
        let Some(dir) = &config.dir else { return Ok(Self::default()) };
        let every = Duration::from_millis(config.reread_ms);
        Ok(Self(Some(Followed::start(FolderSetting::Tls, dir, every, configs).await?)))
    }

    /// The current configuration of a port; `None`: no TLS.
    pub fn now(&self, protocol: ClientProtocol) -> Option<Arc<ServerConfig>> {
        let configs = self.0.as_ref()?.now();
        Some(match protocol {
            ClientProtocol::Grpc => configs.grpc.clone(),
            ClientProtocol::Http => configs.http.clone(),
        })
    }
}

fn configs(files: &Files) -> Result<Configs, IdentityError> {
    let unusable = |source| IdentityError::Unusable { dir: files.dir().into(), source };
    let provider = Arc::new(default_provider());
    let own = CertifiedKey::from_der(files.chain()?, files.key()?, &provider).map_err(unusable)?;
    let server = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).map_err(unusable)?;
    let server = server.with_no_client_auth().with_cert_resolver(Arc::new(SingleCertAndKey::from(own)));
    let of = |protocol: ClientProtocol| {
        let mut server = server.clone();
        server.alpn_protocols = vec![protocol.alpn().to_vec()];
        // No session is resumed: each connection sees the certificate of its time.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Arc::new(server)
    };
    Ok(Configs { grpc: of(ClientProtocol::Grpc), http: of(ClientProtocol::Http) })
}
