//! Who came and who went, as this router saw it.

use super::Name;
use baton_types::InstanceRecord;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// What became of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MembershipChange {
    /// Its record appeared.
    Joined,
    /// Its record stands on another registration, after an etcd that lost it.
    RegisteredAgain,
    /// It was heard and is placed on.
    Admitted,
    /// It is not placed on any more, since it cannot be heard.
    Evicted,
    /// Its record is gone.
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

/// Counts them. Cloning shares the counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct MembershipChanges(Family<Labels, Counter>);

impl MembershipChanges {
    /// Registers them.
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
