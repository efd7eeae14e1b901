//! The authorities that may sign a collector's certificate.

use super::TelemetryError;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls_native_certs::{CertificateResult, load_native_certs};
use std::path::Path;
use tonic::transport::ClientTlsConfig;

/// TLS to a collector whose certificate is signed by the authorities of `ca_file`, or without a file by those that this
/// host trusts. Fails if there is no authority at all: otherwise every export would fail without a clear reason.
pub(super) fn client(ca_file: Option<&Path>) -> Result<ClientTlsConfig, TelemetryError> {
    let authorities = match ca_file {
        Some(path) => from_file(path)?,
        None => of_host(load_native_certs())?,
    };
    Ok(ClientTlsConfig::new().trust_anchors(authorities.roots))
}

fn from_file(path: &Path) -> Result<RootCertStore, TelemetryError> {
    let unreadable = |source| TelemetryError::CaFile { path: path.into(), source };
    let certificates = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut store = RootCertStore::empty();
    let (used, _) = store.add_parsable_certificates(certificates.map_err(unreadable)?);
    if used == 0 { Err(TelemetryError::NoAuthority { path: path.into() }) } else { Ok(store) }
}

fn of_host(found: CertificateResult) -> Result<RootCertStore, TelemetryError> {
    let mut store = RootCertStore::empty();
    // Hosts may carry old certificates that cannot be parsed.
    let (used, _) = store.add_parsable_certificates(found.certs);
    if used == 0 {
        let problem = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(TelemetryError::NoTrust { problem });
    }
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_trusts_nobody_says_so() {
        let error = of_host(CertificateResult::default()).unwrap_err();
        assert!(error.to_string().contains("otlp_ca_file"), "{error}");
        let mut found = CertificateResult::default();
        found.certs.push(CertificateDer::from(vec![1, 2, 3]));
        assert!(matches!(of_host(found), Err(TelemetryError::NoTrust { .. })), "none that can be used");
    }
}
