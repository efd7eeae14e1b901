//! The table of all handoffs of one driver: their roles, their connections, and the numbers and tickets by which messages find them.

use super::draining::Written;
use super::quarantine_bound::QuarantineLoad;
use crate::get::{Owner, Reader};
use crate::message::Message;
use crate::put::{Sink, Source};
use crate::role::{Effect, HandoffKey, Input, Link};
use crate::transport::ConnId;
use crate::{Party, TransferStats};
use baton_types::{InstanceId, KvLayout, TicketId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// The role of this side in one handoff.
pub(super) enum Role {
    Source(Box<Source>),
    Sink(Box<Sink>),
    Reader(Reader),
    Owner(Owner),
}

impl Role {
    pub(super) fn handle(&mut self, input: Input, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        match self {
            Self::Source(source) => source.handle(input, link, now, effects),
            Self::Sink(sink) => sink.handle(input, link, now, effects),
            Self::Reader(reader) => reader.handle(input, link, now, effects),
            Self::Owner(owner) => owner.handle(input, link, now, effects),
        }
    }

    /// Whether this role accepts such a message from a peer.
    fn accepts(&self, message: &Message) -> bool {
        match self {
            Self::Source(_) => Source::accepts(message),
            Self::Sink(_) => Sink::accepts(message),
            Self::Reader(_) => Reader::accepts(message),
            Self::Owner(_) => Owner::accepts(message),
        }
    }

    fn is_quarantined(&self) -> bool {
        match self {
            Self::Sink(sink) => sink.is_quarantined(),
            Self::Reader(reader) => reader.is_quarantined(),
            Self::Source(_) | Self::Owner(_) => false,
        }
    }

    /// Whether a test hook holds it.
    fn is_held(&self) -> bool {
        match self {
            Self::Source(source) => source.is_held(),
            Self::Sink(sink) => sink.is_held(),
            Self::Reader(reader) => reader.is_held(),
            Self::Owner(_) => false,
        }
    }

    /// The peer that may write to blocks of this side under this handoff.
    fn writer(&self) -> Option<&Party> {
        match self {
            Self::Sink(sink) => Some(sink.source()),
            Self::Reader(reader) => Some(reader.owner()),
            Self::Source(_) | Self::Owner(_) => None,
        }
    }

    /// What that peer could write.
    fn written(&self, layout: &KvLayout) -> Option<Written> {
        let blocks = match self {
            Self::Sink(sink) => sink.writable(layout),
            Self::Reader(reader) => reader.at_stake().1,
            Self::Source(_) | Self::Owner(_) => 0,
        };
        let by = self.writer()?.instance.clone();
        Some(Written { by, blocks, is_put: matches!(self, Self::Sink(_)) })
    }

    /// The peer's number for the handoff and the ticket given to the peer, where the peer began it.
    fn offered(&self) -> Option<(u64, TicketId)> {
        match self {
            Self::Sink(sink) => Some((sink.number(), sink.ticket())),
            Self::Owner(owner) => Some((owner.number(), owner.ticket())),
            Self::Source(_) | Self::Reader(_) => None,
        }
    }
}

pub(super) struct Entry {
    pub(super) conn: ConnId,
    pub(super) role: Role,
    /// The peer's own ticket for it.
    awaited: Option<TicketId>,
    /// Jobs of the verifier that have not begun do nothing once this is gone.
    pub(super) life: Arc<()>,
}

#[derive(Default)]
pub(super) struct Table {
    entries: BTreeMap<HandoffKey, Entry>,
    /// Handoffs that peers began, by the peer's number.
    numbers: BTreeMap<(ConnId, u64), HandoffKey>,
    /// Tickets given by this side, and those given by peers.
    given: BTreeMap<TicketId, HandoffKey>,
    awaited: BTreeMap<(ConnId, TicketId), HandoffKey>,
}

impl Table {
    pub(super) fn insert(&mut self, key: HandoffKey, conn: ConnId, role: Role) {
        if let Some((number, ticket)) = role.offered() {
            self.numbers.insert((conn, number), key);
            self.given.insert(ticket, key);
        }
        self.entries.insert(key, Entry { conn, role, awaited: None, life: Arc::default() });
    }

    pub(super) fn get(&self, key: HandoffKey) -> Option<&Entry> {
        self.entries.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: HandoffKey) -> Option<&mut Entry> {
        self.entries.get_mut(&key)
    }

    pub(super) fn remove(&mut self, key: HandoffKey) -> Option<Role> {
        let entry = self.entries.remove(&key)?;
        if let Some((number, ticket)) = entry.role.offered() {
            self.numbers.remove(&(entry.conn, number));
            self.given.remove(&ticket);
        }
        if let Some(ticket) = entry.awaited {
            self.awaited.remove(&(entry.conn, ticket));
        }
        Some(entry.role)
    }

    /// From now on the peer may name this ticket, which it gave, in messages.
    pub(super) fn await_ticket(&mut self, key: HandoffKey, ticket: TicketId) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        if let Some(before) = entry.awaited.replace(ticket) {
            self.awaited.remove(&(entry.conn, before));
        }
        self.awaited.insert((entry.conn, ticket), key);
    }

    /// The handoff that a message on `conn` refers to, if its role accepts such a message. A ticket belongs to two incarnations, and so
    /// does a connection. With the hazard `of_anyone`, any peer that names a ticket may use it.
    pub(super) fn find(&self, conn: ConnId, message: &Message, of_anyone: bool) -> Option<HandoffKey> {
        let awaited = |ticket: &TicketId| {
            let own = self.awaited.get(&(conn, *ticket));
            let other =
                || self.awaited.iter().find(|((_, t), _)| t == ticket).filter(|_| of_anyone).map(|(_, key)| key);
            own.or_else(other)
        };
        let given = |ticket: &TicketId| self.given.get(ticket);
        let (key, by_ticket) = match message {
            Message::Grant { handoff, .. } | Message::Refuse { handoff, .. } | Message::Abort { handoff, .. } => {
                (Some(HandoffKey(*handoff)), false)
            }
            Message::Aborted { handoff, .. } | Message::Unpin { handoff } => {
                (self.numbers.get(&(conn, *handoff)).copied(), false)
            }
            Message::Ack { ticket }
            | Message::Nack { ticket, .. }
            | Message::Held { ticket, .. }
            | Message::NotHeld { ticket, .. } => (awaited(ticket).copied(), true),
            Message::Commit(commit) => (given(&commit.ticket).copied(), true),
            Message::Ask { ticket, .. } | Message::Confirm { ticket } => (given(ticket).copied(), true),
            // For a get they come from the owner, for a put from the source.
            Message::Checksums { ticket, .. } => (awaited(ticket).or_else(|| given(ticket)).copied(), true),
            Message::Hello(_) | Message::Welcome(_) | Message::Reject { .. } | Message::Offer(_) => return None,
        };
        let speaks = |entry: &Entry| entry.conn == conn || (by_ticket && of_anyone);
        key.filter(|key| self.entries.get(key).is_some_and(|entry| speaks(entry) && entry.role.accepts(message)))
    }

    pub(super) fn has_number(&self, conn: ConnId, number: u64) -> bool {
        self.numbers.contains_key(&(conn, number))
    }

    pub(super) fn has_given(&self, ticket: TicketId) -> bool {
        self.given.contains_key(&ticket)
    }

    pub(super) fn keys(&self) -> Vec<HandoffKey> {
        self.entries.keys().copied().collect()
    }

    /// Handoffs whose role satisfies the predicate.
    pub(super) fn keys_where(&self, mut is: impl FnMut(&Role) -> bool) -> Vec<HandoffKey> {
        self.entries.iter().filter(|(_, entry)| is(&entry.role)).map(|(&key, _)| key).collect()
    }

    pub(super) fn keys_on(&self, conn: ConnId) -> Vec<HandoffKey> {
        self.entries.iter().filter(|(_, entry)| entry.conn == conn).map(|(&key, _)| key).collect()
    }

    /// Handoffs under which a party may write here.
    pub(super) fn keys_of_writer(&self, party: &Party) -> Vec<HandoffKey> {
        self.keys_where(|role| role.writer() == Some(party))
    }

    /// What the peer could write under this handoff.
    pub(super) fn written(&self, key: HandoffKey, layout: &KvLayout) -> Option<Written> {
        self.entries.get(&key)?.role.written(layout)
    }

    pub(super) fn connections(&self) -> BTreeSet<ConnId> {
        self.entries.values().map(|entry| entry.conn).collect()
    }

    /// Number of puts of peers that have not ended, and of gets of peers.
    pub(super) fn sinks(&self) -> usize {
        self.sources().count()
    }

    pub(super) fn owners(&self) -> usize {
        self.readers().count()
    }

    /// The peers of these puts, one for each.
    pub(super) fn sources(&self) -> impl Iterator<Item = &InstanceId> {
        self.entries.values().filter_map(|entry| match &entry.role {
            Role::Sink(sink) if !sink.is_quarantined() => Some(&sink.source().instance),
            _ => None,
        })
    }

    /// The peers of these gets, one for each.
    pub(super) fn readers(&self) -> impl Iterator<Item = &InstanceId> {
        self.entries.values().filter_map(|entry| match &entry.role {
            Role::Owner(owner) => Some(owner.reader()),
            _ => None,
        })
    }

    fn count(&self, is: impl Fn(&Role) -> bool) -> usize {
        self.entries.values().filter(|entry| is(&entry.role)).count()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether only handoffs that wait for a fence are left.
    pub(super) fn is_quiet(&self) -> bool {
        self.entries.values().all(|entry| entry.role.is_quarantined())
    }

    /// Whether something is awaited that cannot wake the driver.
    pub(super) fn watches(&self) -> bool {
        let watched = |role: &Role| role.is_held() || matches!(role, Role::Source(source) if source.has_fences());
        self.entries.values().any(|entry| watched(&entry.role))
    }

    /// Blocks that an instance, over all its incarnations, has quarantined here or could leave quarantined, without the handoff `except`. A
    /// restarted peer has not released its earlier incarnations' blocks. `fences` says whether closing a connection fences it.
    pub(super) fn quarantine_load(
        &self,
        of: &InstanceId,
        except: HandoffKey,
        layout: &KvLayout,
        fences: impl Fn(ConnId) -> bool,
    ) -> QuarantineLoad {
        let mut quarantine_load = QuarantineLoad::default();
        for (_, entry) in self.entries.iter().filter(|(key, _)| **key != except) {
            let ((peer, blocks), open) = match &entry.role {
                Role::Sink(sink) => (sink.at_stake(layout), !sink.waits()),
                Role::Reader(reader) => (reader.at_stake(), reader.is_open()),
                Role::Source(_) | Role::Owner(_) => continue,
            };
            if peer != of {
                continue;
            }
            if entry.role.is_quarantined() {
                quarantine_load.quarantined += blocks;
            } else if open && !fences(entry.conn) {
                quarantine_load.unfenced += blocks;
            }
        }
        quarantine_load
    }

    /// Sets the gauges of what is open.
    pub(super) fn gauge(&self, stats: &mut TransferStats, layout: &KvLayout) {
        stats.sources = self.count(|role| matches!(role, Role::Source(_)));
        stats.sinks = self.sinks();
        stats.readers = self.count(|role| matches!(role, Role::Reader(reader) if !reader.is_quarantined()));
        stats.owners = self.owners();
        stats.indexed = self.numbers.len() + self.given.len() + self.awaited.len();
        stats.tickets = self.count(|role| matches!(role, Role::Sink(sink) if sink.is_granted()));
        stats.held = self.count(Role::is_held);
        stats.quarantined.clear();
        let quarantined = self.entries.values().filter(|entry| entry.role.is_quarantined());
        for written in quarantined.filter_map(|entry| entry.role.written(layout)) {
            *stats.quarantined.entry(written.by).or_default() += written.blocks;
        }
    }

    /// Leaks every block that peers may still write to: a lost block is better than one reused too early.
    pub(super) fn forget_written(&mut self) {
        for key in self.keys_where(|role| role.writer().is_some()) {
            std::mem::forget(self.entries.remove(&key));
        }
    }
}
