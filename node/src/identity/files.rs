//! Reads the files of a folder. Orchestrators replace them under the same names, so contents are compared, not
//! modification times.

use super::{CA_FILE, CERTIFICATE_FILE, IdentityError, KEY_FILE};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Largest file, in bytes: a Kubernetes Secret holds no more.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A setting that names a folder, and what the folder holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderSetting {
    /// `identity.dir`: trusted authorities, certificate and key.
    Identity,
    /// `tls.dir`: certificate and key.
    Tls,
}

impl FolderSetting {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity.dir",
            Self::Tls => "tls.dir",
        }
    }

    /// The names of its files, in words.
    pub(super) const fn files(self) -> &'static str {
        match self {
            Self::Identity => "ca.crt, tls.crt and tls.key",
            Self::Tls => "tls.crt and tls.key",
        }
    }
}

/// Content of a folder.
#[derive(PartialEq, Eq)]
pub(super) struct Files {
    setting: FolderSetting,
    dir: PathBuf,
    /// Empty where the folder holds none.
    authorities: Vec<u8>,
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl Files {
    /// Reads the files in `dir`; blocks the thread.
    pub(super) fn read(setting: FolderSetting, dir: &Path) -> Result<Self, IdentityError> {
        let read = |name: &str| content(setting, &dir.join(name));
        let authorities = match setting {
            FolderSetting::Identity => read(CA_FILE)?,
            FolderSetting::Tls => Vec::new(),
        };
        Ok(Self { setting, authorities, certificate: read(CERTIFICATE_FILE)?, key: read(KEY_FILE)?, dir: dir.into() })
    }

    pub(super) const fn setting(&self) -> FolderSetting {
        self.setting
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Certificates of the trusted authorities.
    pub(super) fn authorities(&self) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
        self.certificates(CA_FILE, &self.authorities)
    }

    /// The certificate chain that this process presents.
    pub(super) fn chain(&self) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
        self.certificates(CERTIFICATE_FILE, &self.certificate)
    }

    pub(super) fn key(&self) -> Result<PrivateKeyDer<'static>, IdentityError> {
        let path = || self.dir.join(KEY_FILE);
        PrivateKeyDer::from_pem_slice(&self.key).map_err(|_| IdentityError::Empty { path: path(), what: "private key" })
    }

    fn certificates(&self, name: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        let empty = || IdentityError::Empty { path: self.dir.join(name), what: "certificate" };
        found.ok().filter(|found| !found.is_empty()).ok_or_else(empty)
    }
}

fn content(setting: FolderSetting, path: &Path) -> Result<Vec<u8>, IdentityError> {
    let unreadable = |source| IdentityError::Read { setting, path: path.into(), source };
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(IdentityError::TooLarge { path: path.into(), max: FILE_BYTES_MAX });
    }
    Ok(bytes)
}
