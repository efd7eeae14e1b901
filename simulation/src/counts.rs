//! How often what happened, over many schedules.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// What a set of schedules has to come to: without one of these it would look at less than it says.
pub const EXPECTED: &[&str] = &[
    "cache: evicted blocks",
    "cache: found tokens",
    "engine: preempted",
    "engine: recomputed tokens",
    "engine: copies of shared blocks",
    "fault: crash",
    "fault: cut",
    "fault: damage",
    "fault: device",
    "fault: drain",
    "fault: etcd away",
    "fault: etcd loses records",
    "fault: etcd wiped",
    "fault: parted",
    "fault: spoilt",
    "fault: stall",
    "fault: watch",
    "flood: requests below their share",
    "get: adopted",
    "get: failed",
    "put: adopted",
    "put: parts",
    "put: sink aborted",
    "put: sink corrupt",
    "put: sink peer_lost",
    "race: grants",
    "race: first tokens",
    "request: cancelled",
    "request: deadline_exceeded",
    "request: overloaded",
    "request: unavailable",
    "request: whole",
    "request: with its router",
    "router: attempts",
    "router: moves",
];

/// Counts of a schedule that runs.
pub type Counting = Arc<Mutex<Counts>>;

/// Counts of one or many schedules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counts(BTreeMap<String, u64>);

impl Counts {
    /// It happened so many times.
    pub fn add(&mut self, what: impl Into<String>, times: u64) {
        if times > 0 {
            *self.0.entry(what.into()).or_default() += times;
        }
    }

    /// Joins two counts.
    pub fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|(what, times)| self.add(what.clone(), *times));
    }

    /// How often it happened.
    pub fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or_default()
    }

    /// What was to happen so many times, and did not.
    pub fn rare(&self, least: u64) -> Vec<&'static str> {
        EXPECTED.iter().copied().filter(|what| self.of(what) < least).collect()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(what, times)| writeln!(f, "{times:>12}  {what}"))
    }
}
