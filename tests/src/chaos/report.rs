//! The report of a run: whether it kept all promises, as a table, a file, and the relevant logs of breaches.

use super::faults::PATIENCE;
use super::judge::{Breach, Tally};
use super::lanes::{PAIRS, Record};
use super::matrix::{Cell, possible};
use super::stage::log_of;
use super::{Plan, logs};
use crate::processes::{commit, trees};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::path::Path;
use std::time::Duration;

/// Share of requests that must succeed under any faults.
const RIGHT_SHARE_MIN: f64 = 0.95;
/// The command of such a run.
const COMMAND: &str = "make chaos";
/// Minimum number of faults of a whole run that last longer than the data plane waits for a silent peer.
const LONGEST_MIN: u64 = 10;
/// Crates that a run tests.
const CRATES: [&str; 13] = [
    "types",
    "proto",
    "text",
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
];
/// Log lines shown per process of a breach.
const LOG_LINES: usize = 40;
/// Length of a shown line.
const LINE_CHARS: usize = 600;

/// The results of one model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Act {
    /// Its name.
    pub model: String,
    pub requests: Tally,
}

/// How often a cell was hit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hits {
    component: String,
    fault: String,
    phase: String,
    hits: u64,
}

/// A whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The command of such a run.
    pub command: String,
    /// The tested code: tree hashes of crates. `cargo xtask release-check` compares them.
    pub trees: BTreeMap<String, String>,
    /// Reproduces the schedule, as far as processes and networks can be scheduled.
    pub seed: u64,
    /// The commit that was tested.
    pub commit: String,
    /// How long faults were injected.
    pub seconds: u64,
    /// Why there were no faults of links; `None` if there were.
    pub no_network: Option<String>,
    /// Injected faults.
    pub faults: u64,
    /// Of these, faults that lasted longer than the data plane waits for a silent peer.
    pub longest: u64,
    /// Attacks on ports of the cluster.
    pub attacks: u64,
    /// Sequences preempted because a pool was full.
    pub preemptions: u64,
    /// All requests.
    pub requests: Tally,
    /// By model.
    pub acts: Vec<Act>,
    /// Handoffs that pairs of workers completed right after a repair.
    pub pairs: u64,
    /// Handoffs requested from them: another fault interrupted the rest.
    pub pairs_asked: u64,
    /// Repairs after which every pair completed a handoff.
    pub all_pairs: u64,
    /// Repairs followed by another fault before all pairs had completed one.
    pub met: u64,
    /// How often all pairs were tested afterwards, while nothing was broken.
    pub whole: u64,
    /// Longest time from the start of a worker until it was ready.
    pub started_s_max: f64,
    /// Longest time from a repair, or from when a restarted worker was ready, until all pairs had completed a handoff.
    pub pairs_s_max: f64,
    /// The same until routers placed on all workers.
    pub admitted_s_max: f64,
    /// The same until no block was quarantined.
    pub quarantine_s_max: f64,
    /// Longest time from the last request until no block was referenced.
    pub quiet_s_max: f64,
    /// By cell of the matrix.
    pub cells: Vec<Hits>,
    /// Broken promises.
    pub breaches: Vec<Breach>,
    /// Minimum results of the plan that the run did not reach.
    pub missed: Vec<String>,
}

/// The results of the models, one after another.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) acts: Vec<Act>,
    pub(super) breaches: Vec<Breach>,
    pub(super) record: Record,
    /// Attacks on ports of the cluster.
    pub(super) attacks: u64,
    pub(super) preemptions: u64,
    pub(super) quiet_max: Duration,
    /// How much longer than planned the run took until each cell had its hits.
    pub(super) longer: Duration,
}

impl Report {
    pub(super) fn new(plan: &Plan, no_network: Option<String>, outcome: Outcome) -> Self {
        let Outcome { acts, breaches, record, attacks, preemptions, quiet_max, longer } = outcome;
        let mut requests = Tally::default();
        acts.iter().for_each(|act| requests.add(&act.requests));
        let links = no_network.is_none();
        let lacking = record.lacking(plan.hits_min, links).into_iter();
        let mut missed: Vec<_> = lacking
            .map(|(Cell(component, fault, phase), hits)| {
                format!("{component} {fault} in {phase}: {hits} hits of {}", plan.hits_min)
            })
            .collect();
        if let (true, Some(why)) = (plan.links, &no_network) {
            missed.push(format!("links: there may be no network of its own here: {why}"));
        }
        if requests.finished < plan.requests_min {
            missed.push(format!("{} requests of {}", requests.finished, plan.requests_min));
        }
        let judged = requests.right + requests.failed_live + requests.failed_dark;
        if (requests.right as f64) < RIGHT_SHARE_MIN * judged as f64 {
            missed.push(format!("{} of {judged} requests right, less than {RIGHT_SHARE_MIN}", requests.right));
        }
        let show = |cell: Cell| Hits {
            component: cell.0.to_string(),
            fault: cell.1.to_string(),
            phase: cell.2.to_string(),
            hits: record.hits_of(cell),
        };
        if plan.hits_min > 0 && links && record.longest < LONGEST_MIN {
            missed.push(format!("{} faults longer than {PATIENCE:?}, of {LONGEST_MIN}", record.longest));
        }
        if plan.hits_min > 0 && preemptions == 0 {
            missed.push("no pool was ever full".into());
        }
        Self {
            command: COMMAND.into(),
            trees: trees(&CRATES),
            seed: plan.seed,
            commit: commit(),
            seconds: (plan.acts.iter().map(|act| act.time).sum::<Duration>() + longer).as_secs(),
            faults: record.faults,
            longest: record.longest,
            attacks,
            preemptions,
            requests,
            acts,
            pairs: record.pairs,
            pairs_asked: record.faults * PAIRS,
            all_pairs: record.all_pairs,
            met: record.met,
            whole: record.whole,
            started_s_max: record.started_max.as_secs_f64(),
            pairs_s_max: record.pairs_max.as_secs_f64(),
            admitted_s_max: record.admitted_max.as_secs_f64(),
            quarantine_s_max: record.quarantine_max.as_secs_f64(),
            quiet_s_max: quiet_max.as_secs_f64(),
            cells: possible(links).map(show).collect(),
            no_network,
            breaches,
            missed,
        }
    }

    /// Whether all promises were kept.
    pub fn is_kept(&self) -> bool {
        self.breaches.is_empty() && self.missed.is_empty()
    }

    /// The last log lines of the processes in breaches.
    pub fn last_words(&self, folder: &Path) -> String {
        let mut text = String::new();
        for (number, act) in self.acts.iter().enumerate() {
            let processes: BTreeSet<&String> = self.breaches.iter().flat_map(|b| &b.processes).collect();
            for process in processes {
                let log = logs(folder, number).join(log_of(process));
                let words = std::fs::read_to_string(&log).unwrap_or_default();
                let lines: Vec<String> = words.lines().map(|line| line.chars().take(LINE_CHARS).collect()).collect();
                let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
                let _ = writeln!(text, "--- {process} with {}, the end of {}\n{last}", act.model, log.display());
            }
        }
        text
    }
}

impl Report {
    /// The outcome of all requests, including retried ones.
    fn headline(&self) -> String {
        let t = &self.requests;
        let judged = t.finished - t.cancelled;
        let share = 100.0 * t.resent as f64 / (t.finished.max(1)) as f64;
        format!(
            "Of {judged} requests that were not cancelled, {} were answered correctly in every bit. Clients sent {} of all {} \
             requests ({share:.1}%) again, to another router or later. Wrong answers: {}. Requests without an end: {}. Failures \
             with a live path: {}; without one: {}.",
            t.right, t.resent, t.finished, t.wrong, t.endless, t.failed_live, t.failed_dark
        )
    }

    fn hits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| Part | Fault | Phase and hits |\n|---|---|---|")?;
        let mut rest = &self.cells[..];
        while let Some(first) = rest.first() {
            let same = |hits: &Hits| hits.component == first.component && hits.fault == first.fault;
            let end = rest.iter().position(|hits| !same(hits)).unwrap_or(rest.len());
            let phases: Vec<String> = rest[..end].iter().map(|h| format!("{} {}", h.phase, h.hits)).collect();
            writeln!(f, "| {} | {} | {} |", first.component, first.fault, phases.join(", "))?;
            rest = &rest[end..];
        }
        Ok(())
    }

    fn models(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| Model | Requests ended | Correct | Sent again | Cancelled | Wrong | Without an end | Failed with a live path | Failed without | With a live path |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|")?;
        let all = Act { model: "all".into(), requests: self.requests.clone() };
        for Act { model, requests: t } in self.acts.iter().chain([&all]) {
            writeln!(
                f,
                "| {model} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                t.finished, t.right, t.resent, t.cancelled, t.wrong, t.endless, t.failed_live, t.failed_dark, t.live
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.headline())?;
        writeln!(
            f,
            "- Seed {}, commit {}, {} s.\n\
             - {} faults, {} of them longer than the {} s after which the data plane gives up a silent peer; {} attacks of the \
             hostile peer; {} preemptions.\n\
             - Handoffs of worker pairs after repairs: {} of {} were made; another fault came before the others. All four pairs \
             made one after {} repairs, another fault came first after {}. {} times all four were asked with nothing broken.\n\
             - Restarted workers were ready within {:.1} s. From there, or from the repair: each handoff within {:.1} s, all \
             routers place on all workers within {:.1} s, no quarantine after {:.2} s.\n\
             - Nothing was referenced {:.1} s after the last request.",
            self.seed,
            self.commit,
            self.seconds,
            self.faults,
            self.longest,
            PATIENCE.as_secs(),
            self.attacks,
            self.preemptions,
            self.pairs,
            self.pairs_asked,
            self.all_pairs,
            self.met,
            self.whole,
            self.started_s_max,
            self.pairs_s_max,
            self.admitted_s_max,
            self.quarantine_s_max,
            self.quiet_s_max
        )?;
        let again: Vec<String> = self.requests.again.iter().map(|(why, n)| format!("{n} ({why})")).collect();
        writeln!(f, "- Reasons for which a client had to send a request again: {}.\n", again.join("; "))?;
        self.models(f)?;
        writeln!(f)?;
        self.hits(f)?;
        if let Some(why) = &self.no_network {
            writeln!(f, "\nNo link failed, without a network of its own: {why}")?;
        }
        self.breaches.iter().try_for_each(|breach| writeln!(f, "\n{breach}"))?;
        self.missed.iter().try_for_each(|missed| writeln!(f, "\nMISSED: {missed}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_to_break_links_and_cannot_is_not_kept() {
        let plan = |links| Plan { links, ..Plan::default() };
        let is_kept = |links, no_network: Option<&str>| {
            Report::new(&plan(links), no_network.map(str::to_owned), Outcome::default()).is_kept()
        };
        assert!(is_kept(true, None) && is_kept(false, Some("no root")));
        assert!(!is_kept(true, Some("no root")));
    }
}
