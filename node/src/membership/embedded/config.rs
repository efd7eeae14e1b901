//! The section `membership`, of routers and of workers.

use crate::config::{Check, Checker, list};
use crate::membership::Backend;
use crate::membership::etcd::EtcdConfig;
use baton_types::ProtocolRange;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Lease settings of a router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeaseConfig {
    /// The backend that keeps the leases: `embedded` or `etcd`.
    pub backend: Backend,
    /// A worker that is silent for this long is removed; `embedded` only.
    pub lease_ms: u64,
    /// Most instances that may be registered at once.
    pub members_max: usize,
    /// Settings for the backend `etcd`.
    pub etcd: EtcdConfig,
    /// Folder for the last known records, so that a router that starts without etcd knows which workers to ask; `etcd`
    /// only.
    pub cache_dir: Option<PathBuf>,
    /// gRPC addresses of workers, `host:port`, that are asked for their records in that case; a name stands for all of
    /// its addresses. `etcd` only.
    #[serde(deserialize_with = "list")]
    pub seeds: Vec<String>,
    /// Workers that support no version of this range are refused. No configuration layer sets it, only tests of version
    /// skew.
    #[serde(skip)]
    pub protocol: ProtocolRange,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        let (etcd, protocol) = (EtcdConfig::default(), ProtocolRange::CURRENT);
        Self {
            backend: Backend::Embedded,
            lease_ms: 5_000,
            members_max: 1_024,
            etcd,
            cache_dir: None,
            seeds: Vec::new(),
            protocol,
        }
    }
}

impl Check for LeaseConfig {
    fn check(&self, at: &mut Checker) {
        at.range("lease_ms", self.lease_ms, 100..=600_000)
            .range("members_max", self.members_max, 1..=65_536)
            .require(
                "seeds",
                self.seeds.len() <= 64 && self.seeds.iter().all(|seed| is_address(seed)),
                "at most 64 addresses, host:port",
            )
            .section("etcd", &self.etcd);
    }
}

fn is_address(seed: &str) -> bool {
    seed.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// Where a worker registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JoinConfig {
    /// Where this worker registers: `embedded`, at its routers, or `etcd`.
    pub backend: Backend,
    /// Cluster addresses of all routers, `host:port`; `embedded` only.
    #[serde(deserialize_with = "list")]
    pub routers: Vec<String>,
    /// Most other workers that this one stores; as `membership.members_max` of routers.
    pub members_max: usize,
    /// Longest connect, and longest wait for a router's answer to a registration.
    pub connect_ms_max: u64,
    /// Shortest wait before registering again; doubles with every failure, with jitter.
    pub backoff_ms_min: u64,
    /// Longest wait before registering again.
    pub backoff_ms_max: u64,
    /// Settings for the backend `etcd`.
    pub etcd: EtcdConfig,
}

impl Default for JoinConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Embedded,
            routers: vec!["127.0.0.1:50052".into()],
            members_max: 1_024,
            connect_ms_max: 2_000,
            backoff_ms_min: 100,
            backoff_ms_max: 5_000,
            etcd: EtcdConfig::default(),
        }
    }
}

impl Check for JoinConfig {
    fn check(&self, at: &mut Checker) {
        at.require("routers", (1..=16).contains(&self.routers.len()), "1 to 16 addresses of routers")
            .range("members_max", self.members_max, 1..=65_536)
            .range("connect_ms_max", self.connect_ms_max, 10..=60_000)
            .range("backoff_ms_min", self.backoff_ms_min, 1..=60_000)
            .range("backoff_ms_max", self.backoff_ms_max, self.backoff_ms_min..=600_000)
            .section("etcd", &self.etcd);
    }
}
