//! The dependency direction of the house (ARCHITECTURE.md, "Folders"): each crate and what of ours it may use.

use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Crate, and the crates of ours that its shipped code may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("baton-skips", &[]),
    ("baton-types", &[]),
    ("baton-proto", &["types"]),
    ("baton-text", &["types"]),
    ("baton-kernels", &["types"]),
    ("baton-kv-cache", &["types"]),
    ("baton-kv-transfer", &["types"]),
    ("baton-engine", &["types", "kernels", "kv-cache"]),
    ("baton-node", &["types", "proto"]),
    ("baton-router", &["types", "proto", "node", "text", "kv-cache"]),
    ("baton-worker", &["types", "proto", "node", "text", "kernels", "kv-cache", "engine", "kv-transfer"]),
    ("baton-prefill-worker", &["types", "proto", "node", "kernels", "kv-cache", "engine", "kv-transfer", "worker"]),
    ("baton-decode-worker", &["types", "proto", "node", "kernels", "kv-cache", "engine", "kv-transfer", "worker"]),
    (
        "baton-cli",
        &["types", "proto", "node", "kv-cache", "kv-transfer", "router", "worker", "prefill-worker", "decode-worker"],
    ),
];

/// Crates outside the house's order: they may use everything.
const FREE: &[&str] = &["baton-tests", "xtask"];

pub(super) fn check(root: &Path) -> Vec<String> {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output();
    let metadata: Value = match out.map(|o| serde_json::from_slice(&o.stdout)) {
        Ok(Ok(value)) => value,
        _ => return vec!["cargo metadata failed".into()],
    };
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    packages.iter().flat_map(findings).collect()
}

fn findings(package: &Value) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or_default();
    if FREE.contains(&name) {
        return Vec::new();
    }
    let Some((_, allowed)) = ALLOWED.iter().find(|(n, _)| *n == name) else {
        return vec![format!(
            "crate {name} has no place in the house: add it to xtask/src/tidy/dependencies.rs and ARCHITECTURE.md"
        )];
    };
    let dependencies = package["dependencies"].as_array().cloned().unwrap_or_default();
    let ours =
        dependencies.iter().filter(|d| d["kind"] != "dev").filter_map(|d| d["name"].as_str()?.strip_prefix("baton-"));
    ours.filter(|d| !allowed.contains(d)).map(|d| format!("{name} must not depend on baton-{d}")).collect()
}
