//! How many workers are ready, by model, pool and role. Pure.
//!
//! A missing series raises no alert, so a known series stays, at 0, when its last worker leaves.

use crate::placement::Kind;
use baton_types::{InstanceRecord, Role};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a kind without workers stays known: the alert on missing prefill workers looks back this far.
const GONE_MAX: Duration = Duration::from_secs(6 * 3600);
/// Most kinds without workers that are remembered; the oldest are dropped first.
const GONE_KINDS_MAX: usize = 1024;

/// Recently known kinds of workers, and when each last had a worker.
#[derive(Debug, Default)]
pub(super) struct ReadyWorkers(BTreeMap<Kind, Instant>);

impl ReadyWorkers {
    /// Counts the ready workers of each known kind. `known` are workers with a record, ready or not. Each model has
    /// series for both roles; a role that no worker has had yet has an empty pool. Without any model, both roles have a
    /// series with an empty model.
    pub(super) fn count(
        &mut self,
        known: &[&InstanceRecord],
        ready: &[&InstanceRecord],
        now: Instant,
    ) -> BTreeMap<Kind, usize> {
        self.0.extend(known.iter().chain(ready).map(|worker| (Kind::of(worker), now)));
        self.0.retain(|_, seen| now.saturating_duration_since(*seen) < GONE_MAX);
        self.forget_first(now);
        let mut counts: BTreeMap<Kind, usize> = self.0.keys().map(|kind| (kind.clone(), 0)).collect();
        for worker in ready {
            *counts.entry(Kind::of(worker)).or_default() += 1;
        }
        let mut models: Vec<String> = self.0.keys().map(|kind| kind.model.clone()).collect();
        models.dedup();
        if models.is_empty() {
            models.push(String::new());
        }
        for model in models {
            for role in [Role::Prefill, Role::Decode].map(Role::name) {
                if !self.0.keys().any(|kind| kind.model == model && kind.role == role) {
                    counts.insert(Kind { model: model.clone(), pool: String::new(), role }, 0);
                }
            }
        }
        counts
    }

    fn forget_first(&mut self, now: Instant) {
        let mut gone: Vec<(Instant, Kind)> =
            self.0.iter().filter(|(_, seen)| **seen < now).map(|(kind, seen)| (*seen, kind.clone())).collect();
        gone.sort();
        for (_, kind) in gone.iter().take(gone.len().saturating_sub(GONE_KINDS_MAX)) {
            self.0.remove(kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;

    fn worker(role: Role, model: &str, pool: &str) -> InstanceRecord {
        let mut record = record(role, "w");
        (record.card.id, record.pool) = (model.into(), pool.into());
        record
    }

    fn count(all: &mut ReadyWorkers, known: &[InstanceRecord], ready: &[InstanceRecord], now: Instant) -> String {
        let counts = all.count(&known.iter().collect::<Vec<_>>(), &ready.iter().collect::<Vec<_>>(), now);
        let told = counts.iter().map(|(kind, n)| format!("{}/{}/{} {n}", kind.model, kind.pool, kind.role));
        told.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn a_model_whose_workers_went_stays_at_0_for_a_while() {
        let (start, mut all) = (Instant::now(), ReadyWorkers::default());
        assert_eq!(count(&mut all, &[], &[], start), "//decode 0, //prefill 0", "there is a number from the start");
        let [a, b] = ["a", "b"].map(|model| worker(Role::Decode, model, "default"));
        let p = worker(Role::Prefill, "a", "large");
        let everybody = [a.clone(), a.clone(), b.clone(), p];
        assert_eq!(
            count(&mut all, &everybody, &everybody[1..], start),
            "a/default/decode 1, a/large/prefill 1, b//prefill 0, b/default/decode 1"
        );
        let left = [b];
        let short = start + GONE_MAX - Duration::from_secs(1);
        assert_eq!(
            count(&mut all, &left, &left, short),
            "a/default/decode 0, a/large/prefill 0, b//prefill 0, b/default/decode 1"
        );
        assert_eq!(count(&mut all, &left, &left, start + GONE_MAX), "b//prefill 0, b/default/decode 1");
        assert_eq!(count(&mut all, &[], &[], short + GONE_MAX * 2), "//decode 0, //prefill 0");
    }

    #[test]
    fn a_worker_that_is_not_ready_makes_its_model_known() {
        let (now, mut all) = (Instant::now(), ReadyWorkers::default());
        let d = worker(Role::Decode, "a", "default");
        assert_eq!(count(&mut all, &[d], &[], now), "a//prefill 0, a/default/decode 0");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (start, mut all) = (Instant::now(), ReadyWorkers::default());
        let of = |n: usize| worker(Role::Decode, &format!("{n:05}"), "default");
        let many: Vec<InstanceRecord> = (0..GONE_KINDS_MAX + 10).map(of).collect();
        for (n, worker) in many.iter().enumerate() {
            count(&mut all, std::slice::from_ref(worker), &[], start + Duration::from_millis(n as u64));
        }
        let after = count(&mut all, &many[..1], &[], start + Duration::from_secs(60));
        assert_eq!(all.0.len(), GONE_KINDS_MAX + 1, "and the one that is there");
        assert!(after.contains("00000/") && !after.contains("00005/") && after.contains("01033/"), "{after}");
    }
}
