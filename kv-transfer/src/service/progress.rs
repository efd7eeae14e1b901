//! The loop of the progress thread, and what it does for connections.

use super::checker::Checker;
use super::connections::{Connection, Connections, Greeting, Unwelcome, check_hello, hello};
use super::fetching::{Fetch, Fetches};
use super::gathering::{Gathering, GatheringKey};
use super::inbox::Inbox;
use super::pinning::{Pin, Pins};
use super::receiving::Incoming;
use super::sending::Sending;
use crate::message::{GREETING_BYTES_MAX, Hello, Message, message_bytes_max};
use crate::transport::{ConnId, Event, Transport};
use crate::{Greetings, Party, RefuseReason, SinkHandler, TransferConfig, TransferStats};
use baton_types::TicketId;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often deadlines are looked at, and the sleep while something is watched that cannot wake us.
const TICK: Duration = Duration::from_millis(5);
/// Sleep while fences or gates are polled.
const WATCH: Duration = Duration::from_millis(1);
/// Sleep when nothing is open.
const IDLE: Duration = Duration::from_millis(200);

/// Everything that the progress thread owns.
pub(super) struct Progress {
    pub(super) config: TransferConfig,
    pub(super) transport: Box<dyn Transport>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) handler: Arc<dyn SinkHandler>,
    pub(super) checker: Checker,
    pub(super) connections: Connections,
    /// The connection that new handoffs to a shard of a party take: one that this side opened.
    pub(super) by_party: BTreeMap<(Party, u16), ConnId>,
    /// Handoffs being sent, by key, which is also their number on the wire.
    pub(super) sending: BTreeMap<u64, Sending>,
    pub(super) sending_tickets: HashMap<(ConnId, TicketId), u64>,
    /// Handoffs being received, by key.
    pub(super) incoming: BTreeMap<u64, Incoming>,
    pub(super) incoming_numbers: HashMap<(ConnId, u64), u64>,
    pub(super) incoming_tickets: HashMap<TicketId, u64>,
    /// Legs that arrive together.
    pub(super) gatherings: BTreeMap<GatheringKey, Gathering>,
    /// Gets that read from others, and those of others that read here.
    pub(super) fetches: Fetches,
    pub(super) pins: Pins,
    pub(super) stats: TransferStats,
    pub(super) published: Arc<Mutex<TransferStats>>,
    /// Parties proven dead, whose lanes are being drained since then.
    pub(super) fencing: Vec<(Party, Instant)>,
    pub(super) stopping: Option<Instant>,
    next_tick: Instant,
    /// When idle connections are looked for next.
    next_sweep: Instant,
}

#[cfg(test)]
#[path = "progress_tests.rs"]
mod tests;

impl Progress {
    pub(super) fn new(
        config: TransferConfig,
        transport: Box<dyn Transport>,
        inbox: Arc<Inbox>,
        handler: Arc<dyn SinkHandler>,
        checker: Checker,
        published: Arc<Mutex<TransferStats>>,
    ) -> Self {
        Self {
            config,
            transport,
            inbox,
            handler,
            checker,
            connections: BTreeMap::new(),
            by_party: BTreeMap::new(),
            sending: BTreeMap::new(),
            sending_tickets: HashMap::new(),
            incoming: BTreeMap::new(),
            incoming_numbers: HashMap::new(),
            incoming_tickets: HashMap::new(),
            gatherings: BTreeMap::new(),
            fetches: BTreeMap::new(),
            pins: BTreeMap::new(),
            stats: TransferStats::default(),
            published,
            fencing: Vec::new(),
            stopping: None,
            next_tick: Instant::now(),
            next_sweep: Instant::now(),
        }
    }

    /// Runs until stopped, or until something panics here or on the checksum thread. Then everything open fails, whoever asks later is
    /// told, and the service is not healthy any more.
    pub(super) fn run(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.run_until_stopped())).is_err() {
            self.inbox.fail();
        }
        if self.inbox.has_failed() {
            tracing::error!(party = %self.config.party, "the transfer service ends after a panic; restart this worker");
        }
        if catch_unwind(AssertUnwindSafe(|| self.finish())).is_err() {
            self.inbox.fail();
            self.inbox.close();
            // Peers may still write to these blocks: better lost than used again.
            std::mem::forget((std::mem::take(&mut self.incoming), std::mem::take(&mut self.fetches)));
        }
    }

    fn run_until_stopped(&mut self) {
        let spin = Duration::from_micros(self.config.limits.spin_us);
        let mut events = Vec::new();
        let mut last_work = Instant::now();
        loop {
            let now = Instant::now();
            let mut worked = false;
            for command in self.inbox.drain() {
                self.command(command, now);
                worked = true;
            }
            worked |= self.transport.progress(now, &mut events);
            // Progress copies and may take long: what it saw complete is timed by its end.
            let now = Instant::now();
            for event in events.drain(..) {
                self.event(event, now);
                worked = true;
            }
            worked |= self.poll_fences(now);
            worked |= self.pump(now) | self.pump_fetches();
            if now >= self.next_tick {
                self.next_tick = now + TICK;
                self.tick(now, worked);
            }
            if self.inbox.has_failed() || self.stopping.is_some_and(|by| now >= by || self.is_quiet()) {
                return;
            }
            if worked {
                last_work = now;
            } else if now - last_work >= spin {
                self.sleep();
            }
        }
    }

    fn is_quiet(&self) -> bool {
        let reading = !self.fetches.values().all(Fetch::is_quarantined) || !self.pins.is_empty();
        !reading && self.sending.is_empty() && self.incoming.values().all(Incoming::is_quarantined)
    }

    fn sleep(&mut self) {
        self.publish();
        let held = self.incoming.values().any(Incoming::is_held) || self.fetches.values().any(Fetch::is_held);
        let watches = held || self.sending.values().any(Sending::is_watched);
        let quarantined = !self.incoming.is_empty() || !self.fetches.is_empty();
        let open = !self.is_quiet() || quarantined || !self.fencing.is_empty();
        let greeting = self.connections.values().any(|c| c.greet_by().is_some());
        let timeout = match watches {
            true => WATCH,
            false if open || greeting || self.stopping.is_some() => TICK,
            // Signs of life are given and looked for four times as often as silence is tolerated.
            false => IDLE.min(Duration::from_millis(self.config.limits.peer_silent_ms) / 8),
        };
        if self.inbox.may_sleep() {
            self.transport.sleep(timeout);
        }
        self.inbox.awake();
    }

    /// The peer has said who it is, in a hello or a welcome.
    pub(super) fn greeted(&mut self, conn: ConnId, theirs: &Hello, now: Instant) {
        let full = self.is_full_for(conn);
        let map = match check_hello(&self.config, theirs).and_then(|map| full.map_or(Ok(map), Err)) {
            Ok(map) => map,
            Err(Unwelcome { reason, detail, told }) => {
                tracing::warn!(peer = %theirs.party, detail, "refuses a transfer connection");
                let proven = self.connections.get(&conn).is_some_and(|c| c.proven);
                self.send(conn, &Message::Reject { reason, detail: if proven { detail.clone() } else { told } });
                return self.close(conn, &detail);
            }
        };
        self.transport.limit_messages(conn, message_bytes_max(&self.config.map));
        if let Err(error) = self.transport.set_remote(conn, &theirs.region) {
            return self.close(conn, &format!("the peer's region cannot be used: {error}"));
        }
        let lanes = self.transport.lanes(conn);
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let answer = matches!(connection.greeting, Greeting::Awaited(_));
        let compatible = match self.config.hooks.greetings() {
            Greetings::AnyFingerprint => Ok(()),
            _ => self.config.compatibility.check(&theirs.compatibility),
        };
        connection.protocol = self.config.protocol.common(theirs.protocol).unwrap_or_default();
        match &compatible {
            Ok(()) => {
                let protocol = connection.protocol;
                tracing::info!(peer = %theirs.party, transport = self.transport.name(), lanes, protocol, "transfer peer connected")
            }
            Err(mismatch) => tracing::warn!(peer = %theirs.party, %mismatch, "transfer peer is incompatible"),
        }
        connection.greeting = Greeting::Done(compatible);
        connection.party = Some(theirs.party.clone());
        connection.map = Some(map);
        connection.meet(&self.config, theirs.shard);
        connection.lanes = lanes;
        let label = format!("{} {}", self.transport.name(), connection.lanes);
        self.stats.peers.entry(theirs.party.clone()).or_default().lanes = label;
        if answer {
            let welcome = hello(&self.config, self.transport.region(), theirs.party.clone());
            self.send(conn, &Message::Welcome(welcome));
        }
        self.offer_waiting(conn, now);
        self.fetch_waiting(conn, now);
    }

    /// A peer connected. Until it greets it takes no place of those that have.
    pub(super) fn accepted(&mut self, conn: ConnId, proven: bool, now: Instant) {
        let by = now + Duration::from_millis(self.config.limits.connect_ms);
        let mut connection = Connection::new(Greeting::Awaited(by), None, 0, &self.config);
        connection.proven = proven;
        self.connections.insert(conn, connection);
        if self.config.credentials.is_some() && !proven {
            return self.close(conn, "the peer has not proven that it is a worker");
        }
        let awaited = |c: &Connection| !c.closing && matches!(c.greeting, Greeting::Awaited(_));
        let ungreeted: Vec<ConnId> = self.connections.iter().filter(|(_, c)| awaited(c)).map(|(&id, _)| id).collect();
        if ungreeted.len() > self.config.limits.ungreeted_max {
            self.close(ungreeted[0], "others connected, and the peer has not greeted");
        }
    }

    /// Why a peer that connected finds no place, if so.
    fn is_full_for(&self, conn: ConnId) -> Option<Unwelcome> {
        let max = self.config.limits.accepted_max;
        let others = self.connections.iter().filter(|(id, c)| **id != conn && c.address.is_none() && c.map.is_some());
        let full = self.connections.get(&conn).is_some_and(|c| c.address.is_none()) && others.count() >= max;
        let told = format!("{max} peers have connected already");
        full.then(|| Unwelcome { reason: RefuseReason::Busy, detail: told.clone(), told })
    }

    /// Whether a peer may not send a message of so many bytes now. The transport keeps longer ones out as well where it can.
    pub(super) fn is_too_long(&self, conn: ConnId, bytes: usize) -> bool {
        let greeted = self.connections.get(&conn).is_some_and(|c| c.map.is_some());
        bytes > if greeted { message_bytes_max(&self.config.map) } else { GREETING_BYTES_MAX }
    }

    /// The connection that leads to a peer, opened if need be. Never one that the peer opened: who is there is only the peer's own word.
    pub(super) fn connection_to(&mut self, peer: &crate::Peer, now: Instant) -> Result<ConnId, String> {
        let shard = (peer.party.clone(), peer.shard);
        if let Some(&conn) = self.by_party.get(&shard) {
            let leads = |c: &Connection| !c.closing && c.address.as_ref() == Some(&peer.address);
            if self.connections.get(&conn).is_some_and(leads) {
                return Ok(conn);
            }
        }
        // Of those that this side connected to: those that connected have places of their own.
        let dialled = self.connections.values().filter(|c| c.address.is_some()).count();
        if dialled >= self.config.limits.peers_max {
            return Err(format!("{dialled} peers are connected already"));
        }
        let conn = self.transport.connect(&peer.address)?;
        let by = now + Duration::from_millis(self.config.limits.connect_ms);
        let mut connection = Connection::new(Greeting::Sent(by), Some(peer.party.clone()), peer.shard, &self.config);
        connection.address = Some(peer.address.clone());
        // The transport carries nothing over a connection to a peer that did not.
        connection.proven = self.config.credentials.is_some();
        self.connections.insert(conn, connection);
        self.by_party.insert(shard, conn);
        let ours = hello(&self.config, self.transport.region(), peer.party.clone());
        self.send(conn, &Message::Hello(ours));
        Ok(conn)
    }

    pub(super) fn send(&mut self, conn: ConnId, message: &Message) {
        let to = self.connections.get(&conn).and_then(|c| c.party.as_ref());
        for bytes in self.config.hooks.outgoing_message(to, message.encode()) {
            self.transport.send(conn, bytes);
        }
    }

    pub(super) fn close(&mut self, conn: ConnId, reason: &str) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.closing = true;
        }
        self.transport.close(conn, reason);
    }

    /// A connection is over: everything on it fails, and nothing else.
    pub(super) fn closed(&mut self, conn: ConnId, reason: &str, fenced: bool, now: Instant) {
        let Some(connection) = self.connections.remove(&conn) else { return };
        if let Some(party) = &connection.party {
            tracing::info!(peer = %party, reason, fenced, "transfer peer disconnected");
            let shard = (party.clone(), connection.shard);
            if self.by_party.get(&shard) == Some(&conn) {
                self.by_party.remove(&shard);
            }
        }
        self.sources_lost(conn, reason, now);
        self.sinks_lost(conn, reason, fenced, now);
        self.fetches_lost(conn, reason, fenced, now);
        self.pins_lost(conn, now);
        if let Some(party) = connection.party {
            self.retire_stats(&party);
        }
    }

    fn tick(&mut self, now: Instant, moving: bool) {
        self.tick_sending(now);
        self.tick_incoming(now);
        self.tick_fetches(now);
        self.tick_pins(now);
        self.fence_dead(now, moving);
        let overdue = |c: &Connection| c.greet_by().is_some_and(|by| now >= by);
        let overdue: Vec<_> = self.connections.iter().filter(|(_, c)| overdue(c)).map(|(&id, _)| id).collect();
        for conn in overdue {
            self.close(conn, "the peer does not answer the greeting");
        }
        if now >= self.next_sweep {
            self.next_sweep = now + Duration::from_millis(self.config.limits.idle_ms) / 8;
            self.let_go_of_idle(now);
        }
        self.publish();
    }

    /// Closes connections that have carried nothing for long: each costs both sides memory and sockets.
    fn let_go_of_idle(&mut self, now: Instant) {
        let used: BTreeSet<ConnId> = self
            .sending
            .values()
            .map(Sending::conn)
            .chain(self.incoming.values().map(Incoming::conn))
            .chain(self.fetches.values().map(Fetch::conn))
            .chain(self.pins.values().map(Pin::conn))
            .collect();
        let (idle, mut unused) = (Duration::from_millis(self.config.limits.idle_ms), Vec::new());
        for (&conn, connection) in &mut self.connections {
            if used.contains(&conn) || connection.greet_by().is_some() {
                connection.used_at = now;
            } else if now.saturating_duration_since(connection.used_at) >= idle {
                unused.push(conn);
            }
        }
        unused.into_iter().for_each(|conn| self.close(conn, "nothing used the connection"));
    }

    fn finish(&mut self) {
        let now = Instant::now();
        self.give_up_all(now);
        // From here on no peer is heard; blocks whose writers this transport does not fence by closing stay quarantined.
        let mut events = Vec::new();
        self.transport.shutdown(now + self.config.limits.abort(), &mut events);
        // Only now is every operation over that read a source's blocks.
        for event in &events {
            if let Event::Closed { conn, reason, fenced, .. } = event {
                self.sources_lost(*conn, reason, now);
                self.fetches_lost(*conn, reason, *fenced, now);
                self.pins_lost(*conn, now);
            }
        }
        self.inbox.close();
        for event in events {
            if let Event::Closed { conn, reason, fenced, .. } = event {
                self.sinks_lost(conn, &reason, fenced, now);
            }
        }
        self.publish();
        // What is left of these peers may still write: better lost than used again.
        std::mem::forget(std::mem::take(&mut self.fetches));
    }
}
