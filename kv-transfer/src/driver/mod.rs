//! The driver: owns the connections, the inbox's contents and the table of handoffs, and moves them on turn by turn.
//!
//! ```text
//!            commands                 events
//!   Inbox ──────────────┐    ┌──────────────── Transport
//!                       ▼    ▼
//!                 ┌────────────────┐   Input    ┌──────────────────────────────────┐
//!                 │     Driver     │ ─────────► │ Table: HandoffKey -> Role        │
//!                 │  turn(now)     │ ◄───────── │ put::Source │ put::Sink          │
//!                 └────────────────┘   Effect   │ get::Reader │ get::Owner         │
//!                       │    │                  └──────────────────────────────────┘
//!                       ▼    ▼
//!              SinkHandler  Verifier, Transport
//! ```
//!
//! A role holds its state machine and its side of the I/O, takes inputs and returns effects; it knows neither the transport nor the worker.
//! Only the driver carries effects out. It reads no clock, starts no thread and draws no random numbers of its own, so the same driver runs
//! on the progress thread of a service and, many of them in one thread, under virtual time.

mod connections;
mod pump;
mod table;

use crate::greeting::{Terms, Unwelcome, check_hello, hello};
use crate::handler::{AdoptReply, GrantReply, PinReply, SinkHandler};
use crate::handoff::{Admission, Exposure};
use crate::hazards::hazard;
use crate::inbox::{Command, Inbox, OfferOf};
use crate::message::{Direction, GREETING_BYTES_MAX, Hello, Message, Offer, message_bytes_max};
use crate::plan::check_from;
use crate::role::{Counted, Effect, HandoffKey, Input, Link};
use crate::transport::{ConnId, Event, Transport, Wake};
use crate::verify::{Job, Verifier};
use crate::{
    HandoffFailure, Party, Peer, PeerStats, RefuseReason, TransferConfig, TransferError, TransferStats, get, put,
};
use baton_types::{InstanceId, TicketId};
use connections::{Connection, Connections, Greeting};
use parking_lot::Mutex;
use pump::Post;
use std::sync::Arc;
use std::time::{Duration, Instant};
use table::{Role, Table};

/// How often deadlines are looked at, and the sleep while something is watched that cannot wake us.
const TICK: Duration = Duration::from_millis(5);
/// Sleep while fences or holds are polled.
const WATCH: Duration = Duration::from_millis(1);
/// Sleep when nothing is open.
const IDLE: Duration = Duration::from_millis(200);
/// How long bytes of a dead process may lie in receive queues of this one: far longer than one turn.
const DRAIN: Duration = Duration::from_millis(100);
/// The same for a driver that never finds nothing to do: long enough for every lane to have had its turn many times.
const DRAIN_BUSY: Duration = Duration::from_secs(5);

/// What a driver works with.
pub struct Ports {
    /// Carries messages and bytes.
    pub transport: Box<dyn Transport>,
    /// Ends [`Driver::sleep`] early, from any thread.
    pub wake: Wake,
    /// Computes and compares checksums.
    pub verifier: Box<dyn Verifier>,
    /// 64 random bits, for tickets.
    pub draw: Box<dyn FnMut() -> u64>,
}

/// What one turn was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Whether anything moved.
    pub worked: bool,
    /// When the next turn is due if nothing happens meanwhile.
    pub wake_at: Instant,
    /// It was the last one: [`Driver::finish`] is to be called.
    pub over: bool,
}

/// Moves the handoffs of one service on.
pub struct Driver {
    config: TransferConfig,
    transport: Box<dyn Transport>,
    inbox: Arc<Inbox>,
    handler: Arc<dyn SinkHandler>,
    verifier: Box<dyn Verifier>,
    draw: Box<dyn FnMut() -> u64>,
    connections: Connections,
    table: Table,
    /// What the transport saw in the last turn.
    events: Vec<Event>,
    stats: TransferStats,
    published: Arc<Mutex<TransferStats>>,
    /// Parties proven dead, whose lanes are being drained since then.
    fencing: Vec<(Party, Instant)>,
    stopping: Option<Instant>,
    next_tick: Option<Instant>,
    /// When idle connections are looked for next.
    next_sweep: Option<Instant>,
}

#[cfg(test)]
mod tests;

impl Driver {
    /// # Errors
    /// Where the pool's layout is too long to greet with.
    pub(crate) fn new(
        config: TransferConfig,
        ports: Ports,
        handler: Arc<dyn SinkHandler>,
    ) -> Result<Self, TransferError> {
        let Ports { transport, wake, verifier, draw } = ports;
        let greeting = Message::Hello(hello(&config, transport.region(), config.party.clone())).encode();
        if greeting.len() > GREETING_BYTES_MAX {
            let detail = format!("a layout that takes {} bytes to greet with, of {GREETING_BYTES_MAX}", greeting.len());
            return Err(TransferError::Config(detail));
        }
        #[cfg(any(test, feature = "testing"))]
        config.hazards.announce();
        Ok(Self {
            inbox: Arc::new(Inbox::new(config.limits.begun_max, wake)),
            config,
            transport,
            handler,
            verifier,
            draw,
            connections: Connections::default(),
            table: Table::default(),
            events: Vec::new(),
            stats: TransferStats::default(),
            published: Arc::default(),
            fencing: Vec::new(),
            stopping: None,
            next_tick: None,
            next_sweep: None,
        })
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    pub(crate) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    pub(crate) fn published(&self) -> &Arc<Mutex<TransferStats>> {
        &self.published
    }

    /// Takes in what came, and moves everything on. Instants of later turns are not before those of earlier ones.
    pub fn turn(&mut self, now: Instant) -> Turn {
        let mut worked = false;
        // The transport copies and may take long: what it saw complete is timed by the turn behind it.
        for event in std::mem::take(&mut self.events) {
            self.event(event, now);
            worked = true;
        }
        for command in self.inbox.drain() {
            self.command(command, now);
            worked = true;
        }
        for key in self.table.keys_where(|role| matches!(role, Role::Source(source) if source.is_fence_over())) {
            self.input(key, Input::Poll, now);
            worked = true;
        }
        worked |= self.post(now);
        if self.next_tick.is_none_or(|at| now >= at) {
            self.next_tick = Some(now + TICK);
            self.tick(now, worked);
        }
        let over = self.inbox.has_failed() || self.stopping.is_some_and(|by| now >= by || self.table.is_quiet());
        if !over {
            worked |= self.transport.progress(now, &mut self.events) | !self.events.is_empty();
        }
        Turn { worked, wake_at: self.wake_at(now), over }
    }

    fn wake_at(&self, now: Instant) -> Instant {
        if !self.events.is_empty() || self.inbox.has_work() {
            return now;
        }
        let open = !self.table.is_empty() || !self.fencing.is_empty() || self.connections.is_greeting();
        now + match self.table.watches() {
            true => WATCH,
            false if open || self.stopping.is_some() => TICK,
            // Signs of life are given and looked for four times as often as silence is tolerated.
            false => IDLE.min(Duration::from_millis(self.config.limits.peer_silent_ms) / 8),
        }
    }

    /// Waits for something to do, at most so long. For a thread of its own.
    pub fn sleep(&mut self, at_most: Duration) {
        self.publish();
        if self.inbox.may_sleep() {
            self.transport.sleep(at_most);
        }
        self.inbox.awake();
    }

    /// Ends everything: what is open fails, peers have until `deadline` to hear of it, and blocks that they could still write to are lost.
    pub fn finish(&mut self, now: Instant, deadline: Instant) {
        self.give_up_begun(now);
        // From here on no peer is heard; blocks whose writers this transport does not fence by closing stay quarantined.
        let mut events = Vec::new();
        self.transport.shutdown(deadline, &mut events);
        let closed = |event| match event {
            Event::Closed { conn, reason, fenced, .. } => Some((conn, reason, fenced)),
            _ => None,
        };
        let closed: Vec<_> = events.into_iter().filter_map(closed).collect();
        // Only now is every operation over that read a source's blocks.
        for (conn, reason, fenced) in &closed {
            let not_sinks = self.table.keys_where(|role| !matches!(role, Role::Sink(_)));
            self.lost(*conn, not_sinks, reason, *fenced, now);
        }
        self.inbox.close();
        for (conn, reason, fenced) in closed {
            self.lost(conn, self.table.keys(), &reason, fenced, now);
        }
        self.publish();
        self.table.forget_written();
    }

    /// After a panic in the middle of anything: takes nothing more, and loses what peers may still write to.
    pub(crate) fn abandon(&mut self) {
        self.inbox.fail();
        self.inbox.close();
        self.table.forget_written();
    }

    /// Gives up everything that this side began, and lets go of what others get.
    fn give_up_begun(&mut self, now: Instant) {
        for key in self.table.keys_where(|role| !matches!(role, Role::Sink(_))) {
            self.input(key, Input::Abort(HandoffFailure::Stopped), now);
        }
    }

    fn command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Put { key, peer, request, outcome } => match self.connection_to(&peer, now) {
                Ok(conn) => {
                    let source = put::Source::new(request, peer.party, outcome, &self.config, now);
                    self.table.insert(key, conn, Role::Source(source));
                    self.input(key, Input::Greeted, now);
                }
                Err(failure) => {
                    self.inbox.begun_ended(key);
                    drop(request);
                    outcome.send(Err(failure)).ok();
                }
            },
            Command::Get { key, peer, request, outcome } => match self.connection_to(&peer, now) {
                Ok(conn) => {
                    let reader = get::Reader::new(request, peer.party, outcome, &self.config, now);
                    self.table.insert(key, conn, Role::Reader(reader));
                    self.input(key, Input::Greeted, now);
                }
                Err(failure) => {
                    self.inbox.begun_ended(key);
                    drop(request);
                    outcome.send(Err(failure)).ok();
                }
            },
            Command::Input(key, Input::Granted(hold)) => match self.barred_since(key) {
                Some(detail) => {
                    drop(hold); // Nobody was told of these blocks.
                    self.input(key, Input::Barred(detail), now);
                }
                None => self.input(key, Input::Granted(hold), now),
            },
            Command::Input(key, input) => self.input(key, input, now),
            Command::PeerDead(party) => {
                // What its lanes still hold here is drained by closing them, then its blocks are free.
                for conn in self.connections.to_party(&party) {
                    self.close(conn, "the peer's process is dead");
                }
                self.fencing.push((party, now));
            }
            Command::Stop(by) => {
                self.stopping = Some(by.min(self.stopping.unwrap_or(by)));
                self.give_up_begun(now);
                for key in self.table.keys() {
                    self.input(key, Input::Abort(HandoffFailure::Stopped), now);
                }
            }
        }
    }

    fn event(&mut self, event: Event, now: Instant) {
        match event {
            Event::Accepted { conn, proven } => {
                self.connections.insert(conn, Connection::accepted(proven, &self.config, now));
                if self.config.credentials.is_some() && !proven {
                    self.close(conn, "the peer has not proven that it is a worker");
                }
            }
            Event::Message(conn, bytes) => match Message::decode(&bytes) {
                Ok(message) => self.message(conn, message, now),
                Err(error) => self.close(conn, &format!("a malformed message: {error}")),
            },
            Event::PutDone(conn, bytes) => {
                if let Some(connection) = self.connections.get_mut(conn) {
                    connection.pump.put_done(bytes);
                }
            }
            Event::Got(number, bytes) => self.input(HandoffKey(number), Input::Got { bytes }, now),
            Event::Flushed(conn, id) => {
                self.count(conn, |stats| stats.flushes += 1);
                let covered = self.connections.get_mut(conn).map(|c| c.pump.flushed(id)).unwrap_or_default();
                for (key, epoch) in covered {
                    self.input(key, Input::Flushed { epoch }, now);
                }
            }
            Event::PutRefused(conn) => self.count(conn, |stats| stats.puts_refused += 1),
            Event::Closed { conn, reason, fenced, unproven } => {
                if unproven {
                    self.rejected(conn, RefuseReason::Unproven, &reason, now);
                }
                self.closed(conn, &reason, fenced, now);
            }
        }
    }

    fn message(&mut self, conn: ConnId, message: Message, now: Instant) {
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

    /// A message about a handoff that ended, or never was: whoever waits for an answer to it gets one.
    fn stale(&mut self, conn: ConnId, message: Message) {
        self.count(conn, |stats| stats.stale_messages += 1);
        match message {
            // Nothing is being written, and the sink waits to hear it.
            Message::Grant { handoff, ticket, .. } | Message::Abort { handoff, ticket, .. } => {
                let detail = "the handoff ended".into();
                self.send(conn, &Message::Aborted { handoff, ticket, flushed: true, detail });
            }
            Message::Commit(commit) => {
                let detail = "no such ticket is open between these two incarnations".into();
                self.send(conn, &Message::Nack { ticket: commit.ticket, corrupt: false, detail });
            }
            Message::Ask { ticket, .. } | Message::Confirm { ticket } => {
                let detail = "no such pin holds between these two incarnations".into();
                self.send(conn, &Message::NotHeld { ticket, detail });
            }
            _ => {}
        }
    }

    /// The peer has said who it is, in a hello or a welcome.
    fn greeted(&mut self, conn: ConnId, theirs: &Hello, now: Instant) {
        let max = self.config.limits.accepted_max;
        let map = check_hello(&self.config, theirs).and_then(|map| match self.connections.is_full_for(conn, max) {
            true => {
                let told = format!("{max} peers have connected already");
                Err(Unwelcome { reason: RefuseReason::Busy, detail: told.clone(), told })
            }
            false => Ok(map),
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
        self.stats.peers.entry(peer.clone()).or_default().lanes = format!("{transport} {lanes}");
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
    fn connection_to(&mut self, peer: &Peer, now: Instant) -> Result<ConnId, HandoffFailure> {
        if self.stopping.is_some() {
            return Err(HandoffFailure::Stopped);
        }
        if let Some(conn) = self.connections.leading_to(peer) {
            return Ok(conn);
        }
        // Of those that this side connected to: those that connected have places of their own.
        let dialled = self.connections.count_dialled();
        if dialled >= self.config.limits.peers_max {
            return Err(HandoffFailure::PeerLost(format!("{dialled} peers are connected already")));
        }
        let conn = self.transport.connect(&peer.address).map_err(HandoffFailure::PeerLost)?;
        self.connections.insert(conn, Connection::dialled(peer, &self.config, now));
        let ours = hello(&self.config, self.transport.region(), peer.party.clone());
        self.send(conn, &Message::Hello(ours));
        Ok(conn)
    }

    /// The peer will have nothing to do with us.
    fn rejected(&mut self, conn: ConnId, reason: RefuseReason, detail: &str, now: Instant) {
        for key in self.table.keys_on(conn) {
            let failure = HandoffFailure::Refused { reason, detail: detail.to_owned() };
            self.input(key, Input::Rejected(failure), now);
        }
    }

    fn send(&mut self, conn: ConnId, message: &Message) {
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

    fn close(&mut self, conn: ConnId, reason: &str) {
        if let Some(connection) = self.connections.get_mut(conn) {
            connection.closing = true;
        }
        self.transport.close(conn, reason);
    }

    /// A connection is over: everything on it fails, and nothing else.
    fn closed(&mut self, conn: ConnId, reason: &str, fenced: bool, now: Instant) {
        let Some(connection) = self.connections.remove(conn) else { return };
        if let Some(peer) = &connection.party {
            tracing::info!(%peer, reason, fenced, "transfer peer disconnected");
        }
        self.lost(conn, self.table.keys(), reason, fenced, now);
        // A peer's own counters go with its last connection; the total keeps them.
        if let Some(party) = connection.party.filter(|party| !self.connections.has_party(party)) {
            self.stats.peers.remove(&party);
        }
    }

    /// Tells those of `keys` that are on the connection.
    fn lost(&mut self, conn: ConnId, keys: Vec<HandoffKey>, reason: &str, fenced: bool, now: Instant) {
        for key in keys {
            if self.table.get(key).is_some_and(|entry| entry.conn == conn) {
                self.input(key, Input::Lost { fenced, detail: reason.to_owned() }, now);
            }
        }
    }

    /// A peer wants to put or to get something.
    fn offered(&mut self, conn: ConnId, offer: Offer, now: Instant) {
        let (handoff, direction) = (offer.handoff, offer.direction);
        let check = match direction {
            Direction::Put => self.check_put(conn, &offer),
            Direction::Get => self.check_get(conn, &offer),
        };
        if let Err((reason, detail)) = check {
            if direction == Direction::Put {
                self.counted(conn, Counted::Refused(reason));
            }
            return self.send(conn, &Message::Refuse { handoff, reason, detail });
        }
        let key = self.inbox.offer(&offer.request_id);
        let draw = std::iter::repeat_with(|| TicketId((self.draw)()));
        let ticket = draw.into_iter().find(|t| t.0 != 0 && !self.table.has_given(*t));
        let ticket = ticket.expect("64 random bits find a free ticket");
        let mut effects = Vec::new();
        let proven = self.connections.get(conn).is_some_and(|c| c.proven);
        let link = link(&self.config, &*self.transport, &self.connections, conn, key);
        let role = match direction {
            Direction::Put => Role::Sink(put::Sink::new(offer, ticket, &link, now)),
            Direction::Get => Role::Owner(get::Owner::new(offer, ticket, proven, &link, now, &mut effects)),
        };
        self.table.insert(key, conn, role);
        effects.into_iter().for_each(|effect| self.perform(key, conn, effect, now));
        self.admit_waiting(now);
    }

    /// Whether an offer from `theirs` to `ours` is the peer's own, its first of this number and for this incarnation.
    fn check_offer(
        &self,
        conn: ConnId,
        offer: &Offer,
        ours: &Party,
        theirs: &Party,
    ) -> Result<&Terms, (RefuseReason, String)> {
        let terms = self.connections.get(conn).and_then(Connection::terms);
        let terms = terms.ok_or((RefuseReason::Protocol, "an offer before the greeting".to_owned()))?;
        terms.check().map_err(|failure| (RefuseReason::Incompatible, failure.to_string()))?;
        if self.stopping.is_some() {
            return Err((RefuseReason::Draining, "the instance is going away".into()));
        }
        let any_start = hazard!(self.config, AnyIncarnation);
        if *ours != self.config.party && !any_start {
            return Err((RefuseReason::WrongIncarnation, format!("this is {}, not {ours}", self.config.party)));
        }
        if terms.party != *theirs && !any_start {
            return Err((RefuseReason::Protocol, "the offer is not the peer's own".into()));
        }
        if self.table.has_number(conn, offer.handoff) {
            return Err((RefuseReason::Protocol, "the offer is not its first".into()));
        }
        Ok(terms)
    }

    fn check_put(&self, conn: ConnId, offer: &Offer) -> Result<(), (RefuseReason, String)> {
        let terms = self.check_offer(conn, offer, &offer.sink, &offer.source)?;
        let refuse = |reason, detail: String| Err((reason, detail));
        if offer.from != 0 || !offer.name.is_empty() {
            return refuse(RefuseReason::Protocol, "what is left out of a put is for its sink to say".into());
        }
        if terms.cuts.is_none() || terms.legs.0 != offer.shards {
            return refuse(RefuseReason::Protocol, "the offer is not of the shards that hold heads of this one".into());
        }
        if offer.shards > 1 && !self.handler.joins_legs() {
            return refuse(RefuseReason::Protocol, "sequences of several shards are not taken here".into());
        }
        let blocks = self.config.map.layout().blocks_for(offer.tokens as usize);
        if offer.tokens == 0 || blocks > self.config.map.blocks() as usize {
            return refuse(RefuseReason::NoRoom, format!("{} tokens never fit this pool", offer.tokens));
        }
        let open = self.table.sinks();
        if open >= self.config.limits.offered_max {
            return refuse(RefuseReason::Busy, format!("{open} puts of peers are open"));
        }
        Ok(())
    }

    fn check_get(&self, conn: ConnId, offer: &Offer) -> Result<(), (RefuseReason, String)> {
        let terms = self.check_offer(conn, offer, &offer.source, &offer.sink)?;
        let refuse = |reason, detail: String| Err((reason, detail));
        if terms.shard != self.config.shard.index() || terms.legs != (1, 1) {
            return refuse(RefuseReason::Protocol, "gets between shards that hold other heads are not served".into());
        }
        if offer.shards != 1 || offer.tokens == 0 {
            return refuse(RefuseReason::Protocol, "a get of nothing that is served".into());
        }
        let here = check_from(&self.config.map, offer.from, offer.tokens);
        here.and_then(|()| terms.check_part(offer.from, offer.tokens - offer.from))
            .map_err(|detail| (RefuseReason::Protocol, detail))?;
        let open = self.table.owners();
        if open >= self.config.limits.offered_max {
            return refuse(RefuseReason::Busy, format!("{open} gets of peers are open"));
        }
        Ok(())
    }

    /// Lets sinks ask the worker for room, as far as the bound on what each peer could leave in quarantine allows. A peer's offers go in
    /// order.
    fn admit_waiting(&mut self, now: Instant) {
        let mut passed_over: Vec<InstanceId> = Vec::new();
        for key in self.table.keys_where(|role| matches!(role, Role::Sink(sink) if sink.waits())) {
            let Some(entry) = self.table.get(key) else { continue };
            let Role::Sink(sink) = &entry.role else { continue };
            let (peer, wanted) = sink.at_stake(self.config.map.layout());
            let (peer, conn) = (peer.clone(), entry.conn);
            let (admission, exposure, max) = self.admits(&peer, key, conn, wanted);
            match admission {
                Admission::Ask | Admission::Wait if passed_over.contains(&peer) => {}
                Admission::Ask => self.input(key, Input::Admitted, now),
                Admission::Wait => passed_over.push(peer),
                Admission::Refuse => {
                    let detail = match exposure.quarantined {
                        0 => format!(
                            "{wanted} blocks are more than {peer} may come to leave in quarantine, which is {max}"
                        ),
                        _ => barred(&peer, exposure),
                    };
                    self.input(key, Input::Barred(detail), now);
                }
            }
        }
    }

    /// Whether a peer may be let write to `wanted` blocks, what it could leave in quarantine beside, and the bound on that.
    fn admits(&self, peer: &InstanceId, key: HandoffKey, conn: ConnId, wanted: usize) -> (Admission, Exposure, usize) {
        let max = self.config.limits.quarantined_blocks_of(&self.config.map);
        let exposure = self.exposure(peer, key);
        (exposure.admits(wanted, self.transport.closing_fences(conn), max), exposure, max)
    }

    fn exposure(&self, peer: &InstanceId, except: HandoffKey) -> Exposure {
        let fences = |conn| self.transport.closing_fences(conn);
        self.table.exposure(peer, except, self.config.map.layout(), fences)
    }

    /// Why the worker's grant for an offer comes too late: blocks were quarantined for the peer since the worker was asked.
    fn barred_since(&self, key: HandoffKey) -> Option<String> {
        let Role::Sink(sink) = &self.table.get(key)?.role else { return None };
        let peer = &sink.source().instance;
        let exposure = self.exposure(peer, key);
        (exposure.quarantined > 0).then(|| barred(peer, exposure))
    }

    /// Something happened to one handoff.
    fn input(&mut self, key: HandoffKey, input: Input, now: Instant) {
        let Some(entry) = self.table.get_mut(key) else { return };
        let (conn, mut effects) = (entry.conn, Vec::new());
        let link = link(&self.config, &*self.transport, &self.connections, conn, key);
        entry.role.handle(input, &link, now, &mut effects);
        effects.into_iter().for_each(|effect| self.perform(key, conn, effect, now));
    }

    fn perform(&mut self, key: HandoffKey, conn: ConnId, effect: Effect, now: Instant) {
        let pump = self.connections.get_mut(conn).map(|connection| &mut connection.pump);
        match effect {
            Effect::Send(message) => self.send(conn, &message),
            Effect::Put { epoch, ticket, run } => {
                pump.into_iter().for_each(|pump| pump.put(key, epoch, ticket, run));
            }
            Effect::Flush { epoch } => pump.into_iter().for_each(|pump| pump.flush(key, epoch)),
            Effect::FlushPosted { epoch } => pump.into_iter().for_each(|pump| pump.flush_posted(key, epoch)),
            Effect::CancelPuts => pump.into_iter().for_each(|pump| pump.cancel(key)),
            Effect::Get(run) => self.transport.get(conn, key.0, run),
            Effect::OpenWindow(ticket, ranges) => self.transport.open_window(conn, ticket, ranges),
            Effect::CloseWindow(ticket) => self.transport.close_window(conn, ticket),
            Effect::Verify(work) => self.verifier.submit(Job { inbox: self.inbox.clone(), key, work }),
            Effect::Disconnect(reason) => self.close(conn, reason),
            Effect::Heed(ticket) => self.table.heed(key, ticket),
            Effect::Admit { blocks } => {
                let Some(Role::Reader(reader)) = self.table.get(key).map(|entry| &entry.role) else { return };
                let peer = reader.owner().instance.clone();
                let answer = match self.admits(&peer, key, conn, blocks) {
                    (Admission::Ask, ..) => Input::Admitted,
                    (Admission::Wait | Admission::Refuse, _, max) => Input::Barred(format!(
                        "{peer} could leave more than {max} blocks in quarantine here, or has some there"
                    )),
                };
                self.input(key, answer, now);
            }
            Effect::Reserve(offer) => {
                let standing = OfferOf { inbox: self.inbox.clone(), key };
                self.handler.reserve(offer, GrantReply::new(Arc::new(standing)));
            }
            Effect::Pin(question) => {
                let inbox = self.inbox.clone();
                let reply = PinReply::new(move |answer| {
                    let input = match answer {
                        Ok((blocks, hold)) => Input::Pinned { blocks, hold },
                        Err((reason, detail)) => Input::Refused { reason, detail },
                    };
                    inbox.answered(key, input);
                });
                self.handler.pin(question, reply);
            }
            Effect::Deliver(handoff) => {
                let inbox = self.inbox.clone();
                let reply = AdoptReply::new(move |answer| inbox.input(key, Input::Adopted(answer)));
                if let Some(answer) = self.handler.arrived(*handoff, reply) {
                    self.input(key, Input::Adopted(answer), now);
                }
            }
            Effect::Failed(offer, failure) => self.handler.ended(&offer, failure),
            Effect::Count(counted) => self.counted(conn, counted),
            Effect::Quarantined => self.inbox.begun_ended(key),
            Effect::Forget => match self.table.remove(key) {
                Some(Role::Source(_) | Role::Reader(_)) => self.inbox.begun_ended(key),
                Some(Role::Sink(sink)) => self.inbox.offer_ended(key, &sink.offer().request_id),
                Some(Role::Owner(owner)) => self.inbox.offer_ended(key, owner.request_id()),
                None => {}
            },
            // Where nobody asks any more, the owner dropped its end.
            Effect::PutEnded(to, outcome) => drop(to.send(outcome)),
            Effect::GetEnded(to, outcome) => drop(to.send(outcome)),
        }
    }

    /// Posts what each connection's credit allows; whether anything was.
    fn post(&mut self, now: Instant) -> bool {
        let mut posted = Vec::new();
        let mut any = false;
        for (conn, connection) in self.connections.iter_mut() {
            while let Some(post) = connection.pump.next() {
                any = true;
                match post {
                    Post::Flush { id } => self.transport.flush(conn, id),
                    Post::Put { key, epoch, ticket, run } => {
                        self.transport.put(conn, ticket, run);
                        posted.push((conn, key, Input::Posted { epoch, bytes: run.len }, run.len as u64));
                    }
                }
            }
        }
        for (conn, key, input, bytes) in posted {
            self.count(conn, |stats| {
                stats.puts += 1;
                stats.bytes_put += bytes;
            });
            self.input(key, input, now);
        }
        any
    }

    /// `moving` says whether the driver has found something to do in this turn.
    fn tick(&mut self, now: Instant, moving: bool) {
        for key in self.table.keys() {
            self.input(key, Input::Tick, now);
        }
        self.admit_waiting(now);
        self.fence_dead(now, moving);
        for conn in self.connections.overdue(now) {
            self.close(conn, "the peer does not answer the greeting");
        }
        let idle = Duration::from_millis(self.config.limits.idle_ms);
        if *self.next_sweep.get_or_insert(now) <= now {
            self.next_sweep = Some(now + idle / 8);
            for conn in self.connections.idle(&self.table.connections(), idle, now) {
                self.close(conn, "nothing used the connection");
            }
        }
        self.publish();
    }

    /// Releases what dead parties could have written, once their connections are closed and a while passed in which whatever their
    /// lanes still held here was taken in: a shorter one where nothing is `moving`, so that nothing can be left.
    fn fence_dead(&mut self, now: Instant, moving: bool) {
        let drain = if moving { DRAIN_BUSY } else { DRAIN };
        let drained = |(party, since): &(Party, Instant)| now - *since >= drain && !self.connections.has_party(party);
        let (fenced, left) = std::mem::take(&mut self.fencing).into_iter().partition::<Vec<_>, _>(drained);
        self.fencing = left;
        for (party, _) in fenced {
            for key in self.table.keys_of_writer(&party) {
                self.input(key, Input::Fenced, now);
            }
        }
    }

    /// Counts for a connection's peer, and in total.
    fn count(&mut self, conn: ConnId, change: impl Fn(&mut PeerStats)) {
        change(&mut self.stats.total);
        let party = self.connections.get(conn).and_then(|c| c.party.as_ref());
        if let Some(stats) = party.and_then(|party| self.stats.peers.get_mut(party)) {
            change(stats);
        }
    }

    fn counted(&mut self, conn: ConnId, counted: Counted) {
        self.count(conn, |stats| match counted {
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
    fn publish(&mut self) {
        self.table.gauge(&mut self.stats, self.config.map.layout());
        let mut published = self.published.lock();
        if *published != self.stats {
            published.clone_from(&self.stats);
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({})", self.config.party)
    }
}

/// What a role may know. No method: the table is borrowed at the same time.
fn link<'a>(
    config: &'a TransferConfig,
    transport: &dyn Transport,
    connections: &'a Connections,
    conn: ConnId,
    key: HandoffKey,
) -> Link<'a> {
    let connection = connections.get(conn);
    Link {
        key,
        config,
        terms: connection.and_then(Connection::terms),
        transport: transport.name(),
        lanes: connection.map_or("", |connection| &connection.lanes),
        closing_fences: transport.closing_fences(conn),
        gets_by_itself: transport.gets_by_itself(conn),
    }
}

fn barred(peer: &InstanceId, exposure: Exposure) -> String {
    format!(
        "{} blocks that {peer} could still write are quarantined; it gets no others until they are back",
        exposure.quarantined
    )
}
