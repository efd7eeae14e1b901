//! Authentication between the processes of a cluster: certificates of the cluster's own authority.
//!
//! ```text
//!  ca.crt, tls.crt, tls.key ──> files ──> followed ──> tls: what new connections are made with
//!                                                             |         server: listen, the data plane
//!  peer's certificate ──> roles: which names does it bear     |         client: grpc::channel, the data plane
//!                           └──> rules: which RPC takes which role
//! ```
//!
//! A certificate names *roles* as DNS names: `router.baton.internal`, `worker.baton.internal`,
//! `operator.baton.internal`. Both sides of a connection present one, and ordinary name verification checks the role. A
//! certificate names no instance: replicas share their Secret, so workers trust workers. A process without an identity
//! does not encrypt connections and trusts any client. Therefore it listens on loopback only, unless it is configured
//! for a network that keeps others out.

mod authority;
mod chains;
mod config;
mod error;
mod files;
mod followed;
mod roles;
mod rules;
mod server_tls;
#[cfg(test)]
mod tests;
mod tls;
mod trust;

pub use authority::{Authority, AuthorityError};
pub use config::IdentityConfig;
pub use error::IdentityError;
pub use files::FolderSetting;
pub use roles::{Role, Roles};
pub(crate) use rules::GuardLayer;
pub use rules::may_call;
pub use server_tls::{ClientProtocol, ServerTls, ServerTlsConfig};
pub use tls::Protocol;
pub use trust::{TrustError, client_tls};

use files::Files;
use followed::Followed;
use rustls::{ClientConfig, ServerConfig};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tls::Tls;

/// Names of the files in [`IdentityConfig::dir`], as in Kubernetes' TLS Secrets and cert-manager: the trusted
/// authorities.
pub const CA_FILE: &str = "ca.crt";
/// The certificate that this process presents, with the intermediates up to the authority.
pub const CERTIFICATE_FILE: &str = "tls.crt";
/// The private key of that certificate.
pub const KEY_FILE: &str = "tls.key";

/// A certificate with less remaining validity than this causes a warning.
const ENDS_SOON: Duration = Duration::from_secs(24 * 3600);

/// The credentials of this process; the default has none. Clones share it. Open connections keep the credentials that
/// they were opened with.
#[derive(Clone, Default)]
pub struct Identity(Option<Proof>);

/// Credentials that were loaded from files. Clones share them.
#[derive(Clone)]
pub struct Proof {
    role: Role,
    tls: Arc<Followed<Tls>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.0.as_ref().map_or("none", |proof| proof.role.name()))
    }
}

impl Identity {
    /// Reads the configured files, and reads them again while the identity is used. Without a configured folder there
    /// are no credentials. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If files are missing, do not match each other, or do not prove the role `role`.
    pub async fn start(config: &IdentityConfig, role: Role) -> Result<Self, IdentityError> {
        let Some(dir) = &config.dir else { return Ok(Self::default()) };
        let make = move |files: &Files| {
            let tls = Tls::of(files, role, SystemTime::now())?;
            tell_end(files, role);
            Ok(tls)
        };
        let tls = Followed::start(FolderSetting::Identity, dir, config.reread(), make).await?;
        Ok(Self(Some(Proof { role, tls })))
    }

    /// Whether credentials are configured.
    pub const fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// The credentials, if configured.
    pub const fn proof(&self) -> Option<&Proof> {
        self.0.as_ref()
    }

    /// The current TLS configuration for accepting connections; `None`: no TLS.
    pub fn server(&self, protocol: Protocol) -> Option<Arc<ServerConfig>> {
        self.proof().map(|proof| proof.server(protocol))
    }

    /// The current TLS configuration for opening connections; `None`: no TLS. The caller names the role that the peer
    /// must prove: [`Role::server_name`].
    pub fn client(&self, protocol: Protocol) -> Option<Arc<ClientConfig>> {
        self.proof().map(|proof| proof.client(protocol))
    }
}

impl Proof {
    /// The current TLS configuration for accepting connections.
    pub fn server(&self, protocol: Protocol) -> Arc<ServerConfig> {
        self.tls.now().server(protocol)
    }

    /// The current TLS configuration for opening connections; see [`Identity::client`].
    pub fn client(&self, protocol: Protocol) -> Arc<ClientConfig> {
        self.tls.now().client(protocol)
    }
}

/// Warns of a certificate that was not renewed in time.
fn tell_end(files: &Files, role: Role) {
    if Tls::of(files, role, SystemTime::now() + ENDS_SOON).is_err() {
        tracing::warn!(dir = %files.dir().display(), "the certificate or its authority ends within a day: renew it");
    }
}
