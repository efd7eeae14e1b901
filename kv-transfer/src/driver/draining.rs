//! What waits until the pool's device has ended its operations: blocks of handoffs that are over, and handoffs that go on only then. Pure.
//!
//! A pool that is not host memory stores writes later than they come. A closed window lets no further write begin, but those that came
//! before may still be on their way, whatever the peer says of them. A connection may close before the device has ended.

use crate::Party;
use crate::handler::KeptBlocks;
use crate::role::HandoffKey;
use crate::transport::ConnId;
use baton_types::TicketId;
use std::collections::{BTreeMap, VecDeque};

/// What waits for one call of [`crate::transport::Transport::close_window`].
pub(super) enum Waiting {
    Blocks(KeptBlocks),
    Handoff(HandoffKey),
}

/// A connection that has closed.
struct Lost {
    party: Option<Party>,
    blocks: Vec<KeptBlocks>,
}

#[derive(Default)]
pub(super) struct Draining {
    /// By open connection and ticket, in the order of the calls.
    windows: BTreeMap<(ConnId, TicketId), VecDeque<Waiting>>,
    /// Closed connections for which the device still works.
    connections: BTreeMap<ConnId, Lost>,
}

impl Draining {
    /// A window of an open connection was closed for this.
    pub(super) fn wait(&mut self, conn: ConnId, ticket: TicketId, waiting: Waiting) {
        self.windows.entry((conn, ticket)).or_default().push_back(waiting);
    }

    /// The writes under a ticket have ended that came before one such call: releases its blocks, or returns its handoff.
    pub(super) fn window_closed(&mut self, conn: ConnId, ticket: TicketId) -> Option<HandoffKey> {
        let waiting = self.windows.get_mut(&(conn, ticket))?;
        let first = waiting.pop_front();
        if waiting.is_empty() {
            self.windows.remove(&(conn, ticket));
        }
        match first? {
            Waiting::Blocks(blocks) => {
                blocks.release();
                None
            }
            Waiting::Handoff(key) => Some(key),
        }
    }

    /// A connection to this party has closed. Everything on it has ended, unless the device is `draining` it.
    pub(super) fn closed(&mut self, conn: ConnId, party: Option<Party>, draining: bool) {
        if draining {
            self.connections.insert(conn, Lost { party, blocks: Vec::new() });
        }
        let of_it = self.windows.range((conn, TicketId(0))..=(conn, TicketId(u64::MAX)));
        let of_it: Vec<_> = of_it.map(|(at, _)| *at).collect();
        let waiting: Vec<_> = of_it.into_iter().filter_map(|at| self.windows.remove(&at)).flatten().collect();
        for waiting in waiting {
            if let Waiting::Blocks(blocks) = waiting {
                self.release(conn, blocks);
            }
        }
    }

    /// Releases blocks of a connection that has closed, once the device has ended its work for it.
    pub(super) fn release(&mut self, conn: ConnId, blocks: KeptBlocks) {
        match self.connections.get_mut(&conn) {
            Some(lost) => lost.blocks.push(blocks),
            None => blocks.release(),
        }
    }

    /// The device has ended its work for a closed connection.
    pub(super) fn drained(&mut self, conn: ConnId) {
        let blocks = self.connections.remove(&conn).map(|lost| lost.blocks);
        blocks.into_iter().flatten().for_each(KeptBlocks::release);
    }

    /// Whether the device works for a closed connection to this party.
    pub(super) fn has_party(&self, party: &Party) -> bool {
        self.connections.values().any(|lost| lost.party.as_ref() == Some(party))
    }
}

impl Drop for Draining {
    /// Leaks blocks that the device may still write to or read: a lost block is better than one reused too early.
    fn drop(&mut self) {
        std::mem::take(&mut self.windows).into_values().flatten().for_each(std::mem::forget);
        std::mem::take(&mut self.connections).into_values().flat_map(|lost| lost.blocks).for_each(std::mem::forget);
    }
}
