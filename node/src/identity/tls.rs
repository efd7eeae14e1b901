//! TLS configurations of connections: TLS 1.3 over ring, with certificates on both sides. No session is resumed: each
//! connection is verified with the authorities that are trusted when it is opened.

use super::chains::{ShortChains, check_own};
use super::files::Files;
use super::{IdentityError, Role};
use rustls::client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier as _};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::UnixTime;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier as _};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The protocol on a connection, stated in its handshake: a connection for one protocol is refused for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Grpc,
    /// The connection on which workers move KV.
    DataPlane,
}

impl Protocol {
    const fn alpn(self) -> &'static [u8] {
        match self {
            Self::Grpc => b"h2",
            Self::DataPlane => b"baton-kv",
        }
    }
}

/// Configurations built from one read of the files.
pub(super) struct Tls {
    grpc: (Arc<ServerConfig>, Arc<ClientConfig>),
    data_plane: (Arc<ServerConfig>, Arc<ClientConfig>),
}

impl Tls {
    /// Builds them, and checks that peers will accept this process in the role `role` at the time `now`.
    pub(super) fn of(files: &Files, role: Role, now: SystemTime) -> Result<Self, IdentityError> {
        let unusable = |source| IdentityError::Unusable { dir: files.dir().into(), source };
        let refused = |source| IdentityError::Role { dir: files.dir().into(), role, source };
        let unverifiable = |e: rustls::client::VerifierBuilderError| unusable(rustls::Error::General(e.to_string()));
        let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO));
        let provider = Arc::new(default_provider());
        let mut roots = RootCertStore::empty();
        for authority in files.authorities()? {
            roots.add(authority).map_err(unusable)?;
        }
        let roots = Arc::new(roots);
        let own = CertifiedKey::from_der(files.chain()?, files.key()?, &provider).map_err(unusable)?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone());
        let servers = Arc::new(ShortChains(servers.build().map_err(unverifiable)?));
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
        let clients = Arc::new(ShortChains(clients.build().map_err(unverifiable)?));
        if let Some((first, between)) = own.cert.split_first() {
            check_own(files.dir(), between)?;
            servers.verify_server_cert(first, between, &role.server_name(), &[], now).map_err(refused)?;
            clients.verify_client_cert(first, between, now).map_err(refused)?;
        }
        let own = Arc::new(SingleCertAndKey::from(own));
        let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]);
        let mut server = server.map_err(unusable)?.with_client_cert_verifier(clients).with_cert_resolver(own.clone());
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let client = client.map_err(unusable)?.dangerous().with_custom_certificate_verifier(servers);
        let mut client = client.with_client_cert_resolver(own);
        client.resumption = Resumption::disabled();
        let with = |protocol: Protocol| {
            let (mut server, mut client) = (server.clone(), client.clone());
            server.alpn_protocols = vec![protocol.alpn().to_vec()];
            client.alpn_protocols = vec![protocol.alpn().to_vec()];
            (Arc::new(server), Arc::new(client))
        };
        Ok(Self { grpc: with(Protocol::Grpc), data_plane: with(Protocol::DataPlane) })
    }

    pub(super) fn server(&self, protocol: Protocol) -> Arc<ServerConfig> {
        self.both(protocol).0.clone()
    }

    pub(super) fn client(&self, protocol: Protocol) -> Arc<ClientConfig> {
        self.both(protocol).1.clone()
    }

    const fn both(&self, protocol: Protocol) -> &(Arc<ServerConfig>, Arc<ClientConfig>) {
        match protocol {
            Protocol::Grpc => &self.grpc,
            Protocol::DataPlane => &self.data_plane,
        }
    }
}
