//! A bound on the certificates that a peer sends. Before any signature is verified, the library tries all paths from the
//! peer's certificate through the others to an authority, and parses every certificate again at each step. A forged
//! chain of 42 certificates with a few names makes it take 137,256 steps, which are seconds of a core. So a longer chain
//! than an authority needs is refused unread: with three intermediates there are at most 15 steps.

use super::{CERTIFICATE_FILE, IdentityError};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme};
use std::path::Path;
use std::sync::Arc;

/// Most certificates besides a peer's own: an authority with two levels below it, and its own certificate, which some
/// issuers append. Baton's own authority has no level below it.
const INTERMEDIATES_MAX: usize = 3;

/// A peer sent more intermediate certificates than are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{sent} intermediate certificates, and at most {max} are accepted")]
struct TooManyIntermediates {
    sent: usize,
    max: usize,
}

fn bounded(intermediates: &[CertificateDer<'_>]) -> Result<(), TooManyIntermediates> {
    let (sent, max) = (intermediates.len(), INTERMEDIATES_MAX);
    if sent > max { Err(TooManyIntermediates { sent, max }) } else { Ok(()) }
}

fn check(intermediates: &[CertificateDer<'_>]) -> Result<(), Error> {
    let refused = |error| CertificateError::Other(OtherError(Arc::new(error)));
    bounded(intermediates).map_err(|error| refused(error).into())
}

/// Checks that peers accept the number of certificates in this process's own chain, which is read from `dir`.
pub(super) fn check_own(dir: &Path, intermediates: &[CertificateDer<'_>]) -> Result<(), IdentityError> {
    bounded(intermediates).map_err(|TooManyIntermediates { sent, max }| IdentityError::TooManyIntermediates {
        path: dir.join(CERTIFICATE_FILE),
        sent,
        max,
    })
}

/// A verifier that sees only chains of a bounded length.
#[derive(Debug)]
pub(super) struct ShortChains<V: ?Sized>(pub(super) Arc<V>);

impl<V: ClientCertVerifier + ?Sized> ClientCertVerifier for ShortChains<V> {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check(intermediates)?;
        self.0.verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.0.requires_raw_public_keys()
    }
}

impl<V: ServerCertVerifier + ?Sized> ServerCertVerifier for ShortChains<V> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check(intermediates)?;
        self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.0.requires_raw_public_keys()
    }

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        self.0.root_hint_subjects()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::files::Files;
    use crate::identity::tls::{Protocol, Tls};
    use crate::identity::{CA_FILE, FolderSetting, KEY_FILE, Role};
    use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair};
    use rustls::crypto::ring::default_provider;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::version::TLS13;
    use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
    use std::time::SystemTime;

    fn of_authority(name: &str) -> CertificateParams {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    /// A worker's certificate with the certificates between it and an authority, its own first.
    struct Chain {
        authority: Certificate,
        certificates: Vec<Certificate>,
        key: KeyPair,
    }

    impl Chain {
        /// A valid one, with so many intermediates.
        fn valid(intermediates: usize) -> Self {
            let (params, key) = (of_authority("authority"), KeyPair::generate().unwrap());
            let authority = params.self_signed(&key).unwrap();
            let (mut issuer, mut certificates) = (Issuer::new(params, key), Vec::new());
            for level in 0..intermediates {
                let (params, key) = (of_authority(&format!("level {level}")), KeyPair::generate().unwrap());
                certificates.insert(0, params.signed_by(&key, &issuer).unwrap());
                issuer = Issuer::new(params, key);
            }
            Self::of(authority, certificates, &issuer)
        }

        /// One that leads to no authority, by very many paths: seven certificates of one name on each of six levels.
        fn forged() -> Self {
            let issuer =
                |level: usize| Issuer::new(of_authority(&format!("level {level}")), KeyPair::generate().unwrap());
            let mut certificates = Vec::new();
            for level in 0..6 {
                let (params, above) = (of_authority(&format!("level {level}")), issuer(level + 1));
                let signed = |_| params.signed_by(&KeyPair::generate().unwrap(), &above).unwrap();
                certificates.extend((0..7).map(signed));
            }
            let authority = of_authority("nobody").self_signed(&KeyPair::generate().unwrap()).unwrap();
            Self::of(authority, certificates, &issuer(0))
        }

        fn of(authority: Certificate, mut certificates: Vec<Certificate>, issuer: &Issuer<'_, KeyPair>) -> Self {
            let (params, key) =
                (CertificateParams::new([Role::Worker.dns_name().into()]), KeyPair::generate().unwrap());
            certificates.insert(0, params.unwrap().signed_by(&key, issuer).unwrap());
            Self { authority, certificates, key }
        }

        /// What a process makes of it, which trusts its authority.
        fn tls(&self) -> Result<Tls, IdentityError> {
            let folder = tempfile::tempdir().unwrap();
            let write = |name: &str, content: String| std::fs::write(folder.path().join(name), content).unwrap();
            write(CA_FILE, self.authority.pem());
            write(CERTIFICATE_FILE, self.certificates.iter().map(Certificate::pem).collect());
            write(KEY_FILE, self.key.serialize_pem());
            Tls::of(&Files::read(FolderSetting::Identity, folder.path()).unwrap(), Role::Worker, SystemTime::now())
        }

        /// The same, by who checks nothing of its own.
        fn unchecked(&self, trusted: &Certificate) -> (Arc<ServerConfig>, Arc<ClientConfig>) {
            let mut roots = RootCertStore::empty();
            roots.add(trusted.der().clone()).unwrap();
            let own = || self.certificates.iter().map(|certificate| certificate.der().clone()).collect();
            let key = || PrivateKeyDer::try_from(self.key.serialize_der()).unwrap();
            let provider = Arc::new(default_provider());
            let server =
                ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]).unwrap();
            let server = server.with_no_client_auth().with_single_cert(own(), key()).unwrap();
            let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).unwrap();
            let client = client.with_root_certificates(roots).with_client_auth_cert(own(), key()).unwrap();
            (Arc::new(server), Arc::new(client))
        }
    }

    /// The first error of either side.
    fn handshake((server, client): (Arc<ServerConfig>, Arc<ClientConfig>)) -> Result<(), Error> {
        let mut server: Connection = ServerConnection::new(server).unwrap().into();
        let mut client: Connection = ClientConnection::new(client, Role::Worker.server_name()).unwrap().into();
        for _ in 0..3 {
            pass(&mut client, &mut server)?;
            pass(&mut server, &mut client)?;
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        Ok(())
    }

    fn pass(from: &mut Connection, to: &mut Connection) -> Result<(), Error> {
        while from.wants_write() {
            let mut sent = Vec::new();
            from.write_tls(&mut sent).unwrap();
            let mut rest = &*sent;
            while !rest.is_empty() {
                to.read_tls(&mut rest).unwrap();
                to.process_new_packets()?;
            }
        }
        Ok(())
    }

    fn refused_for(shaken: Result<(), Error>) -> Result<TooManyIntermediates, String> {
        match shaken {
            Err(Error::InvalidCertificate(CertificateError::Other(OtherError(why)))) => {
                why.downcast_ref().copied().ok_or_else(|| why.to_string())
            }
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn a_long_chain_is_refused_before_its_paths_are_tried() {
        let (honest, forged) = (Chain::valid(0), Chain::forged());
        let tls = honest.tls().unwrap();
        let (stranger_serves, stranger_dials) = forged.unchecked(&honest.authority);
        let refused = Ok(TooManyIntermediates { sent: 42, max: 3 });
        for protocol in [Protocol::Grpc, Protocol::DataPlane] {
            assert_eq!(refused_for(handshake((tls.server(protocol), stranger_dials.clone()))), refused);
            assert_eq!(refused_for(handshake((stranger_serves.clone(), tls.client(protocol)))), refused);
        }
    }

    #[test]
    fn an_authority_may_have_levels_below_it() {
        for intermediates in 0..=INTERMEDIATES_MAX {
            let tls = Chain::valid(intermediates).tls().unwrap();
            for protocol in [Protocol::Grpc, Protocol::DataPlane] {
                handshake((tls.server(protocol), tls.client(protocol))).unwrap();
            }
        }
    }

    #[test]
    fn a_process_does_not_start_with_a_chain_that_its_peers_refuse() {
        let error = Chain::valid(INTERMEDIATES_MAX + 1).tls().err().unwrap().to_string();
        assert!(error.contains("tls.crt holds 4 intermediate certificates, and peers accept at most 3"), "{error}");
    }
}
