//! What is wrong with an identity.

use super::Role;
use super::{CA_FILE, CERTIFICATE_FILE, KEY_FILE};
use std::error::Error as _;
use std::path::PathBuf;

/// Why there is no identity. No word of a key is in it.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file is not there, or cannot be read.
    #[error("cannot read {path} of identity.dir, which holds {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}", path = .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file is larger than any of its kind.
    #[error("{path} has more than {max} bytes", path = .path.display())]
    TooLarge { path: PathBuf, max: u64 },
    /// A file holds nothing of what it is for.
    #[error("{path} holds no {what} in PEM", path = .path.display())]
    Empty {
        path: PathBuf,
        /// What should be there.
        what: &'static str,
    },
    /// They do not fit together.
    #[error("the files of {dir} cannot be used", dir = .dir.display())]
    Unusable { dir: PathBuf, source: rustls::Error },
    /// The certificate is not what this process needs.
    #[error(
        "{CERTIFICATE_FILE} of {dir} does not make this process a {role}: it must bear the DNS name {name}, be signed by an authority of {CA_FILE}, \
         and be in force, for servers and for clients", dir = .dir.display(), name = .role.dns_name()
    )]
    Role {
        dir: PathBuf,
        /// Who this process is.
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
