//! Who this process is to the rest of its cluster, and who its peers are: certificates of the cluster's own authority.
//!
//! ```text
//!  ca.crt, tls.crt, tls.key ──> files: read, read again ──> tls: what new connections are made with
//!                                                             |         server: listen, the data plane
//!  peer's certificate ──> roles: which names does it bear     |         client: grpc::channel, the data plane
//!                           └──> rules: which RPC takes which role
//! ```
//!
//! A certificate names *roles*: `router.baton.internal`, `worker.baton.internal`, `operator.baton.internal`, as DNS names. Both sides of a
//! connection show one, and which of its names it bears is asked by ordinary name verification. It names no instance: replicas share their
//! Secret, so workers trust workers. A process without an identity speaks in clear and trusts whoever reaches it, and therefore listens on
//! loopback alone, unless it is configured for a network that lets nobody else in.

mod authority;
mod config;
mod error;
mod files;
mod roles;
mod rules;
#[cfg(test)]
mod tests;
mod tls;

pub use authority::{Authority, AuthorityError};
pub use config::IdentityConfig;
pub use error::IdentityError;
pub use roles::{Role, Roles};
pub(crate) use rules::GuardLayer;
pub use rules::may_call;
pub use tls::Protocol;

use arc_swap::ArcSwap;
use files::Files;
use rustls::{ClientConfig, ServerConfig};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};
use tls::Tls;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Names of the files in [`IdentityConfig::dir`], those of Kubernetes' TLS Secrets and of cert-manager: the authorities trusted.
pub const CA_FILE: &str = "ca.crt";
/// The certificate that this process shows, with what lies between it and the authority.
pub const CERTIFICATE_FILE: &str = "tls.crt";
/// Its key.
pub const KEY_FILE: &str = "tls.key";

/// Longest wait for the files at the start.
const START_MAX: Duration = Duration::from_secs(30);
/// A certificate that ends so soon is complained of.
const ENDS_SOON: Duration = Duration::from_secs(24 * 3600);

/// What this process proves itself with; the default is nothing at all. Clones share it. Connections made keep what they were made with.
#[derive(Clone, Default)]
pub struct Identity(Option<Proof>);

/// An identity that is there.
#[derive(Clone)]
pub struct Proof(Arc<Shared>);

struct Shared {
    role: Role,
    tls: ArcSwap<Tls>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.0.as_ref().map_or("none", |proof| proof.0.role.name()))
    }
}

impl Identity {
    /// Reads the configured files and goes on reading them for as long as the identity is used; none where no folder is configured. Must be
    /// called within a tokio runtime.
    ///
    /// # Errors
    /// If the files are not there, do not fit together, or do not make this process a `role`.
    pub async fn start(config: &IdentityConfig, role: Role) -> Result<Self, IdentityError> {
        let Some(dir) = &config.dir else { return Ok(Self::default()) };
        let (files, tls) = load(dir, role, START_MAX).await?;
        let shared = Arc::new(Shared { role, tls: ArcSwap::from_pointee(tls) });
        tokio::spawn(follow(Arc::downgrade(&shared), files, config.reread()));
        Ok(Self(Some(Proof(shared))))
    }

    /// Whether there is one.
    pub const fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// The identity, where there is one.
    pub const fn proof(&self) -> Option<&Proof> {
        self.0.as_ref()
    }

    /// What to accept a connection with, as of now; `None`: in clear.
    pub fn server(&self, protocol: Protocol) -> Option<Arc<ServerConfig>> {
        self.proof().map(|proof| proof.server(protocol))
    }

    /// What to open a connection with, as of now; `None`: in clear. The caller names the role that the peer has to prove: [`Role::server_name`].
    pub fn client(&self, protocol: Protocol) -> Option<Arc<ClientConfig>> {
        self.proof().map(|proof| proof.client(protocol))
    }
}

impl Proof {
    /// What to accept a connection with, as of now.
    pub fn server(&self, protocol: Protocol) -> Arc<ServerConfig> {
        self.0.tls.load().server(protocol)
    }

    /// What to open a connection with, as of now; see [`Identity::client`].
    pub fn client(&self, protocol: Protocol) -> Arc<ClientConfig> {
        self.0.tls.load().client(protocol)
    }
}

async fn load(dir: &Path, role: Role, within: Duration) -> Result<(Files, Tls), IdentityError> {
    let files = read(dir, within).await?;
    let tls = Tls::of(&files, role, SystemTime::now())?;
    tell_end(&files, role);
    Ok((files, tls))
}

async fn read(dir: &Path, within: Duration) -> Result<Files, IdentityError> {
    let at = dir.to_path_buf();
    let reading = spawn_blocking(move || Files::read(&at));
    let late = |_| IdentityError::Read { path: dir.into(), source: std::io::ErrorKind::TimedOut.into() };
    let read = tokio::time::timeout(within, reading).await.map_err(late)?;
    read.unwrap_or_else(|panic| Err(IdentityError::Read { path: dir.into(), source: std::io::Error::other(panic) }))
}

/// Puts files in force as they change; what is wrong changes nothing, and is logged once.
async fn follow(shared: Weak<Shared>, mut seen: Files, every: Duration) {
    let dir = seen.dir().to_path_buf();
    let mut told = String::new();
    loop {
        sleep(every).await;
        let Some(shared) = shared.upgrade() else { return };
        let found = match read(&dir, every.max(START_MAX)).await {
            Ok(files) if files == seen => continue,
            Ok(files) => Tls::of(&files, shared.role, SystemTime::now()).map(|tls| (files, tls)),
            Err(error) => Err(error),
        };
        match found {
            Ok((files, tls)) => {
                tracing::info!(dir = %dir.display(), "takes the identity's new files");
                tell_end(&files, shared.role);
                shared.tls.store(Arc::new(tls));
                seen = files;
                told.clear();
            }
            Err(error) => {
                let problem = error.chain();
                if told != problem {
                    tracing::warn!(problem, "goes on with the identity that it has");
                    told = problem;
                }
            }
        }
    }
}

/// Complains of a certificate that nobody renews.
fn tell_end(files: &Files, role: Role) {
    if Tls::of(files, role, SystemTime::now() + ENDS_SOON).is_err() {
        tracing::warn!(dir = %files.dir().display(), "the certificate or its authority ends within a day: renew it");
    }
}
