//! The section `cache`.

use baton_node::config::{Check, Checker, Secret};
use baton_types::TenantId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Workers keep no block longer than a week.
const MS_MAX: u64 = 7 * 24 * 3_600_000;
/// A secret that is shorter can be guessed.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

/// Settings in the section `cache`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CacheConfig {
    /// Whether requests use the prefix caches of workers.
    pub enabled: bool,
    /// Idle time after which the blocks of a request are evicted, if the request states none; unset: the worker's own
    /// default.
    pub ttl_ms: Option<u64>,
    /// Longest idle time that a request may state.
    pub ttl_ms_max: u64,
    /// Longest time for which a request may pin the blocks of its prompt. 0: requests may not pin, since pinned blocks
    /// take memory from all other requests.
    pub pin_ms_max: u64,
    /// The salts are derived from this secret; all routers of a cluster use the same one. Without it tenants are still
    /// separated, but a client that reaches the workers directly can compute a tenant's salt from its name.
    pub secret: Option<Secret>,
    /// Most distinct blocks in the index of what workers have cached, at 64 to 96 bytes each. Blocks beyond it count as
    /// not cached. 0 keeps no index: then the router does not know what is cached where.
    pub index_blocks_max: usize,
    /// Tenants whose prompts are pinned, and for how many milliseconds, if a request states no time. The workers
    /// enforce their quota.
    pub pins: BTreeMap<TenantId, u64>,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            ttl_ms: None,
            ttl_ms_max: 3_600_000,
            pin_ms_max: 0,
            secret: None,
            // Less than 1 GiB; 160 million tokens in blocks of 16.
            index_blocks_max: 10_000_000,
            pins: BTreeMap::new(),
        }
    }
}

impl Check for CacheConfig {
    fn check(&self, at: &mut Checker) {
        at.range("ttl_ms", self.ttl_ms.unwrap_or(0), 0..=MS_MAX)
            .range("ttl_ms_max", self.ttl_ms_max, 0..=MS_MAX)
            .range("pin_ms_max", self.pin_ms_max, 0..=MS_MAX);
        for (tenant, ms) in self.pins.iter().filter(|(_, ms)| !(1..=MS_MAX).contains(ms)) {
            at.problem("pins", format!("{tenant} must be 1 to {MS_MAX}, got {ms}"));
        }
        let fits = self.secret.as_ref().is_none_or(|secret| SECRET_BYTES.contains(&secret.expose().len()));
        at.require("secret", fits, "16 to 4096 bytes").range("index_blocks_max", self.index_blocks_max, 0..=1 << 30);
    }
}
