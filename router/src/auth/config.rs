//! The section `auth`.

use baton_node::config::{Check, Checker};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Who may call a router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// Hashes of the keys that may call, one a line: `SHA256HEX TENANT [operator]`. Unset: everybody may, as one tenant.
    pub keys_file: Option<PathBuf>,
    /// How often the file is read again.
    pub reread_ms: u64,
}

impl Default for AuthConfig {
    fn default() -> Self {
        // Kubernetes itself takes up to a minute to change the file of a secret; more often than this changes nothing that is felt.
        Self { keys_file: None, reread_ms: 5_000 }
    }
}

impl AuthConfig {
    /// [`AuthConfig::reread_ms`].
    pub(super) fn reread(&self) -> Duration {
        Duration::from_millis(self.reread_ms)
    }
}

impl Check for AuthConfig {
    fn check(&self, at: &mut Checker) {
        at.range("reread_ms", self.reread_ms, 10..=600_000);
        let named = self.keys_file.as_ref().is_none_or(|path| !path.as_os_str().is_empty());
        at.require("keys_file", named, "the path of a file");
    }
}
