//! What waits until the pool's device has ended its operations: blocks of handoffs that are over, and handoffs that go on only then. Pure.
//!
//! A pool that is not host memory stores writes later than they come. A closed window lets no further write begin, but those that came
//! before may still be on their way, whatever the peer says of them. A connection may close before the device has ended.
//!
//! These blocks are bounded too. Behind the window of an open connection they take a place among the puts of peers, or are still in
//! quarantine if they were there before; once their connection has closed, all are. Connections that have closed, for which the device still
//! works, hold buffers: they count against the bound on connections of their side ([`super::connections`]).

use super::connections::{Connection, OpenedBy};
use crate::handler::KeptBlocks;
use crate::role::HandoffKey;
use crate::transport::ConnId;
use crate::{Party, TransferStats};
use baton_types::{InstanceId, TicketId};
use std::collections::{BTreeMap, VecDeque};

/// What waits for one call of [`crate::transport::Transport::close_window`].
pub(super) enum Waiting {
    Blocks(Left),
    Handoff(HandoffKey),
}

/// Blocks of a handoff that is over.
pub(super) struct Left {
    pub(super) blocks: KeptBlocks,
    /// `None` if the peer could not write them: it, or this side, read.
    pub(super) written: Option<Written>,
}

/// What a peer could write under a handoff.
pub(super) struct Written {
    pub(super) by: InstanceId,
    /// Number of blocks.
    pub(super) blocks: usize,
    /// Under a put of the peer, not a get of this side.
    pub(super) is_put: bool,
}

/// A connection that has closed.
struct Lost {
    opened_by: OpenedBy,
    party: Option<Party>,
    left: Vec<Left>,
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

    /// The writes under a ticket have ended that came before one such call: what waited for it.
    #[must_use]
    pub(super) fn window_closed(&mut self, conn: ConnId, ticket: TicketId) -> Option<Waiting> {
        let waiting = self.windows.get_mut(&(conn, ticket))?;
        let first = waiting.pop_front();
        if waiting.is_empty() {
            self.windows.remove(&(conn, ticket));
        }
        first
    }

    /// Whether something waits for a window. Its last writes may wait for room in the device, which wakes nobody.
    pub(super) fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }

    /// A connection has closed. Everything on it has ended, unless the device is `draining` it. Returns the blocks that are free.
    #[must_use]
    pub(super) fn closed(&mut self, conn: ConnId, connection: &Connection, draining: bool) -> Vec<KeptBlocks> {
        if draining {
            let (opened_by, party) = (connection.opened_by(), connection.party.clone());
            self.connections.insert(conn, Lost { opened_by, party, left: Vec::new() });
        }
        let of_it = self.windows.range((conn, TicketId(0))..=(conn, TicketId(u64::MAX)));
        let of_it: Vec<_> = of_it.map(|(at, _)| *at).collect();
        let waiting: Vec<_> = of_it.into_iter().filter_map(|at| self.windows.remove(&at)).flatten().collect();
        let left = waiting.into_iter().filter_map(|waiting| match waiting {
            Waiting::Blocks(left) => Some(left),
            Waiting::Handoff(_) => None,
        });
        left.filter_map(|left| self.release(conn, left)).collect()
    }

    /// Keeps blocks of a connection that has closed until the device has ended its work for it. Returns them if it has.
    #[must_use]
    pub(super) fn release(&mut self, conn: ConnId, left: Left) -> Option<KeptBlocks> {
        match self.connections.get_mut(&conn) {
            Some(lost) => {
                lost.left.push(left);
                None
            }
            None => Some(left.blocks),
        }
    }

    /// The device has ended its work for a closed connection. Returns the blocks that are free.
    #[must_use]
    pub(super) fn drained(&mut self, conn: ConnId) -> Vec<KeptBlocks> {
        let left = self.connections.remove(&conn).map(|lost| lost.left);
        left.into_iter().flatten().map(|left| left.blocks).collect()
    }

    /// What was left behind windows of open connections.
    fn behind_windows(&self) -> impl Iterator<Item = &Left> {
        self.windows.values().flatten().filter_map(|waiting| match waiting {
            Waiting::Blocks(left) => Some(left),
            Waiting::Handoff(_) => None,
        })
    }

    /// The peers of puts that have ended, but whose last writes are still being stored, one for each, without those in quarantine.
    pub(super) fn sources(&self) -> impl Iterator<Item = &InstanceId> {
        let left = self.behind_windows().filter(|left| !left.blocks.are_quarantined());
        let written = left.filter_map(|left| left.written.as_ref());
        written.filter(|written| written.is_put).map(|written| &written.by)
    }

    /// Number of blocks that an instance has left in quarantine, and that the device has not ended with.
    pub(super) fn quarantined(&self, of: &InstanceId) -> usize {
        self.in_quarantine().filter(|written| written.by == *of).map(|written| written.blocks).sum()
    }

    fn in_quarantine(&self) -> impl Iterator<Item = &Written> {
        let behind_windows = self.behind_windows().filter(|left| left.blocks.are_quarantined());
        let lost = self.connections.values().flat_map(|lost| &lost.left);
        behind_windows.chain(lost).filter_map(|left| left.written.as_ref())
    }

    /// Adds to the gauge of quarantined blocks.
    pub(super) fn gauge(&self, stats: &mut TransferStats) {
        for written in self.in_quarantine() {
            *stats.quarantined.entry(written.by.clone()).or_default() += written.blocks;
        }
    }

    /// Number of closed connections of a side for which the device still works.
    pub(super) fn connections(&self, opened_by: OpenedBy) -> usize {
        self.connections.values().filter(|lost| lost.opened_by == opened_by).count()
    }

    /// Those that this peer opened.
    pub(super) fn connections_opened_by(&self, peer: &InstanceId) -> usize {
        let its = |lost: &&Lost| lost.party.as_ref().is_some_and(|party| party.instance == *peer);
        self.connections.values().filter(its).filter(|lost| lost.opened_by == OpenedBy::Peer).count()
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
        std::mem::take(&mut self.connections).into_values().flat_map(|lost| lost.left).for_each(std::mem::forget);
    }
}
