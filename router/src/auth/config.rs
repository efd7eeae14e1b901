//! The section `auth`.

use super::KeyLimits;
use crate::request::PRIORITY_MAX;
use baton_node::config::{Check, Checker};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Who may call a router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// Hashes of the keys that may call, one a line: `SHA256HEX TENANT [operator] [priority_max=N] [requests_max=N] [tokens_max=N]
    /// [weight=N]`. Unset: everybody may, as one tenant, and only the router's own limits hold.
    pub keys_file: Option<PathBuf>,
    /// The highest priority that requests of a key may ask for, where the file does not say.
    pub priority_max: i32,
    /// Most requests of a key in flight, where the file does not say; 0 is as many as the router takes.
    pub requests_max: u64,
    /// Most tokens of a key in flight, where the file does not say: prompts, and answers as long as they may become; 0 is any number.
    pub tokens_max: u64,
    /// How often the file is read again.
    pub reread_ms: u64,
}

impl Default for AuthConfig {
    fn default() -> Self {
        // Kubernetes itself takes up to a minute to change the file of a secret; more often than this changes nothing that is felt.
        let reread_ms = 5_000;
        // Priorities are handed out. Half of the router's places are left to others.
        Self { keys_file: None, priority_max: 0, requests_max: 1024, tokens_max: 0, reread_ms }
    }
}

impl AuthConfig {
    /// [`AuthConfig::reread_ms`].
    pub(super) fn reread(&self) -> Duration {
        Duration::from_millis(self.reread_ms)
    }

    /// Of keys of which the file says nothing else.
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
    }
}
