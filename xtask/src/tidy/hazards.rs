//! Deliberate defects and test doubles are behind a feature `testing`, which no product crate enables. A crate with that feature contains
//! a marker that `cargo xtask hazards` searches for in binaries, so that an enabled feature is noticed.

use super::Source;
use crate::hazards::MARKER;
use serde_json::Value;

const FEATURE: &str = "testing";
/// Crates that never ship.
const NEVER_SHIPPED: &[&str] = &["baton-tests", "xtask"];

/// Takes the workspace's `cargo metadata`.
pub(super) fn check(metadata: &Value, sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        if NEVER_SHIPPED.contains(&name) {
            continue;
        }
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        let on = |d: &&Value| d["kind"] != "dev" && has(&d["features"], FEATURE);
        for dependency in dependencies.filter(on).filter_map(|d| d["name"].as_str()) {
            found.push(format!("{name} ships and switches `{FEATURE}` of {dependency} on: only dev-dependencies may"));
        }
        for (feature, enables) in package["features"].as_object().into_iter().flatten() {
            let others = enables.as_array().into_iter().flatten().filter_map(Value::as_str);
            let hidden = others.filter(|e| *e == FEATURE || e.ends_with(&format!("/{FEATURE}")));
            let hidden = hidden.filter(|_| feature != FEATURE);
            found.extend(hidden.map(|enabled| format!("{name}: feature `{feature}` switches `{enabled}` on")));
        }
        if package["features"].get(FEATURE).is_some() && !is_marked(package, sources) {
            found
                .push(format!("{name} has a feature `{FEATURE}` and no static with {MARKER}: it could ship unnoticed"));
        }
    }
    found
}

fn has(list: &Value, wanted: &str) -> bool {
    list.as_array().is_some_and(|list| list.iter().any(|item| item == wanted))
}

/// Whether a `#[used]` static of the crate contains the marker.
fn is_marked(package: &Value, sources: &[Source]) -> bool {
    let manifest = package["manifest_path"].as_str().unwrap_or_default();
    let mut own = sources.iter().filter(|s| {
        // `folder/src/…` of the package whose manifest ends in `/folder/Cargo.toml`.
        s.path.split_once("/src/").is_some_and(|(folder, _)| manifest.ends_with(&format!("/{folder}/Cargo.toml")))
    });
    own.any(|s| s.text.split("#[used]").skip(1).any(|rest| rest.lines().take(3).any(|line| line.contains(MARKER))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(package: Value, text: &str) -> usize {
        let source = Source { path: "kernels/src/mutant.rs".into(), text: text.into() };
        check(&json!({"packages": [package]}), &[source]).len()
    }

    #[test]
    fn a_shipped_crate_that_switches_testing_on_is_found() {
        let with = |kind: &str, name: &str| {
            let dependency = json!({"name": "baton-kernels", "kind": kind, "features": ["testing"]});
            found(json!({"name": name, "features": {}, "dependencies": [dependency]}), "")
        };
        assert_eq!(
            [with("normal", "baton-worker"), with("dev", "baton-worker"), with("normal", "baton-tests")],
            [1, 0, 0]
        );
        let feature =
            |name: &str| found(json!({"name": "baton-worker", "features": {name: ["baton-kernels/testing"]}}), "");
        assert_eq!(feature("default"), 1);
    }

    #[test]
    fn a_feature_without_its_marker_is_found() {
        let package =
            || json!({"name": "baton-kernels", "manifest_path": "/x/kernels/Cargo.toml", "features": {"testing": []}});
        let marked = "#[used]\nstatic MARKER: &str = \"BATON_TESTING_HAZARD kernels\";";
        assert_eq!([found(package(), marked), found(package(), "// BATON_TESTING_HAZARD")], [0, 1]);
    }
}
