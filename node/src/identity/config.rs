//! The section `identity`, the same on routers and workers.

use crate::config::{Check, Checker};
use crate::membership::etcd::EtcdConfig;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How this process authenticates to its peers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IdentityConfig {
    /// Folder with `ca.crt`, `tls.crt` and `tls.key`. Unset: connections between peers are not encrypted, and any
    /// process that reaches this one is accepted as a peer.
    pub dir: Option<PathBuf>,
    /// Interval between reads of the files.
    pub reread_ms: u64,
    /// Allows listening on addresses that other hosts reach although `dir` is unset: the network must then keep others
    /// out.
    pub insecure: bool,
}

impl Default for IdentityConfig {
    fn default() -> Self {
        // Kubernetes takes up to a minute to update the files of a Secret.
        Self { dir: None, reread_ms: 5_000, insecure: false }
    }
}

impl IdentityConfig {
    pub(super) fn reread(&self) -> Duration {
        Duration::from_millis(self.reread_ms)
    }

    /// Reports a problem if other hosts can reach this process without authentication, at one of `listens`, each with
    /// its key.
    pub fn check_listeners(&self, listens: &[(&str, IpAddr)], at: &mut Checker) {
        let open = |(_, address): &&(&str, IpAddr)| !address.is_loopback();
        let Some((key, address)) = listens.iter().find(open).filter(|_| self.dir.is_none() && !self.insecure) else {
            return;
        };
        let problem = format!(
            "must be set, since {key} is {address}: other hosts reach this process, and it would take anybody there for a part of its cluster. \
             `baton identity FOLDER` makes certificates for all processes; where the network lets nobody else in, set identity.insecure \
             (--insecure) instead"
        );
        at.problem("identity.dir", problem);
    }

    /// The section `membership.etcd` with this identity's files, if etcd uses TLS and the section names no files of its
    /// own.
    #[must_use]
    pub fn for_etcd(&self, etcd: &EtcdConfig) -> EtcdConfig {
        let secure = etcd.endpoints.iter().any(|endpoint| endpoint.starts_with("https://"));
        let own = etcd.ca.is_some() || etcd.cert.is_some() || etcd.key.is_some();
        let Some(dir) = self.dir.as_ref().filter(|_| secure && !own) else { return etcd.clone() };
        let file = |name| Some(dir.join(name));
        EtcdConfig {
            ca: file(super::CA_FILE),
            cert: file(super::CERTIFICATE_FILE),
            key: file(super::KEY_FILE),
            ..etcd.clone()
        }
    }

    /// Reports a problem if etcd's certificate could not be verified.
    pub fn check_etcd(&self, etcd: &EtcdConfig, at: &mut Checker) {
        let etcd = self.for_etcd(etcd);
        if etcd.ca.is_none() && etcd.endpoints.iter().any(|endpoint| endpoint.starts_with("https://")) {
            at.problem("membership.etcd.ca", "must be set where an endpoint is https://, or identity.dir");
        }
    }
}

impl Check for IdentityConfig {
    fn check(&self, at: &mut Checker) {
        at.range("reread_ms", self.reread_ms, 10..=600_000);
        let named = self.dir.as_ref().is_none_or(|path| !path.as_os_str().is_empty());
        at.require("dir", named, "the path of a folder");
    }
}
