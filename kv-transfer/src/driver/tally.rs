//! Counters, and when they become visible to other threads.

use super::draining::Draining;
use super::table::Table;
use crate::role::Counted;
use crate::{Party, PeerStats, TransferStats};
use baton_types::KvLayout;
use parking_lot::Mutex;
use std::sync::Arc;

#[derive(Default)]
pub(super) struct Tally {
    stats: TransferStats,
    published: Arc<Mutex<TransferStats>>,
}

impl Tally {
    pub(super) fn published(&self) -> &Arc<Mutex<TransferStats>> {
        &self.published
    }

    /// A peer has greeted on a connection over these lanes.
    pub(super) fn connected(&mut self, party: &Party, lanes: String) {
        self.stats.peers.entry(party.clone()).or_default().lanes = lanes;
    }

    /// Drops a peer's own counters with its last connection; the total keeps them.
    pub(super) fn disconnected(&mut self, party: &Party) {
        self.stats.peers.remove(party);
    }

    /// Counts for a peer, where it is known, and in total.
    pub(super) fn count(&mut self, party: Option<&Party>, change: impl Fn(&mut PeerStats)) {
        change(&mut self.stats.total);
        if let Some(stats) = party.and_then(|party| self.stats.peers.get_mut(party)) {
            change(stats);
        }
    }

    pub(super) fn counted(&mut self, party: Option<&Party>, counted: Counted) {
        self.count(party, |stats| match counted {
            Counted::Source(outcome) => *stats.sources.entry(outcome).or_default() += 1,
            Counted::Sink(outcome) => *stats.sinks.entry(outcome).or_default() += 1,
            Counted::Reader(outcome) => *stats.readers.entry(outcome).or_default() += 1,
            Counted::Adopted(bytes) => stats.bytes_adopted += bytes,
            Counted::Refused(reason) => {
                *stats.sinks.entry("refused").or_default() += 1;
                *stats.refused.entry(reason.name()).or_default() += 1;
            }
        });
    }

    /// Makes the counters visible to other threads, if they changed.
    pub(super) fn publish(&mut self, table: &Table, draining: &Draining, layout: &KvLayout) {
        table.gauge(&mut self.stats, layout);
        draining.gauge(&mut self.stats);
        let mut published = self.published.lock();
        if *published != self.stats {
            published.clone_from(&self.stats);
        }
    }
}
