//! What carries bytes between simulated workers: a stand-in for sockets, NICs and shared memory under the shipped driver.
//!
//! Messages of a connection arrive whole and in order, writes in any order, and a flush says when they are visible. Three kinds of lanes
//! differ in who stores a write, and so in what fences it. Links break, peers fall silent, bytes are damaged on request.

#[cfg(test)]
mod tests;
mod transport;

pub use transport::SimulatedTransport;

use crate::executor::{Executor, Process, Time, ms};
use crate::invariant::Invariant;
use baton_kv_transfer::simulation::{ConnId, CopyRun, Event, Window};
use baton_memory::HostPool;
use baton_types::{Party, TicketId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::Notify;

/// A peer that stands still counts as gone after this, give or take.
const SILENT: Time = ms(450);

/// How a write reaches memory, which decides what fences it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The sink's own process stores it, inside an open window: closing the connection fences. As Baton's TCP.
    Window,
    /// The sink's NIC stores it, even while the process stands still, through a queue pair that closing destroys. As RC over RDMA.
    QueuePair,
    /// The source's process stores it: nothing fences but its death. As shared memory.
    SharedMemory,
}

impl Lane {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Window, Self::QueuePair, Self::SharedMemory];

    /// Whether closing a connection ends all writes on it.
    pub fn closing_fences(self) -> bool {
        self != Self::SharedMemory
    }
}

/// What no correct driver lets happen, and which invariant that breaks.
pub type Breach = Box<dyn Fn(Invariant, String) + Send + Sync>;

/// How the blocks of a worker's region are held: by leases, or in quarantine. Blocks that were free meanwhile may be somebody else's.
pub trait HeldBlocks: Send + Sync {
    /// This instant.
    fn mark(&self) -> u64;
    /// Whether these bytes are of blocks that were never free since.
    fn are_held_since(&self, mark: u64, range: Range<usize>) -> bool;
    /// How many blocks are quarantined because this instance, in this start or one before, may still write them.
    fn quarantined_of(&self, peer: &Party) -> usize;
}

/// One worker's end of the network.
struct Endpoint {
    party: Party,
    process: Process,
    region: Arc<HostPool>,
    events: VecDeque<Event>,
    wake: Arc<Notify>,
    held: Arc<dyn HeldBlocks>,
}

/// What one side lets the other write under a ticket.
struct Opened {
    window: Window,
    /// When it was opened.
    mark: u64,
    is_open: bool,
}

/// One side of a connection.
struct Side {
    process: Process,
    address: SocketAddr,
    is_open: bool,
    /// When the last message to it arrives: later ones come behind.
    last: Time,
    /// What the other side may write, or might before, by ticket.
    windows: HashMap<TicketId, Opened>,
    /// Writes of this side on their way.
    writes: Vec<u64>,
    /// Flushes of this side that wait for writes.
    flushes: Vec<(u64, Vec<u64>)>,
}

struct Wire {
    /// Who dialled, then who was dialled.
    sides: [Side; 2],
    is_cut: bool,
}

struct Write {
    conn: u64,
    /// The side that writes.
    from: usize,
    ticket: TicketId,
    run: CopyRun,
    /// What it read; until then it may read at any time.
    bytes: Option<Vec<u8>>,
    is_damaged: bool,
}

struct Traffic {
    endpoints: BTreeMap<SocketAddr, Endpoint>,
    connections: BTreeMap<u64, Wire>,
    writes: HashMap<u64, Write>,
    numbers: u64,
    /// Processes whose next write is damaged.
    damage: Vec<Process>,
    /// Processes whose writes to another one all arrive damaged.
    spoilt: Vec<[Process; 2]>,
    /// Processes between which no connection opens, and whether who dials hears nothing of that.
    parted: Vec<([Process; 2], bool)>,
    /// When the wire of a process has sent what it was given.
    sent_at: BTreeMap<Process, Time>,
}

/// How long things take.
#[derive(Clone, Copy, Debug)]
pub enum Delays {
    /// Messages and writes alike take a few milliseconds.
    Drawn {
        /// Once in so many times they take up to two hundred milliseconds.
        slow_once_in: u64,
        /// They do so until then.
        slow_until: Time,
    },
    /// As on wires of one speed, of which each process has one to send by. The bytes are counted and not carried: nobody reads them.
    Steady {
        /// What a message takes, and a write once its last byte left.
        message: Time,
        /// How fast a process sends.
        bytes_per_s: f64,
    },
}

/// The data network of one schedule. Clones are the same one.
#[derive(Clone)]
pub struct Network {
    executor: Executor,
    lane: Lane,
    one_sided_gets: bool,
    delays: Delays,
    breach: Arc<Breach>,
    state: Arc<Mutex<Traffic>>,
}

impl Network {
    /// A network without anybody on it. Peers read each other's regions by themselves where `one_sided_gets`, which [`Lane::Window`] never
    /// does.
    pub fn new(executor: Executor, lane: Lane, one_sided_gets: bool, delays: Delays, breach: Breach) -> Self {
        let state = Traffic {
            endpoints: BTreeMap::new(),
            connections: BTreeMap::new(),
            writes: HashMap::new(),
            numbers: 0,
            damage: Vec::new(),
            spoilt: Vec::new(),
            parted: Vec::new(),
            sent_at: BTreeMap::new(),
        };
        let one_sided_gets = one_sided_gets && lane != Lane::Window;
        Self { executor, lane, one_sided_gets, delays, breach: Arc::new(breach), state: Arc::new(Mutex::new(state)) }
    }

    /// The transport of `party`, whose `process` listens at `address`. `wake` is told when something moved.
    pub fn join(
        &self,
        (party, process): (Party, Process),
        address: SocketAddr,
        region: Arc<HostPool>,
        wake: Arc<Notify>,
        held: Arc<dyn HeldBlocks>,
    ) -> SimulatedTransport {
        let bytes = region.bytes() as u64;
        let endpoint = Endpoint { party, process, region, events: VecDeque::new(), wake, held };
        self.state.lock().endpoints.insert(address, endpoint);
        SimulatedTransport { network: self.clone(), process, address, bytes }
    }

    /// How long a message takes.
    pub fn delay(&self) -> Time {
        let (slow_once_in, slow_until) = match self.delays {
            Delays::Drawn { slow_once_in, slow_until } => (slow_once_in, slow_until),
            Delays::Steady { message, .. } => return message,
        };
        let slow_max = if self.executor.time() < slow_until { slow_once_in } else { 0 };
        self.executor.draw(|random| {
            let is_slow = slow_max > 0 && random.once_in(slow_max);
            50 + random.below(if is_slow { ms(200) } else { ms(4) })
        })
    }

    /// When so many bytes that `process` sends now arrive.
    fn arrival(&self, process: Process, bytes: usize) -> Time {
        let (now, delay) = (self.executor.time(), self.delay());
        let Delays::Steady { bytes_per_s, .. } = self.delays else { return now + delay };
        let mut state = self.state.lock();
        let sent_at = state.sent_at.entry(process).or_default();
        *sent_at = now.max(*sent_at) + (bytes as f64 * 1e6 / bytes_per_s).ceil() as Time;
        *sent_at + delay
    }

    fn carries(&self) -> bool {
        matches!(self.delays, Delays::Drawn { .. })
    }

    /// The next write of `process` arrives damaged.
    pub fn damage(&self, process: Process) {
        self.state.lock().damage.push(process);
    }

    /// From now on all writes of one process to the other arrive damaged.
    pub fn spoil(&self, one: Process, other: Process) {
        self.state.lock().spoilt.push([one, other]);
    }

    /// Nothing is damaged or parted any more.
    pub fn heal(&self) {
        let mut state = self.state.lock();
        state.damage.clear();
        state.spoilt.clear();
        state.parted.clear();
    }

    /// Breaks every link between the two; each side notices in its own time.
    pub fn cut(&self, one: Process, other: Process) {
        let mut state = self.state.lock();
        let mut lost = Vec::new();
        for (&conn, connection) in &mut state.connections {
            let ends = [connection.sides[0].process, connection.sides[1].process];
            if ends == [one, other] || ends == [other, one] {
                connection.is_cut = true;
                lost.push(conn);
            }
        }
        drop(state);
        for conn in lost {
            for side in 0..2 {
                let at = self.executor.time() + ms(1) + self.executor.draw(|random| random.below(ms(400)));
                self.loses(at, conn, side, "the link broke");
            }
        }
    }

    /// Breaks every link between the two, and lets no other open. Where `silent`, who dials waits for nothing.
    pub fn part(&self, one: Process, other: Process, silent: bool) {
        self.state.lock().parted.push(([one, other], silent));
        self.cut(one, other);
    }

    /// `process` stands still: peers count it as gone, unless it `is_back` by then.
    pub fn silent(&self, process: Process, is_back: impl Fn() -> bool + Send + Sync + Clone + 'static) {
        for (conn, side) in self.peers_of(process) {
            let at = self.executor.time() + SILENT + self.executor.draw(|random| random.below(ms(200)));
            let (network, is_back) = (self.clone(), is_back.clone());
            self.executor.call(at, Process::WORLD, move || {
                if !is_back() {
                    network.lost(conn, side, "the peer is silent");
                    // It closes its end, which the other one finds once it goes on.
                    let at = network.executor.time() + network.delay();
                    network.loses(at, conn, 1 - side, "the peer closed the connection");
                }
            });
        }
    }

    /// `process` is dead: its sockets close, which peers hear soon, or by silence.
    pub fn died(&self, process: Process, silent: bool) {
        let peers = self.peers_of(process);
        let mut state = self.state.lock();
        state.endpoints.retain(|_, endpoint| endpoint.process != process);
        for connection in state.connections.values_mut() {
            for side in &mut connection.sides {
                side.is_open &= side.process != process;
            }
        }
        drop(state);
        for (conn, side) in peers {
            let soon = if silent { ms(500) } else { ms(20) };
            let at = self.executor.time() + self.executor.draw(|random| random.below(soon));
            self.loses(at, conn, side, "the peer closed the connection");
        }
    }

    /// The other sides of the open connections of `process`.
    fn peers_of(&self, process: Process) -> Vec<(u64, usize)> {
        let state = self.state.lock();
        let of = |(&conn, connection): (&u64, &Wire)| {
            let side = connection.sides.iter().position(|side| side.process == process && side.is_open)?;
            Some((conn, 1 - side))
        };
        state.connections.iter().filter_map(of).collect()
    }

    fn loses(&self, at: Time, conn: u64, side: usize, reason: &'static str) {
        let network = self.clone();
        self.executor.call(at, Process::WORLD, move || network.lost(conn, side, reason));
    }

    /// One side hears that a connection is over.
    fn lost(&self, conn: u64, side: usize, reason: &str) {
        let mut state = self.state.lock();
        let Some(connection) = state.connections.get_mut(&conn) else { return };
        let side = &mut connection.sides[side];
        if std::mem::replace(&mut side.is_open, false) {
            let (address, process) = (side.address, side.process);
            let event = self.closed(conn, reason);
            state.tell(address, process, event);
        }
    }

    fn closed(&self, conn: u64, reason: &str) -> Event {
        let fenced = self.lane.closing_fences();
        Event::Closed { conn: ConnId(conn), reason: reason.to_owned(), fenced, draining: false, unproven: false }
    }

    /// Someone who dialled arrives at whoever listens there now.
    fn arrives(&self, conn: u64) {
        let mut state = self.state.lock();
        let Some(address) = state.connections.get(&conn).map(|connection| connection.sides[1].address) else { return };
        let Some(process) = state.endpoints.get(&address).map(|endpoint| endpoint.process) else {
            drop(state);
            return self.lost(conn, 0, "nobody listens there");
        };
        let dials = state.connections.get(&conn).map(|connection| connection.sides[0].process);
        let is_parted =
            |ends: &[Process; 2]| ends.contains(&process) && dials.is_some_and(|dials| ends.contains(&dials));
        if let Some(&(_, silent)) = state.parted.iter().find(|(ends, _)| is_parted(ends)) {
            drop(state);
            if !silent {
                self.lost(conn, 0, "there is no way");
            }
            return;
        }
        if let Some(connection) = state.connections.get_mut(&conn).filter(|connection| connection.sides[0].is_open) {
            (connection.sides[1].process, connection.sides[1].is_open) = (process, true);
            state.tell(address, process, Event::Accepted { conn: ConnId(conn), proven: true });
        }
    }

    /// A message arrives where both ends are still open.
    fn message(&self, conn: u64, to: usize, message: Vec<u8>) {
        let mut state = self.state.lock();
        let Some(connection) = state.connections.get(&conn).filter(|connection| !connection.is_cut) else { return };
        let side = &connection.sides[to];
        if side.is_open {
            let (address, process) = (side.address, side.process);
            state.tell(address, process, Event::Message(ConnId(conn), message));
        }
    }

    /// A write reads its bytes, which its source must have kept for it.
    fn read_write(&self, number: u64) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(write) = state.writes.get_mut(&number).filter(|write| write.bytes.is_none()) else { return };
        let Some(side) = state.connections.get(&write.conn).map(|connection| &connection.sides[write.from]) else {
            return;
        };
        let Some(endpoint) = state.endpoints.get(&side.address).filter(|e| e.process == side.process) else { return };
        let mut bytes = Vec::new();
        if self.carries() {
            bytes.resize(write.run.len, 0);
            endpoint.region.copy_out(write.run.from, &mut bytes);
            bytes[0] ^= u8::from(write.is_damaged);
        }
        write.bytes = Some(bytes);
    }

    /// A write arrives, or does not.
    fn write_arrives(&self, number: u64) {
        self.read_write(number);
        let is_unlucky = self.executor.draw(|random| random.once_in(2));
        let mut state = self.state.lock();
        let Some(Write { conn, from, ticket, run, bytes, .. }) = state.writes.remove(&number) else { return };
        let Some(connection) = state.connections.get_mut(&conn) else { return };
        let is_lost = connection.is_cut && is_unlucky && self.lane != Lane::SharedMemory;
        let is_visible = !connection.is_cut && connection.sides[1 - from].is_open;
        let writer = &mut connection.sides[from];
        writer.writes.retain(|write| *write != number);
        let mut flushed = Vec::new();
        writer.flushes.retain_mut(|(id, waits)| {
            waits.retain(|write| *write != number);
            if waits.is_empty() {
                flushed.push(*id);
            }
            !waits.is_empty()
        });
        let (writer_open, writer_address, writer_process) = (writer.is_open, writer.address, writer.process);
        let sink = &connection.sides[1 - from];
        let (sink_open, sink_address, sink_process) = (sink.is_open, sink.address, sink.process);
        let range = run.to..run.to + run.len;
        // Also behind a window that was closed: what is still under way may come, but only to blocks that wait for it.
        let opened = sink.windows.get(&ticket).filter(|opened| opened.window.allows(&range));
        let is_granted = opened.is_some_and(|opened| opened.is_open);
        let mark = opened.map(|opened| opened.mark);
        if writer_open && self.lane != Lane::Window {
            state.tell(writer_address, writer_process, Event::PutDone(ConnId(conn), run.len));
        }
        let reaches = (sink_open || !self.lane.closing_fences()) && !is_lost && !self.executor.is_dead(sink_process);
        if let Some(bytes) = bytes.filter(|_| reaches) {
            if self.lane == Lane::Window && !is_granted {
                state.tell(sink_address, sink_process, Event::PutRefused(ConnId(conn)));
            } else if let Some(endpoint) = state.endpoints.get(&sink_address).filter(|e| e.process == sink_process) {
                if !mark.is_some_and(|mark| endpoint.held.are_held_since(mark, range.clone())) {
                    let lane = self.lane;
                    let why = "which that ticket never gave, or which was free since";
                    (self.breach)(
                        Invariant::WritesWithinGrants,
                        format!("a write over {lane:?} under {ticket} reached {range:?}, {why}"),
                    );
                }
                endpoint.region.copy_in(range.start, &bytes);
            }
        }
        drop(state);
        // Where the connection broke, nobody says that anything is visible.
        if is_visible {
            flushed.into_iter().for_each(|id| self.flushed(conn, from, id));
        }
    }

    /// The word that everything before a flush is visible, on its way back.
    fn flushed(&self, conn: u64, side: usize, id: u64) {
        let (network, at) = (self.clone(), self.executor.time() + self.delay());
        self.executor.call(at, Process::WORLD, move || {
            let mut state = network.state.lock();
            let Some(connection) = state.connections.get(&conn).filter(|connection| !connection.is_cut) else { return };
            let side = &connection.sides[side];
            if side.is_open {
                let (address, process) = (side.address, side.process);
                state.tell(address, process, Event::Flushed(ConnId(conn), id));
            }
        });
    }

    /// A read of a peer's region is over: it read what stands there now. Its reader has held the blocks since `mark`, when it was posted.
    fn got(&self, conn: u64, reader: usize, number: u64, run: CopyRun, mark: u64) {
        let mut state = self.state.lock();
        let Some(connection) = state.connections.get(&conn).filter(|connection| !connection.is_cut) else { return };
        let [ours, theirs] = [reader, 1 - reader].map(|side| &connection.sides[side]);
        if !ours.is_open || !theirs.is_open || self.executor.is_dead(theirs.process) {
            return;
        }
        let (address, process) = (ours.address, ours.process);
        let (Some(owner), Some(here)) = (state.endpoint(theirs), state.endpoint(ours)) else { return };
        let range = run.to..run.to + run.len;
        if !here.held.are_held_since(mark, range.clone()) {
            (self.breach)(
                Invariant::WritesWithinGrants,
                format!("a read over {:?} reached {range:?}, which was free since it was posted", self.lane),
            );
        }
        if self.carries() {
            let mut bytes = vec![0; run.len];
            owner.region.copy_out(run.from, &mut bytes);
            here.region.copy_in(run.to, &bytes);
        }
        state.tell(address, process, Event::Got(number, run.len));
    }
}

impl Traffic {
    /// Whoever is at the end of a connection, if that process is still there.
    fn endpoint(&self, side: &Side) -> Option<&Endpoint> {
        self.endpoints.get(&side.address).filter(|endpoint| endpoint.process == side.process)
    }

    /// Something for the driver of a process, if it still has this address.
    fn tell(&mut self, address: SocketAddr, process: Process, event: Event) {
        if let Some(endpoint) = self.endpoints.get_mut(&address).filter(|endpoint| endpoint.process == process) {
            endpoint.events.push_back(event);
            endpoint.wake.notify_one();
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
}
