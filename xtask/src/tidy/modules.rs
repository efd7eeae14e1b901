//! A module with files of its own is `x/mod.rs`, never `x.rs` beside `x/`: one style.

use super::{Exceptions, Source};
use std::collections::HashSet;

/// Modules of the other style. To be emptied: one that moved has to go from here.
const EXCEPTIONS: &[&str] = &[
    "cli/src/doctor/link/connect.rs",
    "cli/src/doctor/rdma.rs",
    "engine/tests/reference.rs",
    "kv-cache/src/cache.rs",
    "kv-cache/src/index.rs",
    "kv-cache/src/pool.rs",
    "node/src/config.rs",
    "node/src/grpc.rs",
    "node/src/identity.rs",
    "node/src/listen.rs",
    "node/src/membership.rs",
    "node/src/membership/embedded.rs",
    "node/src/membership/etcd.rs",
    "node/src/membership/etcd/router.rs",
    "node/src/membership/etcd/tests.rs",
    "node/src/metrics.rs",
    "node/src/telemetry.rs",
    "node/src/telemetry/tests.rs",
    "node/src/testing.rs",
    "node/src/testing/etcd.rs",
    "prefill-worker/src/tests.rs",
    "proto/src/convert.rs",
    "router/src/metrics.rs",
    "router/src/placement/tests.rs",
    "worker/src/models/default_model.rs",
];

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    findings(sources, EXCEPTIONS)
}

fn findings(sources: &[Source], exceptions: &[&str]) -> Vec<String> {
    let mut exceptions = Exceptions::new(exceptions, "is `x.rs` beside `x/`");
    let rust = || sources.iter().map(|s| s.path.as_str()).filter(|path| path.ends_with(".rs"));
    let folders: HashSet<&str> = rust().filter_map(|path| Some(path.rsplit_once('/')?.0)).collect();
    let mut found = Vec::new();
    for path in rust() {
        let module = path.trim_end_matches(".rs");
        if folders.contains(module) && !exceptions.cover(path) {
            found.push(format!("{path}: has files of its own: move it to {module}/mod.rs"));
        }
    }
    found.extend(exceptions.unneeded());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_style_of_modules() {
        let found = |paths: &[&str], exceptions: &[&str]| {
            let source = |path: &&str| Source { path: (*path).into(), text: String::new() };
            findings(&paths.iter().map(source).collect::<Vec<_>>(), exceptions).len()
        };
        let mixed = ["a/src/x.rs", "a/src/x/y.rs"];
        assert_eq!(found(&["a/src/x/mod.rs", "a/src/x/y.rs", "a/src/z.rs"], &[]), 0);
        assert_eq!((found(&mixed, &[]), found(&mixed, &["a/src/x.rs"])), (1, 0));
        assert_eq!(found(&["a/src/x/mod.rs"], &["a/src/x.rs"]), 1, "the exception is no longer needed");
    }
}
