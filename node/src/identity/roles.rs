//! Roles that a certificate proves.

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, DnsName, ServerName};
use rustls::server::ParsedCertificate;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The role of a process, or of a person, in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Places requests on workers.
    Router,
    /// Runs requests, and registers with routers.
    Worker,
    /// A person who operates the cluster.
    Operator,
}

impl Role {
    pub const ALL: [Self; 3] = [Self::Router, Self::Worker, Self::Operator];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Worker => "worker",
            Self::Operator => "operator",
        }
    }

    /// The DNS name for it in certificates. `.internal` is reserved, so nobody owns the name on the internet.
    pub const fn dns_name(self) -> &'static str {
        match self {
            Self::Router => "router.baton.internal",
            Self::Worker => "worker.baton.internal",
            Self::Operator => "operator.baton.internal",
        }
    }

    /// The same, as the name that a client verifies.
    pub fn server_name(self) -> ServerName<'static> {
        // Never fails, as tests of all three show.
        DnsName::try_from_str(self.dns_name()).map(ServerName::DnsName).unwrap_or_else(|e| panic!("{self}: {e}"))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Roles that a peer has proven.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roles(Vec<Role>);

impl Roles {
    /// The roles that a verified chain names in its first certificate.
    pub fn of(verified: &[CertificateDer<'_>]) -> Self {
        let Some(certificate) = verified.first().and_then(|der| ParsedCertificate::try_from(der).ok()) else {
            return Self::default();
        };
        let bears = |role: &Role| verify_server_name(&certificate, &role.server_name()).is_ok();
        Self(Role::ALL.into_iter().filter(bears).collect())
    }

    /// Whether this role is among them.
    pub fn has(&self, role: Role) -> bool {
        self.0.contains(&role)
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nobody");
        }
        f.write_str(&self.0.iter().map(|role| role.name()).collect::<Vec<_>>().join(" and "))
    }
}
