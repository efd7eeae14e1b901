//! The section `membership.etcd`, the same on routers and workers.

use crate::backoff::Backoff;
use crate::config::{Check, Checker, list};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Connection to etcd, and its use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EtcdConfig {
    /// Client addresses of the etcd cluster, `http://host:port` or `https://host:port`.
    #[serde(deserialize_with = "list")]
    pub endpoints: Vec<String>,
    /// Prefix of all keys of this cluster; ends in `/`.
    pub prefix: String,
    /// User name at etcd; unset connects without one.
    pub user: Option<String>,
    /// File with the password; read at every connect, so that it can be changed in place.
    pub password_file: Option<PathBuf>,
    /// PEM file of the authority that signed etcd's certificate. If an endpoint is https:// and none of these three is
    /// set, the files of `identity.dir` are used.
    pub ca: Option<PathBuf>,
    /// PEM file of the client certificate of this process.
    pub cert: Option<PathBuf>,
    /// PEM file of its key.
    pub key: Option<PathBuf>,
    /// Lease time, in seconds: a process that does not renew it for this long is gone. etcd counts in whole seconds.
    /// Leases are renewed at half the remaining time.
    pub lease_ttl_s: u32,
    /// Longest wait for an answer from etcd.
    pub request_ms_max: u64,
    /// Shortest wait before reconnecting to etcd; doubles with every failure, with jitter.
    pub backoff_ms_min: u64,
    /// Longest wait before reconnecting to etcd.
    pub backoff_ms_max: u64,
    /// After etcd was wiped or restored, workers have this long to register again before a router asks them directly.
    /// Records that vanish within this time of each other are evaluated together.
    pub view_grace_ms: u64,
    /// Longest wait for the answer of a worker that a router asks whether it is alive.
    pub probe_ms_max: u64,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self {
            endpoints: vec!["http://127.0.0.1:2379".into()],
            prefix: "/baton/default/".into(),
            user: None,
            password_file: None,
            ca: None,
            cert: None,
            key: None,
            lease_ttl_s: 10,
            request_ms_max: 2_000,
            backoff_ms_min: 50,
            backoff_ms_max: 2_000,
            view_grace_ms: 30_000,
            probe_ms_max: 1_000,
        }
    }
}

impl EtcdConfig {
    pub(super) fn lease_ttl(&self) -> Duration {
        Duration::from_secs(self.lease_ttl_s.into())
    }

    pub(super) fn backoff(&self) -> Backoff<String> {
        Backoff::new(Duration::from_millis(self.backoff_ms_min), Duration::from_millis(self.backoff_ms_max))
    }

    pub(super) fn request_max(&self) -> Duration {
        Duration::from_millis(self.request_ms_max)
    }
}

impl Check for EtcdConfig {
    fn check(&self, at: &mut Checker) {
        let url = |e: &String| e.starts_with("http://") || e.starts_with("https://");
        let (secure, plain) = (|e: &String| e.starts_with("https://"), |e: &String| e.starts_with("http://"));
        at.require(
            "endpoints",
            (1..=16).contains(&self.endpoints.len()) && self.endpoints.iter().all(url),
            "1 to 16 addresses, http://host:port or https://host:port",
        )
        .require(
            "endpoints",
            !(self.endpoints.iter().any(secure) && self.endpoints.iter().any(plain)),
            "all http:// or all https://",
        )
        .require(
            "prefix",
            self.prefix.ends_with('/') && self.prefix.len() <= 256,
            "a key of at most 256 bytes that ends in /",
        )
        .require("cert", self.cert.is_some() == self.key.is_some(), "set together with membership.etcd.key")
        .require(
            "user",
            self.user.is_some() == self.password_file.is_some(),
            "set together with membership.etcd.password_file",
        )
        .range("lease_ttl_s", self.lease_ttl_s, 1..=600)
        .range("request_ms_max", self.request_ms_max, 10..=60_000)
        .range("backoff_ms_min", self.backoff_ms_min, 1..=60_000)
        .range("backoff_ms_max", self.backoff_ms_max, self.backoff_ms_min..=600_000)
        .range("view_grace_ms", self.view_grace_ms, 0..=3_600_000)
        .range("probe_ms_max", self.probe_ms_max, 10..=60_000);
    }
}
