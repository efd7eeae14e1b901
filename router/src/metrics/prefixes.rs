//! The index of cached prefixes.

use super::Name;
use crate::prefixes::{Dropped, Prefixes};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Seconds: from a miss at the first block to waiting for a lock.
const LOOKUP_SECONDS: [f64; 10] = [1e-6, 2.5e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2.5e-4, 1e-3, 1e-2];

/// Kinds of reported blocks.
const KINDS: [&str; 3] = ["stored", "removed", "snapshot"];
/// Why a snapshot was sent.
const SNAPSHOTS: [&str; 2] = ["start", "behind"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: Name,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: Name,
}

/// Counts updates and lookups of the index. Clones share the counters.
#[derive(Clone, Debug)]
pub(crate) struct PrefixMetrics {
    events: Family<KindLabels, Counter>,
    snapshots: Family<ReasonLabels, Counter>,
    forgotten: Family<ReasonLabels, Counter>,
    lookup: Histogram,
}

impl PrefixMetrics {
    /// Registers all metrics; names get the registry's prefix.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let lookup = Histogram::new(LOOKUP_SECONDS);
        let new =
            Self { events: Family::default(), snapshots: Family::default(), forgotten: Family::default(), lookup };
        for kind in KINDS {
            drop(new.events.get_or_create(&KindLabels { kind: Name(kind) }));
        }
        for reason in SNAPSHOTS {
            drop(new.snapshots.get_or_create(&ReasonLabels { reason: Name(reason) }));
        }
        for reason in Dropped::NAMES {
            drop(new.forgotten.get_or_create(&ReasonLabels { reason: Name(reason) }));
        }
        registry.register("router_index_events", "Blocks that workers told of, by what", new.events.clone());
        let help = "Whole snapshots of workers' caches taken up, by what they were for";
        registry.register("router_index_snapshots", help, new.snapshots.clone());
        let help = "Times that what a worker has cached was forgotten, by reason";
        registry.register("router_index_forgotten", help, new.forgotten.clone());
        let help = "Who has how much of a prompt: the time to find out";
        registry.register_with_unit("router_index_lookup", help, Unit::Seconds, new.lookup.clone());
        new
    }

    /// This many blocks were reported.
    pub(crate) fn count_blocks(&self, kind: &'static str, blocks: usize) {
        self.events.get_or_create(&KindLabels { kind: Name(kind) }).inc_by(blocks as u64);
    }

    /// A complete snapshot was applied.
    pub(crate) fn snapshot(&self, reason: &'static str) {
        self.snapshots.get_or_create(&ReasonLabels { reason: Name(reason) }).inc();
    }

    /// A worker's blocks are ignored until its next snapshot.
    pub(crate) fn forgotten(&self, reason: &'static str) {
        self.forgotten.get_or_create(&ReasonLabels { reason: Name(reason) }).inc();
    }

    /// A lookup took this long.
    pub(crate) fn looked_up(&self, took: Duration) {
        self.lookup.observe(took.as_secs_f64());
    }
}

/// Sizes of the index; read at each scrape.
#[derive(Debug)]
pub(crate) struct IndexMetrics(pub(crate) Arc<Prefixes>);

impl Collector for IndexMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.0.counts();
        let mut gauge = |name: &str, help: &str, value: usize| {
            ConstGauge::new(value as i64).encode(to.encode_descriptor(name, help, None, MetricType::Gauge)?)
        };
        gauge("router_index_blocks", "Different blocks in the index of cached prefixes", counts.blocks)?;
        gauge("router_index_workers", "Workers that tell what they have cached", counts.workers)?;
        let help = "Those of them whose snapshot has not come whole: they count for nothing";
        gauge("router_index_lost_workers", help, counts.workers_lost)?;
        let help = "Blocks that were not taken up because the index was full";
        let refused = to.encode_descriptor("router_index_refused_blocks", help, None, MetricType::Counter)?;
        ConstCounter::new(counts.refused).encode(refused)
    }
}
