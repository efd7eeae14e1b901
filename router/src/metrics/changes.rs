//! Workers that joined and left, as this router saw it.

use super::Name;
use baton_types::InstanceRecord;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

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
pub(crate) struct MembershipChanges(Family<Labels, Counter>);

impl MembershipChanges {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let new = Self::default();
        registry.register(
            "router_membership_changes",
            "Workers that came or went, by what became of them",
            new.0.clone(),
        );
        new
    }

    pub(crate) fn count(&self, of: &InstanceRecord, change: MembershipChange) {
        let (model, pool) = (of.card.id.clone(), of.pool.clone());
        let labels = Labels { model, pool, role: Name(of.role.name()), change: Name(change.name()) };
        self.0.get_or_create(&labels).inc();
    }
}
