//! The open connections, and the state of their greetings.

use super::places::{Full, NoPlace, Used, connections_of_one};
use super::pump::Pump;
use crate::greeting::Terms;
use crate::transport::ConnId;
use crate::{Party, Peer, TransferAddress, TransferConfig};
use baton_types::InstanceId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// State of a connection's greeting.
pub(super) enum Greeting {
    /// This side connected and sent its hello; the welcome is due by this instant.
    Sent(Instant),
    /// The peer connected; its hello is due by this instant.
    Awaited(Instant),
    Done(Box<Terms>),
}

/// The side that opened a connection. Each has a bound of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpenedBy {
    ThisSide,
    Peer,
}

pub(super) struct Connection {
    pub(super) greeting: Greeting,
    /// The peer: expected until the greeting, known afterwards.
    pub(super) party: Option<Party>,
    /// The peer's shard, likewise.
    pub(super) shard: u16,
    /// The peer presented a worker's certificate. Only its greeting identifies the worker.
    pub(super) proven: bool,
    /// The address that this side connected to; `None` where the peer connected.
    address: Option<TransferAddress>,
    /// The connection is being closed.
    pub(super) closing: bool,
    pub(super) pump: Pump,
    pub(super) lanes: String,
    /// When it last carried something.
    used_at: Instant,
}

impl Connection {
    /// A connection that a peer opened.
    pub(super) fn accepted(proven: bool, config: &TransferConfig, now: Instant) -> Self {
        let greeting = Greeting::Awaited(now + Duration::from_millis(config.limits.connect_ms));
        Self {
            greeting,
            party: None,
            shard: 0,
            proven,
            address: None,
            closing: false,
            pump: Pump::new(config.limits.in_flight_bytes_max),
            lanes: String::new(),
            used_at: now,
        }
    }

    /// A connection that leads to `peer`. Where credentials are required, the transport carries nothing before the peer has proven itself.
    pub(super) fn dialled(peer: &Peer, config: &TransferConfig, now: Instant) -> Self {
        Self {
            greeting: Greeting::Sent(now + Duration::from_millis(config.limits.connect_ms)),
            party: Some(peer.party.clone()),
            shard: peer.shard,
            address: Some(peer.address.clone()),
            ..Self::accepted(config.credentials.is_some(), config, now)
        }
    }

    pub(super) fn terms(&self) -> Option<&Terms> {
        match &self.greeting {
            Greeting::Done(terms) => Some(terms),
            Greeting::Sent(_) | Greeting::Awaited(_) => None,
        }
    }

    pub(super) fn opened_by(&self) -> OpenedBy {
        match self.address {
            Some(_) => OpenedBy::ThisSide,
            None => OpenedBy::Peer,
        }
    }

    /// When the greeting is due.
    fn greet_by(&self) -> Option<Instant> {
        match self.greeting {
            Greeting::Sent(by) | Greeting::Awaited(by) => Some(by),
            Greeting::Done(_) => None,
        }
    }
}

#[derive(Default)]
pub(super) struct Connections {
    all: BTreeMap<ConnId, Connection>,
    /// The connection that new handoffs to a shard of a party use: one that this side opened.
    by_party: BTreeMap<(Party, u16), ConnId>,
}

impl Connections {
    pub(super) fn get(&self, conn: ConnId) -> Option<&Connection> {
        self.all.get(&conn)
    }

    /// The peer: expected until the greeting, known afterwards.
    pub(super) fn party(&self, conn: ConnId) -> Option<&Party> {
        self.get(conn)?.party.as_ref()
    }

    pub(super) fn get_mut(&mut self, conn: ConnId) -> Option<&mut Connection> {
        self.all.get_mut(&conn)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (ConnId, &mut Connection)> {
        self.all.iter_mut().map(|(&conn, connection)| (conn, connection))
    }

    pub(super) fn insert(&mut self, conn: ConnId, connection: Connection) {
        if let (Some(party), Some(_)) = (&connection.party, &connection.address) {
            self.by_party.insert((party.clone(), connection.shard), conn);
        }
        self.all.insert(conn, connection);
    }

    pub(super) fn remove(&mut self, conn: ConnId) -> Option<Connection> {
        let connection = self.all.remove(&conn)?;
        if let Some(party) = &connection.party {
            let shard = (party.clone(), connection.shard);
            if self.by_party.get(&shard) == Some(&conn) {
                self.by_party.remove(&shard);
            }
        }
        Some(connection)
    }

    /// The connection that leads to a peer, if this side opened one. Never one that the peer opened: there, its identity is only the peer's
    /// own claim.
    pub(super) fn leading_to(&self, peer: &Peer) -> Option<ConnId> {
        let conn = *self.by_party.get(&(peer.party.clone(), peer.shard))?;
        let leads = |c: &Connection| !c.closing && c.address.as_ref() == Some(&peer.address);
        self.get(conn).is_some_and(leads).then_some(conn)
    }

    /// Whether this side may open another connection, besides the `draining` ones that it had opened.
    pub(super) fn place(&self, max: usize, draining: usize, is_open: impl Fn(ConnId) -> bool) -> Result<(), NoPlace> {
        let ours = |_, c: &Connection| c.opened_by() == OpenedBy::ThisSide;
        self.place_beside(ours, max, draining, is_open).map_err(NoPlace::Connections)
    }

    /// Checks that there is a place for this connection of `peer`, besides the others that have greeted and the `draining` ones that peers had
    /// opened: in all, and in the peer's share. One that this side opened has its place already.
    pub(super) fn check_place(
        &self,
        conn: ConnId,
        peer: &InstanceId,
        max: usize,
        draining: Used,
        is_open: impl Fn(ConnId) -> bool,
    ) -> Result<(), NoPlace> {
        if self.get(conn).is_none_or(|c| c.opened_by() == OpenedBy::ThisSide) {
            return Ok(());
        }
        let others = |id, c: &Connection| id != conn && c.opened_by() == OpenedBy::Peer && c.terms().is_some();
        let its = |id, c: &Connection| others(id, c) && c.party.as_ref().is_some_and(|party| party.instance == *peer);
        self.place_beside(others, max, draining.in_all, &is_open).map_err(NoPlace::Connections)?;
        self.place_beside(its, connections_of_one(max), draining.by_peer, &is_open).map_err(NoPlace::ItsConnections)
    }

    /// Whether there is a place beside connections of this kind: at most `max` may be open. Those that have ended take none of these places,
    /// because their peers come back, but they hold memory until the pool's device has ended its work for them. So there are at most twice
    /// as many in all, with those that have closed and are `draining`.
    fn place_beside(
        &self,
        of: impl Fn(ConnId, &Connection) -> bool,
        max: usize,
        draining: usize,
        is_open: impl Fn(ConnId) -> bool,
    ) -> Result<(), Full> {
        let of = self.all.iter().filter(|(conn, connection)| of(**conn, connection));
        let (open, ended): (Vec<_>, Vec<_>) = of.partition(|(conn, _)| is_open(**conn));
        let full = Full { open: open.len(), open_max: max, ended: ended.len() + draining, all_max: 2 * max };
        match full.open >= full.open_max || full.open + full.ended >= full.all_max {
            true => Err(full),
            false => Ok(()),
        }
    }

    pub(super) fn to_party(&self, party: &Party) -> Vec<ConnId> {
        self.all.iter().filter(|(_, c)| c.party.as_ref() == Some(party)).map(|(&conn, _)| conn).collect()
    }

    pub(super) fn has_party(&self, party: &Party) -> bool {
        self.all.values().any(|c| c.party.as_ref() == Some(party))
    }

    pub(super) fn is_greeting(&self) -> bool {
        self.all.values().any(|c| c.greet_by().is_some())
    }

    /// Connections whose greeting is overdue.
    pub(super) fn overdue(&self, now: Instant) -> Vec<ConnId> {
        let overdue = |c: &Connection| c.greet_by().is_some_and(|by| now >= by);
        self.all.iter().filter(|(_, c)| overdue(c)).map(|(&conn, _)| conn).collect()
    }

    /// Connections that have been idle too long: each costs both sides memory and sockets.
    pub(super) fn idle(&mut self, used: &BTreeSet<ConnId>, idle: Duration, now: Instant) -> Vec<ConnId> {
        let mut unused = Vec::new();
        for (&conn, connection) in &mut self.all {
            if used.contains(&conn) || connection.greet_by().is_some() {
                connection.used_at = now;
            } else if now.saturating_duration_since(connection.used_at) >= idle {
                unused.push(conn);
            }
        }
        unused
    }
}
