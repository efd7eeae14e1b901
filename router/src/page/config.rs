//! The section `page`.

use baton_node::config::{Check, Checker};
use serde::{Deserialize, Serialize};

/// The page at `/`, and what it shows of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PageConfig {
    /// Whether the HTTP port serves the page and the routes below `/cluster`.
    pub enabled: bool,
    /// Without `auth.keys_file`: whether everyone who reaches the HTTP port may see the cluster and recent requests,
    /// although the router has an identity. `baton up` sets it where it listens on loopback alone.
    pub open: bool,
    /// Most event streams of the cluster at once; more are refused.
    pub watchers_max: usize,
}

impl Default for PageConfig {
    fn default() -> Self {
        // A team and its wall screens; each stream takes the memory of one event.
        Self { enabled: true, open: false, watchers_max: 32 }
    }
}

impl Check for PageConfig {
    fn check(&self, at: &mut Checker) {
        at.range("watchers_max", self.watchers_max, 1..=1024);
    }
}
