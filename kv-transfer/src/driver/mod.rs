//! The driver: owns the connections, the inbox's contents and the table of handoffs, and advances them turn by turn.
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
//!              Calls, Verifier, Transport
//! ```
//!
//! A role holds its state machine and its side of the I/O. It takes inputs and returns effects, and knows neither the transport nor the
//! worker. Only the driver carries effects out. The driver reads no clock, starts no thread and draws no random numbers. So the same driver
//! runs on the progress thread of a service, or many of them in one thread under virtual time.

mod connections;
mod draining;
mod effects;
mod offers;
mod peers;
mod places;
mod pump;
pub(crate) mod quarantine_bound;
mod table;
mod tally;

use crate::calls::{Calls, WaitingCalls};
use crate::greeting::hello;
use crate::inbox::{Command, Inbox};
use crate::message::{GREETING_BYTES_MAX, Message};
use crate::role::{HandoffKey, Input};
use crate::transport::{ConnId, Event, Transport, Wake};
use crate::verify::Verifier;
use crate::{HandoffFailure, Party, RefuseReason, TransferConfig, TransferError, TransferStats, get, put};
use connections::{Connection, Connections};
use draining::{Draining, Waiting};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use table::{Role, Table};
use tally::Tally;

/// How often deadlines are checked, and the longest sleep while something is polled that cannot wake the driver.
const TICK: Duration = Duration::from_millis(5);
/// Sleep while fences or holds are polled.
const WATCH: Duration = Duration::from_millis(1);
/// Sleep when nothing is open.
const IDLE: Duration = Duration::from_millis(200);
/// How long bytes of a dead process may stay in receive queues of this one: far longer than one turn.
const DRAIN: Duration = Duration::from_millis(100);
/// The same for a driver that is never idle: long enough for every lane to be polled many times.
const DRAIN_BUSY: Duration = Duration::from_secs(5);
/// How long it is polled whether a dead process can be fenced: twice the longest life of one operation on the pool.
const FENCE_MAX: Duration = Duration::from_secs(60);

/// The services that a driver uses.
pub struct Ports {
    /// Carries messages and bytes.
    pub transport: Box<dyn Transport>,
    /// Called from any thread when there is work to do after [`Driver::park`].
    pub wake: Wake,
    /// Computes and compares checksums.
    pub verifier: Box<dyn Verifier>,
    /// Calls the worker's handler.
    pub calls: Box<dyn Calls>,
    /// 64 random bits, for tickets.
    pub draw: Box<dyn FnMut() -> u64>,
}

/// Result of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Whether the turn did any work.
    pub worked: bool,
    /// When the next turn is due if nothing happens meanwhile.
    pub wake_at: Instant,
    /// This was the last turn: call [`Driver::finish`].
    pub over: bool,
}

/// Advances the handoffs of one service.
///
/// The caller runs [`Driver::turn`] with the current time, repeatedly:
/// - at once after a turn that did work, and at [`Turn::wake_at`] at the latest;
/// - earlier when the transport has an event; only the transport's own [`Transport::sleep`] ends on such events;
/// - earlier when the inbox gets work: a command to the service, or a result of the verifier or of a handler call. After [`Driver::park`],
///   the first such item calls [`Ports::wake`], once. A thread that only runs this driver calls [`Driver::sleep`], which does both.
///
/// After the turn that is [`Turn::over`], [`Driver::finish`] ends everything. A caller that waits for an outcome is woken in the turn that
/// decides it, through the channel of its handle. Worker and verifier are called within a turn too; where their ports answer at once, the
/// next turn processes the answer.
pub struct Driver {
    config: TransferConfig,
    transport: Box<dyn Transport>,
    inbox: Arc<Inbox>,
    verifier: Box<dyn Verifier>,
    calls: Box<dyn Calls>,
    waiting_calls: Arc<WaitingCalls>,
    draw: Box<dyn FnMut() -> u64>,
    connections: Connections,
    table: Table,
    draining: Draining,
    /// Events that the transport reported in the last turn.
    events: Vec<Event>,
    tally: Tally,
    /// Parties proven dead, with the time since which their lanes are being drained.
    fencing: Vec<(Party, Instant)>,
    /// Those for which that takes long. They are fenced when the last connection to them has closed and the device has ended its work for it.
    /// So each has such a connection, which bounds their number.
    fenced_late: Vec<Party>,
    stopping: Option<Instant>,
    next_tick: Option<Instant>,
    /// When to look for idle connections next.
    next_sweep: Option<Instant>,
}

impl Driver {
    /// # Errors
    /// If the pool's layout is too long for a greeting.
    pub(crate) fn new(config: TransferConfig, ports: Ports) -> Result<Self, TransferError> {
        let Ports { transport, wake, verifier, calls, draw } = ports;
        let greeting = Message::Hello(hello(&config, transport.region(), config.party.clone())).encode();
        if greeting.len() > GREETING_BYTES_MAX {
            let detail = format!("a layout that takes {} bytes to greet with, of {GREETING_BYTES_MAX}", greeting.len());
            return Err(TransferError::Config(detail));
        }
        #[cfg(any(test, feature = "testing"))]
        config.hazards.announce();
        Ok(Self {
            inbox: Arc::new(Inbox::new(config.limits.started_handoffs_max, wake)),
            config,
            transport,
            verifier,
            calls,
            waiting_calls: Arc::default(),
            draw,
            connections: Connections::default(),
            table: Table::default(),
            draining: Draining::default(),
            events: Vec::new(),
            tally: Tally::default(),
            fencing: Vec::new(),
            fenced_late: Vec::new(),
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
        self.tally.published()
    }

    /// Processes events and commands, and advances every handoff. `now` never decreases between turns.
    pub fn turn(&mut self, now: Instant) -> Turn {
        self.inbox.awake();
        let mut worked = false;
        // The transport copies bytes and may take long, so the next turn timestamps what completed here.
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
        let open = !self.table.is_empty() || !self.fencing.is_empty();
        let open = open || self.connections.is_greeting() || self.draining.has_windows();
        now + match self.table.watches() {
            true => WATCH,
            false if open || self.stopping.is_some() => TICK,
            // Keep-alives are sent and checked four times within the longest tolerated silence.
            false => IDLE.min(Duration::from_millis(self.config.limits.peer_silent_ms) / 8),
        }
    }

    /// Requests one wake-up for the first item that enters the inbox before the next turn. Returns `false` if it holds something already.
    pub fn park(&mut self) -> bool {
        self.publish();
        self.inbox.may_sleep()
    }

    /// Waits for work, at most this long. For a thread that only runs this driver.
    pub fn sleep(&mut self, at_most: Duration) {
        if self.park() {
            self.transport.sleep(at_most);
        }
    }

    /// Ends everything: open handoffs fail, peers are notified until `deadline`, and blocks that peers could still write to are leaked.
    pub fn finish(&mut self, now: Instant, deadline: Instant) {
        self.give_up_begun(now);
        // From here on no message of a peer is read. Blocks stay quarantined where closing the connection does not fence their writers.
        let (mut events, mut closed, mut drained) = (Vec::new(), Vec::new(), Vec::new());
        self.transport.shutdown(deadline, &mut events);
        for event in events {
            match event {
                Event::Closed { conn, reason, fenced, draining, .. } => {
                    if let Some(connection) = self.connections.remove(conn) {
                        let free = self.draining.closed(conn, &connection, draining);
                        self.reuse(free);
                    }
                    closed.push((conn, reason, fenced));
                }
                Event::Drained { conn, fenced } => drained.push((conn, fenced)),
                _ => {}
            }
        }
        // Only now has every operation ended that read a source's blocks.
        for (conn, reason, fenced) in &closed {
            let not_sinks = self.table.keys_where(|role| !matches!(role, Role::Sink(_)));
            self.lost(*conn, not_sinks, reason, *fenced, now);
        }
        self.inbox.close();
        for (conn, reason, fenced) in closed {
            self.lost(conn, self.table.keys(), &reason, fenced, now);
        }
        drained.into_iter().for_each(|(conn, fenced)| self.drained(conn, fenced, now));
        self.publish();
        self.table.forget_written();
    }

    /// After a panic anywhere: accepts nothing more, and leaks the blocks that peers may still write to.
    pub(crate) fn abandon(&mut self) {
        self.inbox.fail();
        self.inbox.close();
        self.table.forget_written();
    }

    /// Aborts everything that this side began, and unpins what peers get.
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
                    self.table.insert(key, conn, Role::Source(Box::new(source)));
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
                    drop(hold); // No peer knows of these blocks.
                    self.input(key, Input::Barred(detail), now);
                }
                None => self.input(key, Input::Granted(hold), now),
            },
            Command::Input(key, input) => self.input(key, input, now),
            Command::PeerDead(party) => {
                // Closing the party's connections drains what its lanes still hold here; then its blocks are free.
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

    /// Tells the handoffs of a connection when nothing that they posted is under way any more.
    fn tell_idle(&mut self, conn: ConnId, now: Instant) {
        let idle = self.connections.get_mut(conn).map(|connection| connection.pump.idle()).unwrap_or_default();
        idle.into_iter().for_each(|key| self.input(key, Input::Idle, now));
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
                self.tell_idle(conn, now);
            }
            Event::Got(number, bytes) => self.input(HandoffKey(number), Input::Got { bytes }, now),
            Event::Flushed(conn, id) => {
                self.tally.count(self.connections.party(conn), |stats| stats.flushes += 1);
                let covered = self.connections.get_mut(conn).map(|c| c.pump.flushed(id)).unwrap_or_default();
                for (key, epoch) in covered {
                    self.input(key, Input::Flushed { epoch }, now);
                }
                self.tell_idle(conn, now);
            }
            Event::WindowClosed(conn, ticket) => match self.draining.window_closed(conn, ticket) {
                Some(Waiting::Blocks(left)) => self.reuse([left.blocks]),
                Some(Waiting::Handoff(key)) => {
                    // Adopted blocks are reused too, and no commit says that nothing came after its checksums.
                    let input = match self.show_remote_writes() {
                        Ok(()) => Input::WindowClosed,
                        Err(error) => Input::Abort(HandoffFailure::Device(error.to_string())),
                    };
                    self.input(key, input, now);
                }
                None => {}
            },
            Event::PutRefused(conn) => self.tally.count(self.connections.party(conn), |stats| stats.puts_refused += 1),
            Event::Closed { conn, reason, fenced, draining, unproven } => {
                if unproven {
                    self.rejected(conn, RefuseReason::Unproven, &reason, now);
                }
                self.closed(conn, &reason, fenced, draining, now);
            }
            Event::Drained { conn, fenced } => self.drained(conn, fenced, now),
        }
    }

    /// `moving`: the driver has done work in this turn.
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

    /// Releases what dead parties could have written, once their connections are closed, their lanes have been drained for a while, and the
    /// pool's device has stored what came over them. The wait is shorter where nothing is `moving`: then the lanes are empty.
    fn fence_dead(&mut self, now: Instant, moving: bool) {
        let drain = if moving { DRAIN_BUSY } else { DRAIN };
        let fencing = std::mem::take(&mut self.fencing);
        let drained = |(party, since): &(Party, Instant)| now - *since >= drain && !self.works_for(party);
        let (fenced, left) = fencing.into_iter().partition::<Vec<_>, _>(drained);
        let (left, late) = left.into_iter().partition::<Vec<_>, _>(|(_, since)| now - *since < FENCE_MAX);
        self.fencing = left;
        for (party, _) in late {
            tracing::error!(%party, "what a dead peer wrote is not stored yet: its blocks stay quarantined until it is");
            if !self.fenced_late.contains(&party) {
                self.fenced_late.push(party);
            }
        }
        fenced.into_iter().for_each(|(party, _)| self.fence(&party, now));
    }

    /// The same, for those that are not polled any more: a connection has closed, or the device has ended its work for one.
    fn fence_late(&mut self, now: Instant) {
        let late = std::mem::take(&mut self.fenced_late);
        let (left, fenced) = late.into_iter().partition::<Vec<_>, _>(|party| self.works_for(party));
        self.fenced_late = left;
        fenced.into_iter().for_each(|party| self.fence(&party, now));
    }

    /// Whether a party is proven dead and what it wrote may still be stored here. It opens no connections any more.
    fn is_being_fenced(&self, party: &Party) -> bool {
        self.fencing.iter().any(|(dead, _)| dead == party) || self.fenced_late.contains(party)
    }

    /// Whether something that a party wrote may still be stored here. Of one that is being fenced, there are only connections of the time
    /// before.
    fn works_for(&self, party: &Party) -> bool {
        self.connections.has_party(party) || self.draining.has_party(party)
    }

    fn fence(&mut self, party: &Party, now: Instant) {
        for key in self.table.keys_of_writer(party) {
            self.input(key, Input::Fenced, now);
        }
    }

    fn publish(&mut self) {
        self.tally.publish(&self.table, &self.draining, self.config.map.layout());
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({})", self.config.party)
    }
}

#[cfg(test)]
mod tests;
