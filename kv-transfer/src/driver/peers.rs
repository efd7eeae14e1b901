//! Connections: opened, greeted, refused and lost, and the messages on them.

use super::Driver;
use super::connections::{Connection, Greeting, OpenedBy};
use super::places::{NoPlace, Used};
use crate::greeting::{Terms, Unwelcome, check_hello, hello};
use crate::hazards::hazard;
use crate::message::{Hello, Message, NackReason, message_bytes_max};
use crate::role::{HandoffKey, Input};
use crate::transport::ConnId;
use crate::{HandoffFailure, Peer, RefuseReason};
use std::time::Instant;

impl Driver {
    pub(super) fn message(&mut self, conn: ConnId, message: Message, now: Instant) {
        let Some(connection) = self.connections.get(conn).filter(|c| !c.closing) else { return };
        match (message, &connection.greeting) {
            (Message::Hello(theirs), Greeting::Awaited(_)) => self.greeted(conn, &theirs, now),
            (Message::Welcome(theirs), Greeting::Sent(_)) => {
                let is_meant = connection.party.as_ref() == Some(&theirs.party) || hazard!(self.config, AnyIncarnation);
                if is_meant && connection.shard == theirs.shard.index() {
                    self.greeted(conn, &theirs, now);
                } else {
                    let detail = format!("{} answers there, its shard {}", theirs.party, theirs.shard.index());
                    self.rejected(conn, RefuseReason::WrongIncarnation, &detail, now);
                    self.close(conn, &detail);
                }
            }
            (Message::Reject { reason, detail }, Greeting::Sent(_)) => {
                self.rejected(conn, reason, &detail, now);
                self.close(conn, &detail);
            }
            (message, Greeting::Sent(_) | Greeting::Awaited(_)) => {
                self.close(conn, &format!("{} before the greeting", message.name()));
            }
            (Message::Hello(_) | Message::Welcome(_) | Message::Reject { .. }, Greeting::Done(_)) => {
                self.close(conn, "a second greeting");
            }
            (Message::Offer(offer), Greeting::Done(_)) => self.offered(conn, *offer, now),
            (message, Greeting::Done(_)) => {
                match self.table.find(conn, &message, hazard!(self.config, TicketsOfAnyone)) {
                    Some(key) => self.input(key, Input::Heard(message), now),
                    None => self.stale(conn, message),
                }
            }
        }
    }

    /// A message about a handoff that has ended or never existed. Where the peer waits for an answer, it gets one.
    fn stale(&mut self, conn: ConnId, message: Message) {
        self.tally.count(self.connections.party(conn), |stats| stats.stale_messages += 1);
        match message {
            // Nothing is being written, and the sink waits for confirmation of that.
            Message::Grant { handoff, ticket, .. } | Message::Abort { handoff, ticket, .. } => {
                let detail = "the handoff ended".into();
                self.send(conn, &Message::Aborted { handoff, ticket, flushed: true, detail });
            }
            Message::Commit(commit) => {
                let detail = "no such ticket is open between these two incarnations".into();
                self.send(conn, &Message::Nack { ticket: commit.ticket, reason: NackReason::NotAdopted, detail });
            }
            Message::Ask { ticket, .. } | Message::Confirm { ticket } => {
                let detail = "no such pin holds between these two incarnations".into();
                self.send(conn, &Message::NotHeld { ticket, detail });
            }
            _ => {}
        }
    }

    /// The peer identified itself, in a hello or a welcome.
    fn greeted(&mut self, conn: ConnId, theirs: &Hello, now: Instant) {
        let peer = &theirs.party.instance;
        let draining = Used {
            in_all: self.draining.connections(OpenedBy::Peer),
            by_peer: self.draining.connections_opened_by(peer),
        };
        let (max, is_open) = (self.config.limits.accepted_max, |conn| self.transport.is_open(conn));
        let has_place = self.connections.check_place(conn, peer, max, draining, is_open);
        let map = check_hello(&self.config, theirs).and_then(|map| match has_place {
            Err(no_place) => {
                let told = no_place.to_string();
                Err(Unwelcome { reason: NoPlace::REASON, detail: told.clone(), told })
            }
            // What a greeting says nobody verifies: such a connection would delay the fence for as long as it is open.
            Ok(()) if self.is_being_fenced(&theirs.party) => {
                let (reason, told) = (RefuseReason::WrongIncarnation, "that process is proven dead".to_owned());
                Err(Unwelcome { reason, detail: format!("{told}: {}", theirs.party), told })
            }
            Ok(()) => Ok(map),
        });
        let map = match map {
            Ok(map) => map,
            Err(Unwelcome { reason, detail, told }) => {
                tracing::warn!(peer = %theirs.party, detail, "refuses a transfer connection");
                let proven = self.connections.get(conn).is_some_and(|c| c.proven);
                self.send(conn, &Message::Reject { reason, detail: if proven { detail.clone() } else { told } });
                return self.close(conn, &detail);
            }
        };
        if let Err(error) = self.transport.greeted(conn, &theirs.region, message_bytes_max(&self.config.map)) {
            return self.close(conn, &format!("the peer's region cannot be used: {error}"));
        }
        let (transport, lanes) = (self.transport.name(), self.transport.lanes(conn));
        let Some(connection) = self.connections.get_mut(conn) else { return };
        let answer = matches!(connection.greeting, Greeting::Awaited(_));
        let terms = Terms::new(&self.config, theirs, map);
        let (peer, protocol) = (&theirs.party, terms.protocol);
        match terms.check() {
            Ok(()) => tracing::info!(%peer, transport, lanes, protocol, "transfer peer connected"),
            Err(mismatch) => tracing::warn!(%peer, %mismatch, "transfer peer is incompatible"),
        }
        self.tally.connected(peer, format!("{transport} {lanes}"));
        (connection.party, connection.shard) = (Some(peer.clone()), terms.shard);
        connection.greeting = Greeting::Done(Box::new(terms));
        connection.lanes = lanes;
        if answer {
            let welcome = hello(&self.config, self.transport.region(), theirs.party.clone());
            self.send(conn, &Message::Welcome(welcome));
        }
        for key in self.table.keys_on(conn) {
            self.input(key, Input::Greeted, now);
        }
    }

    /// The connection that leads to a peer, opened if need be.
    pub(super) fn connection_to(&mut self, peer: &Peer, now: Instant) -> Result<ConnId, HandoffFailure> {
        if self.stopping.is_some() {
            return Err(HandoffFailure::Stopped);
        }
        let is_open = |conn| self.transport.is_open(conn);
        if let Some(conn) = self.connections.leading_to(peer).filter(|conn| is_open(*conn)) {
            return Ok(conn);
        }
        if self.is_being_fenced(&peer.party) {
            return Err(HandoffFailure::PeerLost("its process is proven dead".into()));
        }
        // Only connections that this side opened: accepted ones have a limit of their own.
        let (max, draining) = (self.config.limits.peers_max, self.draining.connections(OpenedBy::ThisSide));
        let place = self.connections.place(max, draining, is_open);
        place.map_err(|no_place| HandoffFailure::PeerLost(no_place.to_string()))?;
        let conn = self.transport.connect(&peer.address).map_err(HandoffFailure::PeerLost)?;
        self.connections.insert(conn, Connection::dialled(peer, &self.config, now));
        let ours = hello(&self.config, self.transport.region(), peer.party.clone());
        self.send(conn, &Message::Hello(ours));
        Ok(conn)
    }

    /// The peer refuses the connection.
    pub(super) fn rejected(&mut self, conn: ConnId, reason: RefuseReason, detail: &str, now: Instant) {
        for key in self.table.keys_on(conn) {
            let failure = HandoffFailure::Refused { reason, detail: detail.to_owned() };
            self.input(key, Input::Rejected(failure), now);
        }
    }

    pub(super) fn send(&mut self, conn: ConnId, message: &Message) {
        let bytes = message.encode();
        #[cfg(any(test, feature = "testing"))]
        {
            let to = self.connections.get(conn).and_then(|c| c.party.as_ref());
            let bent = self.config.hooks.bend_message(to, bytes);
            bent.into_iter().for_each(|bytes| self.transport.send(conn, bytes));
        }
        #[cfg(not(any(test, feature = "testing")))]
        self.transport.send(conn, bytes);
    }

    pub(super) fn close(&mut self, conn: ConnId, reason: &str) {
        if let Some(connection) = self.connections.get_mut(conn) {
            connection.closing = true;
        }
        self.transport.close(conn, reason);
    }

    /// A connection has closed: every handoff on it fails, and no other.
    pub(super) fn closed(&mut self, conn: ConnId, reason: &str, fenced: bool, draining: bool, now: Instant) {
        let Some(connection) = self.connections.remove(conn) else { return };
        let free = self.draining.closed(conn, &connection, draining);
        self.reuse(free);
        if let Some(peer) = &connection.party {
            tracing::info!(%peer, reason, fenced, draining, "transfer peer disconnected");
        }
        self.lost(conn, self.table.keys(), reason, fenced, now);
        if let Some(party) = connection.party.filter(|party| !self.connections.has_party(party)) {
            self.tally.disconnected(&party);
        }
        self.fence_late(now);
    }

    /// The pool's device has ended its work for a connection that has closed.
    pub(super) fn drained(&mut self, conn: ConnId, fenced: bool, now: Instant) {
        let free = self.draining.drained(conn);
        self.reuse(free);
        for key in if fenced { self.table.keys_on(conn) } else { Vec::new() } {
            self.input(key, Input::Fenced, now);
        }
        self.fence_late(now);
    }

    /// Notifies those of `keys` that are on the connection.
    pub(super) fn lost(&mut self, conn: ConnId, keys: Vec<HandoffKey>, reason: &str, fenced: bool, now: Instant) {
        for key in keys {
            if self.table.get(key).is_some_and(|entry| entry.conn == conn) {
                self.input(key, Input::Lost { fenced, detail: reason.to_owned() }, now);
            }
        }
    }
}
