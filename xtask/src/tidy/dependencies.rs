//! The direction of dependencies between crates (ARCHITECTURE.md, "Folders"): which workspace crates each crate may use, and which the
//! router must never link.

use serde_json::Value;
use std::collections::BTreeSet;

/// Crate, and the workspace crates that its product code may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("baton-skips", &[]),
    ("baton-types", &[]),
    ("baton-proto", &["types"]),
    ("baton-text", &["types"]),
    ("baton-memory", &["types"]),
    ("baton-kernels", &["types", "memory"]),
    ("baton-kv-cache", &["types"]),
    ("baton-kv-transfer", &["types", "memory"]),
    ("baton-engine", &["types", "memory", "kernels", "kv-cache"]),
    ("baton-node", &["types", "proto"]),
    ("baton-router", &["types", "proto", "node", "text", "kv-cache"]),
    ("baton-worker", &["types", "proto", "node", "text", "memory", "kernels", "kv-cache", "engine", "kv-transfer"]),
    ("baton-prefill-worker", &["types", "proto", "node", "kv-cache", "engine", "kv-transfer", "worker"]),
    ("baton-decode-worker", &["types", "proto", "node", "kv-cache", "engine", "kv-transfer", "worker"]),
    (
        "baton-simulation",
        &[
            "types",
            "memory",
            "kernels",
            "kv-cache",
            "kv-transfer",
            "engine",
            "node",
            "router",
            "worker",
            "prefill-worker",
            "decode-worker",
        ],
    ),
    ("baton-cli", &["types", "proto", "node", "kernels", "kv-transfer", "router", "worker", "simulation"]),
];

/// Crates without a layer: they may use every crate.
const FREE: &[&str] = &["baton-tests", "xtask"];

/// Crate, and the workspace crates that must not be linked into it, even indirectly.
const NOT_LINKED: &[(&str, &[&str])] = &[("baton-router", &["memory", "kernels", "engine", "kv-transfer"])];

/// Takes the workspace's `cargo metadata`.
pub(super) fn check(metadata: &Value) -> Vec<String> {
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let mut found: Vec<String> = packages.iter().flat_map(direct).collect();
    for (name, absent) in NOT_LINKED {
        let linked = linked(packages, name);
        let wrong = absent.iter().filter(|a| linked.contains(**a));
        found.extend(wrong.map(|a| format!("{name} must not link baton-{a}, which comes through its dependencies")));
    }
    found
}

fn direct(package: &Value) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or_default();
    if FREE.contains(&name) {
        return Vec::new();
    }
    let Some((_, allowed)) = ALLOWED.iter().find(|(n, _)| *n == name) else {
        return vec![format!(
            "crate {name} has no place in the house: add it to xtask/src/tidy/dependencies.rs and ARCHITECTURE.md"
        )];
    };
    let wrong = ours(package).filter(|d| !allowed.contains(d));
    wrong.map(|d| format!("{name} must not depend on baton-{d}")).collect()
}

/// Workspace crates that the product code of a package names, without `baton-`.
fn ours(package: &Value) -> impl Iterator<Item = &str> {
    let dependencies = package["dependencies"].as_array().into_iter().flatten().filter(|d| d["kind"] != "dev");
    dependencies.filter_map(|d| d["name"].as_str()?.strip_prefix("baton-"))
}

/// Workspace crates that are linked into `name`, without `baton-`.
fn linked<'a>(packages: &'a [Value], name: &str) -> BTreeSet<&'a str> {
    let find = |name: &str| packages.iter().find(|package| package["name"] == name);
    let mut linked = BTreeSet::new();
    let mut next: Vec<&Value> = find(name).into_iter().collect();
    while let Some(package) = next.pop() {
        for dependency in ours(package) {
            if linked.insert(dependency) {
                next.extend(find(&format!("baton-{dependency}")));
            }
        }
    }
    linked
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(packages: &[(&str, &[(&str, &str)])]) -> Vec<String> {
        let dependency = |(name, kind): &(&str, &str)| json!({"name": name, "kind": kind});
        let package = |(name, uses): &(&str, &[(&str, &str)])| json!({"name": name, "dependencies": uses.iter().map(dependency).collect::<Vec<_>>()});
        check(&json!({"packages": packages.iter().map(package).collect::<Vec<_>>()}))
    }

    #[test]
    fn a_dependency_upwards_is_found() {
        assert_eq!(found(&[("baton-engine", &[("baton-types", "normal"), ("baton-node", "dev")])]), [""; 0]);
        assert_eq!(
            found(&[("baton-engine", &[("baton-node", "normal")])]),
            ["baton-engine must not depend on baton-node"]
        );
        assert_eq!(found(&[("baton-engine", &[("baton-node", "build")])]).len(), 1);
        assert_eq!(found(&[("baton-new", &[])]).len(), 1);
    }

    #[test]
    fn what_the_router_links_by_way_of_another_is_found() {
        let router: (&str, &[(&str, &str)]) = ("baton-router", &[("baton-text", "normal")]);
        let found = found(&[router, ("baton-text", &[("baton-engine", "normal")])]);
        assert!(found.iter().any(|f| f.starts_with("baton-router must not link baton-engine")), "{found:?}");
    }
}
