//! Certificate authorities: for `baton up`, for processes that are started by hand, and for tests. A cluster in an
//! orchestrator has its own.

use super::{CA_FILE, CERTIFICATE_FILE, KEY_FILE, Role};
use crate::private;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Name of the file with an authority's key.
const AUTHORITY_KEY_FILE: &str = "ca.key";
/// Common name of authorities. It does not distinguish them; their keys do.
const NAME: &str = "Baton cluster authority";
/// Validity of an authority.
const AUTHORITY_LASTS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Largest expected clock difference between two hosts.
const CLOCKS_DIFFER: Duration = Duration::from_secs(3600);

/// What went wrong with an authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file or folder.
    #[error("{path}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A key or a certificate.
    #[error("cannot make certificates")]
    Certificate(#[from] rcgen::Error),
}

/// A certificate authority: its own certificate, and the key with which it signs others.
#[derive(Debug)]
pub struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Result<Self, AuthorityError> {
        let (params, key) = (of_authority()?, KeyPair::generate()?);
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { pem, issuer: Issuer::new(params, key) })
    }

    /// Loads the authority that [`Authority::save`] wrote to `dir`; no other format is accepted.
    pub fn load(dir: &Path) -> Result<Self, AuthorityError> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read_to_string(&path).map_err(|source| AuthorityError::Io { path, source })
        };
        let (pem, key) = (read(CA_FILE)?, KeyPair::from_pem(&read(AUTHORITY_KEY_FILE)?)?);
        Ok(Self { pem, issuer: Issuer::new(of_authority()?, key) })
    }

    /// Writes certificate and key into `dir`, accessible to the owner only. The folder is created if it is missing.
    pub fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        make_private(dir)?;
        write(&dir.join(AUTHORITY_KEY_FILE), &self.issuer.key().serialize_pem())?;
        write(&dir.join(CA_FILE), &self.pem)
    }

    /// Its certificate in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Writes the files of an `identity.dir` into `dir`. The new certificate has `roles` and names the servers `hosts`;
    /// `lasts` is its validity. `ca.crt` holds this authority and `also`, others in PEM. Each file is replaced
    /// atomically, the certificate last.
    pub fn issue(
        &self,
        dir: &Path,
        roles: &[Role],
        hosts: &[String],
        lasts: Duration,
        also: &str,
    ) -> Result<(), AuthorityError> {
        let names = roles.iter().map(|role| role.dns_name().to_owned()).chain(hosts.iter().cloned());
        let mut params = CertificateParams::new(names.collect::<Vec<_>>())?;
        in_force(&mut params, lasts);
        let name = roles.first().map_or("server", |role| role.name());
        params.distinguished_name.push(DnType::CommonName, format!("Baton {name}"));
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        make_private(dir)?;
        write(&dir.join(CA_FILE), &format!("{}{also}", self.pem))?;
        write(&dir.join(KEY_FILE), &key.serialize_pem())?;
        write(&dir.join(CERTIFICATE_FILE), &certificate.pem())
    }
}

fn of_authority() -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, NAME);
    in_force(&mut params, AUTHORITY_LASTS);
    Ok(params)
}

fn in_force(params: &mut CertificateParams, lasts: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - CLOCKS_DIFFER).into();
    params.not_after = (now + lasts).into();
}

/// Creates a folder accessible to the owner only.
fn make_private(dir: &Path) -> Result<(), AuthorityError> {
    private::make_folder(dir).map_err(|source| AuthorityError::Io { path: dir.into(), source })
}

/// Replaces a file atomically; accessible to the owner only.
fn write(path: &Path, content: &str) -> Result<(), AuthorityError> {
    let replaced = private::replace_file(path, content.as_bytes());
    replaced.map_err(|source| AuthorityError::Io { path: path.into(), source })
}
