//! What is wrong with an identity.

use super::{CA_FILE, CERTIFICATE_FILE, FolderSetting, Role};
use std::error::Error as _;
use std::path::PathBuf;

/// Why the identity cannot be loaded. Messages contain no part of a key.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file is not there, or cannot be read.
    #[error("cannot read {path} of {}, which holds {}", .setting.name(), .setting.files(), path = .path.display())]
    Read { setting: FolderSetting, path: PathBuf, source: std::io::Error },
    /// A file is larger than the limit.
    #[error("{path} has more than {max} bytes", path = .path.display())]
    TooLarge { path: PathBuf, max: u64 },
    /// A file holds no item of the expected kind.
    #[error("{path} holds no {what} in PEM", path = .path.display())]
    Empty {
        path: PathBuf,
        /// What the file should hold.
        what: &'static str,
    },
    /// Peers refuse the certificate for those that come with it.
    #[error(
        "{path} holds {sent} intermediate certificates, and peers accept at most {max}: leave out those that do not lead to an authority of \
         {CA_FILE}, or trust one of them there", path = .path.display()
    )]
    TooManyIntermediates { path: PathBuf, sent: usize, max: usize },
    /// The files do not match each other.
    #[error("the files of {dir} cannot be used", dir = .dir.display())]
    Unusable { dir: PathBuf, source: rustls::Error },
    /// The certificate is not what this process needs.
    #[error(
        "{CERTIFICATE_FILE} of {dir} does not make this process a {role}: it must bear the DNS name {name}, be signed by an authority of {CA_FILE}, \
         and be in force, for servers and for clients", dir = .dir.display(), name = .role.dns_name()
    )]
    Role {
        dir: PathBuf,
        /// The role of this process.
        role: Role,
        source: rustls::Error,
    },
}

impl IdentityError {
    /// The error with its reason.
    pub(super) fn chain(&self) -> String {
        self.source().map_or_else(|| self.to_string(), |source| format!("{self}: {source}"))
    }
}
