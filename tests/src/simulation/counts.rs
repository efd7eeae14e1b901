//! How often each transition was taken.

use std::collections::BTreeMap;
use std::fmt;

/// Transitions of the cores, by machine. Those of the sink and the source are pairs of states, the others decisions.
const EXPECTED: &[(&str, &[&str])] = &[
    (
        "sink",
        &[
            "claimed > reserved",
            "claimed > free",
            "reserved > receiving",
            "reserved > aborting",
            "reserved > quarantined",
            "reserved > free",
            "receiving > running",
            "receiving > aborting",
            "receiving > quarantined",
            "receiving > free",
            "aborting > quarantined",
            "aborting > free",
            "quarantined > free",
        ],
    ),
    (
        "source",
        &[
            "offering > writing",
            "offering > ended",
            "writing > committed",
            "writing > flushing",
            "writing > ended",
            "committed > ended",
            "flushing > ended",
        ],
    ),
    ("recovery goes on after", &["place", "claim", "prefill", "handoff", "decode"]),
    ("recovery gives up", &["futile", "attempts", "budget", "no_worker", "deadline"]),
    (
        "recovery avoids",
        &[
            "nobody",
            "prefill softly",
            "prefill strictly, decode softly",
            "decode softly",
            "decode strictly",
            "both softly",
        ],
    ),
    (
        "pair",
        &[
            "prefill token > token",
            "prefill done > done",
            "prefill finds no room > handoff",
            "prefill ended > nothing yet",
            "prefill ended > prefill",
            "adopted > nothing yet",
            "decode token > token",
            "decode token > nothing yet",
            "early token",
            "decode states an error > nothing yet",
            "decode states an error > prefill",
            "decode states an error > handoff",
            "decode states an error > decode",
            "decode breaks > decode",
            "doubt ends",
        ],
    ),
    (
        "claim",
        &[
            "none > booked",
            "none > overloaded",
            "offered",
            "booked > adopted",
            "booked > failed",
            "booked > ended with its stream",
        ],
    ),
    (
        "placement",
        &[
            "remote_policy",
            "remote_long_prompt",
            "local_policy",
            "local_short_prompt",
            "local_no_prefill_worker",
            "local_prefill_full",
            "trusted",
            "untried",
            "decoders again",
            "other pairs",
            "all",
        ],
    ),
    (
        "view",
        &[
            "joins",
            "leaves",
            "is replaced",
            "registers again",
            "is doubted",
            "doubt ends with a record",
            "doubt ends with a rival",
            "doubt ends without an answer",
            "same history",
            "other history",
            "resumes",
            "answers",
            "does not answer",
        ],
    ),
    ("leases", &["joined", "renewed", "replaced", "ended"]),
    ("scheduler", &["preempted", "deadline", "stalled"]),
    ("sink waits", &["quarantine", "room", "room behind others"]),
    ("sink refuses", &["busy", "quarantine", "unknown_request", "wrong_incarnation"]),
    ("sink ends", &["aborted", "aborted_by_peer", "adopted", "corrupt", "deadline", "not_adopted", "peer_lost"]),
    (
        "source ends",
        &[
            "aborted",
            "aborted_by_peer",
            "adopted",
            "corrupt",
            "deadline",
            "device",
            "not_adopted",
            "peer_lost",
            "refused",
        ],
    ),
    ("cancel x commit", &["adopted, then cancelled", "cancelled, then committed", "aborted, then committed"]),
    (
        "request ends",
        &[
            "cancelled",
            "context_length_exceeded",
            "deadline_exceeded",
            "internal",
            "no router",
            "not admitted",
            "ok",
            "overloaded",
            "unavailable",
            "with its router",
        ],
    ),
];

/// Counts of many schedules.
#[derive(Clone, Debug, Default)]
pub struct Counts(BTreeMap<(&'static str, &'static str, &'static str), u64>);

impl Counts {
    /// A machine moved.
    pub(super) fn moved(&mut self, machine: &'static str, before: &'static str, after: &'static str) {
        if before != after {
            *self.0.entry((machine, before, after)).or_default() += 1;
        }
    }

    /// A decision was taken, or a thing happened.
    pub(super) fn add(&mut self, machine: &'static str, what: &'static str) {
        *self.0.entry((machine, what, "")).or_default() += 1;
    }

    /// Joins two counts.
    pub fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|(key, n)| *self.0.entry(*key).or_default() += n);
    }

    /// All counts as `(machine, transition, times)`.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, String, u64)> {
        self.0.iter().map(|(&(machine, before, after), &n)| {
            (machine, if after.is_empty() { before.to_owned() } else { format!("{before} > {after}") }, n)
        })
    }

    /// Transitions that were taken and are not among those to be taken.
    pub fn unexpected(&self) -> Vec<String> {
        let is_expected =
            |machine: &str, what: &str| EXPECTED.iter().any(|(m, all)| *m == machine && all.contains(&what));
        let taken = self.all().filter(|(machine, what, _)| !is_expected(machine, what));
        taken.map(|(machine, what, n)| format!("{machine}: {what}: {n}")).collect()
    }

    /// Transitions that were to be taken `least` times and were not.
    pub fn rare(&self, least: u64) -> Vec<String> {
        let taken: BTreeMap<(&str, String), u64> = self.all().map(|(m, what, n)| ((m, what), n)).collect();
        let expected = EXPECTED.iter().flat_map(|(machine, all)| all.iter().map(move |what| (*machine, *what)));
        let times = |(machine, what): (&str, &str)| taken.get(&(machine, what.to_owned())).copied().unwrap_or_default();
        let rare = expected.map(|which| (which, times(which))).filter(|(_, n)| *n < least);
        rare.map(|((machine, what), n)| format!("{machine}: {what}: {n}")).collect()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.all().try_for_each(|(machine, what, n)| writeln!(f, "| {machine} | {what} | {n} |"))
    }
}
