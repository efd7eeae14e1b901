//! Passes `BATON_*` variables only to the processes that know them: a worker would refuse a router's key, and vice versa.

use crate::etcd::{self, key_of};
use anyhow::{bail, ensure};
use baton_node::environment;

/// Sections of the configuration tree that every process has.
const SHARED: [&str; 5] = ["admin", "drain", "grpc", "identity", "telemetry"];
/// Sections of routers. Workers have a `membership` section too, but here flags set all of it except etcd's part.
const ROUTER: [&str; 12] = [
    "auth",
    "cache",
    "cluster",
    "http",
    "limits",
    "membership",
    "metrics",
    "page",
    "placement",
    "prices",
    "retry",
    "tls",
];
/// Sections that only workers have.
const WORKER: [&str; 4] = ["engine", "instance", "model", "transfer"];

/// This process's variables that only some of its children may receive.
#[derive(Debug, PartialEq)]
pub(super) struct Variables {
    router: Vec<String>,
    worker: Vec<String>,
}

impl Variables {
    /// Sorts the variables of this process. A variable that no child knows is an error, as it is in each of them.
    pub(super) fn of_process() -> anyhow::Result<Self> {
        Self::sort(environment::own())
    }

    fn sort(names: impl IntoIterator<Item = String>) -> anyhow::Result<Self> {
        let mut sorted = Self { router: Vec::new(), worker: Vec::new() };
        for name in names {
            let key = key_of(&name);
            ensure!(
                key != "config",
                "{name} names the configuration file of one process, but `baton up` starts several: unset it"
            );
            let section = key.split("__").next().unwrap_or_default();
            // A part of a section that every process has.
            if key.starts_with(etcd::VARIABLES) {
                continue;
            }
            if ROUTER.contains(&section) {
                sorted.router.push(name);
            } else if WORKER.contains(&section) {
                sorted.worker.push(name);
            } else if !SHARED.contains(&section) {
                bail!("environment variable {name} sets nothing: no process of a cluster has a section `{section}`");
            }
        }
        Ok(sorted)
    }

    /// Variables removed for a router.
    pub(super) fn not_for_routers(&self) -> impl Iterator<Item = &str> {
        self.worker.iter().map(String::as_str)
    }

    /// Variables removed for a worker.
    pub(super) fn not_for_workers(&self) -> impl Iterator<Item = &str> {
        self.router.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_gets_the_sections_that_it_knows() {
        let sort = |names: &[&str]| Variables::sort(names.iter().map(|n| (*n).to_owned()));
        let names = [
            "BATON_TELEMETRY__LOG",
            "BATON_MEMBERSHIP__ETCD__USER",
            "BATON_MEMBERSHIP__LEASE_MS",
            "BATON_ENGINE__THREADS",
            "BATON_LIMITS__RUNNING_MAX",
            "BATON_HTTP__LISTEN",
        ];
        let sorted = sort(&names).unwrap();
        assert_eq!(sorted.not_for_routers().collect::<Vec<_>>(), ["BATON_ENGINE__THREADS"]);
        assert_eq!(
            sorted.not_for_workers().collect::<Vec<_>>(),
            ["BATON_MEMBERSHIP__LEASE_MS", "BATON_LIMITS__RUNNING_MAX", "BATON_HTTP__LISTEN"]
        );
        for (name, says) in [("BATON_CONFIG", "unset it"), ("BATON_LIMIT__RUNNING_MAX", "no process")] {
            let message = sort(&[name]).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains(says), "{message}");
        }
    }

    #[test]
    fn every_section_of_either_tree_is_known_here() {
        fn sections(tree: impl serde::Serialize) -> Vec<String> {
            serde_json::to_value(tree).unwrap().as_object().unwrap().keys().cloned().collect()
        }
        let of_routers = sections(baton_router::RouterConfig::default());
        let of_workers = sections(baton_worker::config::WorkerConfig::default());
        for section in of_routers.iter().chain(&of_workers) {
            let here = [&ROUTER[..], &WORKER, &SHARED].map(|known| known.contains(&section.as_str()));
            let both = of_routers.contains(section) && of_workers.contains(section);
            let one = if of_routers.contains(section) { [true, false, false] } else { [false, true, false] };
            let expected = if both && section != "membership" { [false, false, true] } else { one };
            assert_eq!(here, expected, "{section}");
        }
    }
}
