//! The authorities that may sign a server's certificate where the server is not of this cluster.

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls_native_certs::{CertificateResult, load_native_certs};
use std::path::{Path, PathBuf};
use tonic::transport::ClientTlsConfig;

/// Why no certificate could be verified.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The file of authorities cannot be read.
    #[error("cannot read certificates from {path}: {source}")]
    Read { path: PathBuf, source: pem::Error },
    /// The file holds no certificate.
    #[error("{path} holds no certificate that can be used; it takes PEM, BEGIN CERTIFICATE")]
    Empty { path: PathBuf },
    /// No file is named, and the host trusts nobody.
    #[error("this host trusts no authority{problem}; install ca-certificates, or name a file")]
    None {
        /// The errors of the search, after `: `; or empty.
        problem: String,
    },
}

/// TLS to a server whose certificate is signed by the authorities of `ca_file`, or without a file by those that this
/// host trusts. Fails if there is no authority at all: otherwise every call would fail without a clear reason.
pub fn client_tls(ca_file: Option<&Path>) -> Result<ClientTlsConfig, TrustError> {
    let authorities = match ca_file {
        Some(path) => from_file(path)?,
        None => of_host(load_native_certs())?,
    };
    Ok(ClientTlsConfig::new().trust_anchors(authorities.roots))
}

fn from_file(path: &Path) -> Result<RootCertStore, TrustError> {
    let unreadable = |source| TrustError::Read { path: path.into(), source };
    let certificates = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut store = RootCertStore::empty();
    let (used, _) = store.add_parsable_certificates(certificates.map_err(unreadable)?);
    if used == 0 { Err(TrustError::Empty { path: path.into() }) } else { Ok(store) }
}

fn of_host(found: CertificateResult) -> Result<RootCertStore, TrustError> {
    let mut store = RootCertStore::empty();
    // Hosts may carry old certificates that cannot be parsed.
    let (used, _) = store.add_parsable_certificates(found.certs);
    if used == 0 {
        let problem = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(TrustError::None { problem });
    }
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_trusts_nobody_says_so() {
        let error = of_host(CertificateResult::default()).unwrap_err();
        assert!(error.to_string().contains("name a file"), "{error}");
        let mut found = CertificateResult::default();
        found.certs.push(CertificateDer::from(vec![1, 2, 3]));
        assert!(matches!(of_host(found), Err(TrustError::None { .. })), "none that can be used");
    }
}
