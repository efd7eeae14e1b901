//! Authorities of tests, and what they give to workers and to others.

use baton_kv_transfer::Credentials;
use baton_kv_transfer::credentials::ALPN;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::sync::Arc;

pub const WORKER: &str = "worker.baton.internal";
pub const ROUTER: &str = "router.baton.internal";

/// Signs certificates.
pub struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        Self::with_key(KeyPair::generate().unwrap())
    }

    /// The authority that has this key: the same in every process that knows it.
    pub fn with_key(key: KeyPair) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    pub fn key(&self) -> &KeyPair {
        self.issuer.key()
    }

    /// A certificate of this name, and what belongs to it.
    pub fn issue(&self, name: &str) -> Arc<Issued> {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        Arc::new(Issued::new(&self.certificate, Some((certificate.der().clone(), key))))
    }

    /// Believes whom this authority signed, and has nothing to show.
    pub fn nothing(&self) -> Arc<Issued> {
        Arc::new(Issued::new(&self.certificate, None))
    }

    pub fn worker(&self) -> Arc<Issued> {
        self.issue(WORKER)
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

/// Credentials of one process.
pub struct Issued {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    verifier: Arc<WebPkiServerVerifier>,
}

impl Issued {
    fn new(authority: &CertificateDer<'static>, own: Option<(CertificateDer<'static>, KeyPair)>) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone()).unwrap();
        let (roots, provider): (_, Arc<CryptoProvider>) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build().unwrap();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build().unwrap();
        let client = ClientConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]).unwrap();
        let client = client.with_root_certificates(roots);
        let own = own.map(|(certificate, key)| {
            let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
            (vec![certificate], key)
        });
        let mut client = match &own {
            Some((chain, key)) => client.with_client_auth_cert(chain.clone(), key.clone_key()).unwrap(),
            None => client.with_no_client_auth(),
        };
        // A server without a certificate of its own does not start: whoever has nothing to show dials only.
        let (chain, key) = own.unwrap_or_else(|| {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap();
            (vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
        });
        let server = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).unwrap();
        let mut server = server.with_client_cert_verifier(clients).with_single_cert(chain, key).unwrap();
        client.alpn_protocols = vec![ALPN.to_vec()];
        server.alpn_protocols = vec![ALPN.to_vec()];
        Self { server: Arc::new(server), client: Arc::new(client), verifier }
    }
}

impl Credentials for Issued {
    fn server(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }
    fn client(&self) -> Arc<ClientConfig> {
        self.client.clone()
    }
    fn worker_name(&self) -> ServerName<'static> {
        ServerName::try_from(WORKER).unwrap()
    }
    fn is_worker(&self, chain: &[CertificateDer<'_>]) -> bool {
        let [own, above @ ..] = chain else { return false };
        self.verifier.verify_server_cert(own, above, &self.worker_name(), &[], UnixTime::now()).is_ok()
    }
}
