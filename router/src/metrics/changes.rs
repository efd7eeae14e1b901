//! Workers that joined and left, as this router saw it.

use super::Name;
use baton_types::InstanceRecord;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most pairs of a model and a pool with series of their own; workers choose these names.
const KINDS_MAX: usize = 1024;

/// A change of a worker's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MembershipChange {
    /// A record of it appeared.
    Joined,
    /// Its record has a new registration, after etcd lost the old one.
    RegisteredAgain,
    /// Its load reports arrive, and requests are placed on it.
    Admitted,
    /// No requests are placed on it any more, since its load reports stopped.
    Evicted,
    /// Its record was deleted.
    Left,
}

impl MembershipChange {
    const fn name(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::RegisteredAgain => "registered_again",
            Self::Admitted => "admitted",
            Self::Evicted => "evicted",
            Self::Left => "left",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    model: String,
    pool: String,
    role: Name,
    change: Name,
}

/// Counts changes of workers' states. Cloning shares the counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct MembershipChanges {
    counters: Family<Labels, Counter>,
    /// The models and pools that have series.
    kinds: Arc<Mutex<BTreeSet<(String, String)>>>,
}

impl MembershipChanges {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let new = Self::default();
        registry.register(
            "router_membership_changes",
            "Workers that came or went, by what became of them",
            new.counters.clone(),
        );
        new
    }

    /// Beyond [`KINDS_MAX`] models and pools, others are counted without these names.
    pub(crate) fn count(&self, of: &InstanceRecord, change: MembershipChange) {
        let (model, pool) = self.kind((of.card.id.clone(), of.pool.clone()));
        let labels = Labels { model, pool, role: Name(of.role.name()), change: Name(change.name()) };
        self.counters.get_or_create(&labels).inc();
    }

    fn kind(&self, kind: (String, String)) -> (String, String) {
        let mut kinds = self.kinds.lock();
        if kinds.len() < KINDS_MAX {
            kinds.insert(kind.clone());
        }
        if kinds.contains(&kind) { kind } else { Default::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;
    use baton_types::Role;

    #[test]
    fn series_are_bounded_whatever_workers_call_their_models() {
        let mut registry = Registry::default();
        let changes = MembershipChanges::register(&mut registry);
        let mut worker = record(Role::Decode, "d");
        for n in 0..2 * KINDS_MAX {
            worker.card.id = format!("{n:05}");
            changes.count(&worker, MembershipChange::Joined);
        }
        worker.card.id = "00000".into();
        changes.count(&worker, MembershipChange::Left);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let series = |with: &str| text.lines().filter(|line| !line.starts_with('#') && line.contains(with)).count();
        assert_eq!(series("joined"), KINDS_MAX + 1);
        let rest = format!("model=\"\",pool=\"\",role=\"decode\",change=\"joined\"}} {KINDS_MAX}");
        assert_eq!((series(&rest), series("model=\"00000\"")), (1, 2), "{rest}");
    }
}
