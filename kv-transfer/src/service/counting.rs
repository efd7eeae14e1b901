//! Counters of the progress thread, and their publication.

use super::progress::Progress;
use super::receiving::Incoming;
use crate::handoff::Exposure;
use crate::transport::ConnId;
use crate::{Party, PeerStats, RefuseReason};
use baton_types::InstanceId;
use std::collections::BTreeMap;

impl Progress {
    /// Counts for a connection's peer, and in total.
    pub(super) fn count(&mut self, conn: ConnId, change: impl Fn(&mut PeerStats)) {
        change(&mut self.stats.total);
        let party = self.connections.get(&conn).and_then(|c| c.party.as_ref());
        if let Some(stats) = party.and_then(|party| self.stats.peers.get_mut(party)) {
            change(stats);
        }
    }

    /// Counts a handoff that is refused here.
    pub(super) fn count_refusal(&mut self, conn: ConnId, reason: RefuseReason) {
        self.count(conn, |stats| {
            *stats.received.entry("refused").or_default() += 1;
            *stats.refused.entry(reason.name()).or_default() += 1;
        });
    }

    /// Forgets a peer's own counters with its last connection; the total keeps them.
    pub(super) fn retire_stats(&mut self, party: &Party) {
        if !self.connections.values().any(|c| c.party.as_ref() == Some(party)) {
            self.stats.peers.remove(party);
        }
    }

    /// Blocks that a handoff's source may write, or could with a grant of everything.
    pub(super) fn blocks_of(&self, incoming: &Incoming) -> usize {
        let layout = self.config.map.layout();
        let moved = incoming.offer.tokens.saturating_sub(incoming.sink.from());
        let needed = layout.blocks_for(moved as usize) * layout.groups().len();
        needed.max(incoming.writable(layout))
    }

    /// What an instance, in all its incarnations, has quarantined here and could come to, but for the handoff `except`. A peer that
    /// restarts has not given its earlier incarnations' blocks back.
    pub(super) fn exposure(&self, of: &InstanceId, except: u64) -> Exposure {
        let counted = |i: &Incoming| i.unasked.is_none() && !self.transport.closing_fences(i.conn());
        // Legs of one handoff share its blocks.
        let mut handoffs: BTreeMap<u64, (usize, bool)> = BTreeMap::new();
        for incoming in self.incoming.values().filter(|i| i.offer.source.instance == *of && i.first != except) {
            if incoming.is_quarantined() || counted(incoming) {
                let (blocks, quarantined) = handoffs.entry(incoming.first).or_default();
                *blocks = self.blocks_of(incoming).max(*blocks);
                *quarantined |= incoming.is_quarantined();
            }
        }
        let sum = |wanted| handoffs.values().filter(|(_, q)| *q == wanted).map(|(blocks, _)| blocks).sum::<usize>();
        let (mut quarantined, mut unfenced) = (sum(true), sum(false));
        for fetch in self.fetches.values().filter(|fetch| fetch.owner() == of) {
            match fetch.is_quarantined() {
                true => quarantined += fetch.blocks(),
                false if fetch.is_open() && !self.transport.closing_fences(fetch.conn()) => unfenced += fetch.blocks(),
                false => {}
            }
        }
        Exposure { quarantined, unfenced }
    }

    /// Blocks whose writers are not provably gone, by instance.
    fn quarantined(&self) -> BTreeMap<InstanceId, usize> {
        let quarantined = self.incoming.values().filter(|i| i.is_quarantined());
        // Legs of one handoff share its blocks.
        let handoffs: BTreeMap<u64, &Incoming> = quarantined.map(|i| (i.first, i)).collect();
        let mut by_instance = BTreeMap::new();
        for incoming in handoffs.into_values() {
            *by_instance.entry(incoming.offer.source.instance.clone()).or_default() +=
                incoming.writable(self.config.map.layout());
        }
        for fetch in self.fetches.values().filter(|fetch| fetch.is_quarantined()) {
            *by_instance.entry(fetch.owner().clone()).or_default() += fetch.blocks();
        }
        by_instance
    }

    /// Handoffs offered here and not over.
    pub(super) fn incoming_live(&self) -> usize {
        self.incoming.values().filter(|i| !i.is_quarantined()).count()
    }

    /// Makes the counters visible to other threads, if they changed.
    pub(super) fn publish(&mut self) {
        self.stats.outgoing = self.sending.len();
        self.stats.incoming = self.incoming_live();
        self.stats.fetches = self.fetches.values().filter(|f| !f.is_quarantined()).count();
        self.stats.pins = self.pins.len();
        self.stats.names = self.sending_tickets.len() + self.incoming_tickets.len() + self.incoming_numbers.len();
        self.stats.tickets = self.incoming.values().filter(|i| i.sink.is_granted()).count();
        self.stats.quarantined = self.quarantined();
        self.stats.held = self.sending.values().filter(|s| s.is_held()).count()
            + self.incoming.values().filter(|i| i.is_held()).count()
            + self.fetches.values().filter(|f| f.is_held()).count();
        let mut published = self.published.lock();
        if *published != self.stats {
            published.clone_from(&self.stats);
        }
    }
}
