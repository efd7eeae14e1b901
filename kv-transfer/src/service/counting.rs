//! Counters of the progress thread, and their publication.

use super::progress::Progress;
use super::receiving::Incoming;
use crate::transport::ConnId;
use crate::{Party, PeerStats};
use baton_types::InstanceId;

impl Progress {
    /// Counts for a connection's peer, and in total.
    pub(super) fn count(&mut self, conn: ConnId, change: impl Fn(&mut PeerStats)) {
        change(&mut self.stats.total);
        let party = self.connections.get(&conn).and_then(|c| c.party.as_ref());
        if let Some(stats) = party.and_then(|party| self.stats.peers.get_mut(party)) {
            change(stats);
        }
    }

    /// Forgets a peer's own counters with its last connection; the total keeps them.
    pub(super) fn retire_stats(&mut self, party: &Party) {
        if !self.connections.values().any(|c| c.party.as_ref() == Some(party)) {
            self.stats.peers.remove(party);
        }
    }

    /// Blocks whose writers are not provably gone, of all incarnations of one instance or of everybody.
    pub(super) fn quarantined_blocks(&self, of: Option<&InstanceId>) -> usize {
        let of_peer = |i: &&Incoming| i.is_quarantined() && of.is_none_or(|id| i.offer.source.instance == *id);
        self.incoming.values().filter(of_peer).map(|i| i.blocks.total()).sum()
    }

    /// Handoffs offered here and not over.
    pub(super) fn incoming_live(&self) -> usize {
        self.incoming.values().filter(|i| !i.is_quarantined()).count()
    }

    /// Makes the counters visible to other threads, if they changed.
    pub(super) fn publish(&mut self) {
        self.stats.outgoing = self.sending.len();
        self.stats.incoming = self.incoming_live();
        (self.stats.fetches, self.stats.pins) = (self.fetches.len(), self.pins.len());
        self.stats.tickets = self.incoming.values().filter(|i| i.sink.is_granted()).count();
        self.stats.quarantined_blocks = self.quarantined_blocks(None);
        self.stats.held = self.sending.values().filter(|s| s.is_held()).count()
            + self.incoming.values().filter(|i| i.is_held()).count()
            + self.fetches.values().filter(|f| f.is_held()).count();
        let mut published = self.published.lock();
        if *published != self.stats {
            published.clone_from(&self.stats);
        }
    }
}
