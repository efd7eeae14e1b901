//! The section `auth`.

use super::KeyLimits;
use super::presented::KEY_BYTES_MAX;
use crate::request::PRIORITY_MAX;
use baton_node::config::{Check, Checker, Secret};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// API keys and their default limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// Hashes of the keys that may call, one per line: `SHA256HEX TENANT [operator] [priority_max=N] [requests_max=N]
    /// [tokens_max=N] [weight=N]`. Unset: every caller may, all as one tenant, and only the router's own limits apply.
    pub keys_file: Option<PathBuf>,
    /// The one key that all callers share, in place of a file: they are one tenant, with the limits below.
    pub api_key: Option<Secret>,
    /// The highest priority that requests of a key may ask for, unless the file sets it.
    pub priority_max: i32,
    /// Most requests of a key in flight, unless the file sets it; 0 means no limit per key.
    pub requests_max: u64,
    /// Most tokens of a key in flight, unless the file sets it: prompt tokens plus the largest possible number of
    /// output tokens; 0 means no limit.
    pub tokens_max: u64,
    /// Interval between reads of the file.
    pub reread_ms: u64,
}

impl Default for AuthConfig {
    fn default() -> Self {
        // Kubernetes takes up to a minute to update the file of a secret, so a shorter interval has no visible effect.
        let reread_ms = 5_000;
        // Higher priorities must be granted in the file. Half of the router's slots are left for other keys.
        Self { keys_file: None, api_key: None, priority_max: 0, requests_max: 1024, tokens_max: 0, reread_ms }
    }
}

impl AuthConfig {
    /// Whether callers need a key.
    pub(crate) fn has_keys(&self) -> bool {
        self.keys_file.is_some() || self.api_key.is_some()
    }

    /// The interval of [`AuthConfig::reread_ms`].
    pub(super) fn reread(&self) -> Duration {
        Duration::from_millis(self.reread_ms)
    }

    /// Limits of keys for which the file sets none.
    pub(super) fn limits(&self) -> KeyLimits {
        let bound = |max: u64| if max == 0 { u64::MAX } else { max };
        KeyLimits {
            priority_max: self.priority_max,
            requests_max: bound(self.requests_max),
            tokens_max: bound(self.tokens_max),
        }
    }
}

impl Check for AuthConfig {
    fn check(&self, at: &mut Checker) {
        at.range("priority_max", self.priority_max, -PRIORITY_MAX..=PRIORITY_MAX);
        at.range("reread_ms", self.reread_ms, 10..=600_000);
        let named = self.keys_file.as_ref().is_none_or(|path| !path.as_os_str().is_empty());
        at.require("keys_file", named, "the path of a file");
        if let Some(key) = self.api_key.as_ref().map(Secret::expose) {
            let is_key = (1..=KEY_BYTES_MAX).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
            at.require("api_key", is_key, "1 to 512 printable ASCII characters without spaces");
            at.require(
                "api_key",
                self.keys_file.is_none(),
                "unset where auth.keys_file is set: the file holds all keys",
            );
        }
    }
}
