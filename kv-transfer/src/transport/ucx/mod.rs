//! The UCX transport: RDMA between hosts, shared memory within one.
//!
//! A connection consists of a control channel ([`Tcp`], with its TLS) and a UCX worker on each side, with an endpoint to the other's. The
//! side that connects creates its worker and sends its address over the channel; the other side creates a worker for this connection too,
//! and answers with its address. Messages go over the channel, once the lanes between the two workers are connected; writes go over the
//! lanes. A UCX worker is reachable only by an address that was sent over a channel, so where peers authenticate there, only they know it.
//!
//! The remote key does not protect the region: UCX does not check it against what was granted. Closing an endpoint does not fence the
//! peer's writes either, because UCX's TCP keeps receiving. Destroying the connection's worker does, on lanes that end with it ([`lanes`]):
//! its sockets are closed with the bytes they hold, and its queue pairs are gone. On other lanes, blocks of a lost peer stay quarantined.

mod closing;
mod connect;
mod connection;
mod data_path;
mod lane_events;
mod lanes;
mod pulling;
mod sleeper;
mod starting;
mod writing;

pub(crate) use lanes::reach_others;
pub(crate) use sleeper::Sleeper;
pub(crate) use starting::{Start, TCP_SEGMENTS};

use super::last_operations::LastOperations;
use super::pool::Pool;
use super::rotation::Rotation;
use super::tcp::{LaneFrame, Tcp};
use super::{ConnId, Event, Transport};
use crate::hazards::hazard;
use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::ucx::{Context, Endpoint, Memory, Status, Token as Operation};
use crate::window::Window;
use crate::{TransferAddress, UcxWrites};
use baton_memory::{Completer, MemoryError};
use baton_types::TicketId;
use connection::{Connection, Connections};
use data_path::DataPath;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Rounds of UCX progress before our own state is checked.
const TURNS: usize = 16;

/// The purpose of an operation in flight.
enum Purpose {
    /// The flush that completes once every lane is connected.
    Wiring,
    /// A write of so many bytes; numbered if it is a message.
    Put {
        len: usize,
        number: Option<u64>,
    },
    /// A read of what the peer would write.
    Pull(Completer<()>),
    /// A read with the service's number, and its length in bytes.
    Get(u64, usize),
    Flush(u64),
    Close,
}

impl Purpose {
    /// Whether the operation reads the peer's pool into this side's.
    fn reads(&self) -> bool {
        matches!(self, Self::Pull(_) | Self::Get(..))
    }
}

pub(crate) struct Ucx {
    remote: RemoteRegion,
    path: DataPath,
    fences: bool,
    #[cfg(any(test, feature = "testing"))]
    hazards: crate::Hazards,
    /// Reads that this side began may run on after its worker: `cuda_ipc` is open, whose copies UCX does not wait for. So a worker lives
    /// until its reads have ended.
    copies_run_on: bool,
    writes: UcxWrites,
    operations: HashMap<Operation, (ConnId, Purpose)>,
    /// To be reported in the next turn.
    due: Vec<Event>,
    // Dropped in this order: connections with their workers, registration, context, and the epoll set on which the transport sleeps.
    connections: Connections,
    rotation: Rotation,
    /// Connections without lanes for which the pool's device still works, and whether their peers were fenced.
    draining: Vec<(ConnId, bool, LastOperations)>,
    /// Connections that a test prevents from being fenced.
    unfenced: Vec<Connection>,
    /// The pool, registered; `None` if it is staged: then writes in both directions are messages.
    memory: Option<Rc<Memory>>,
    pool: Pool,
    context: Rc<Context>,
    events: Rc<OwnedFd>,
    channel: Tcp,
}

impl Ucx {
    fn begin(&mut self, conn: ConnId, purpose: Purpose) -> Operation {
        let token = self.context.token();
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.outstanding += 1;
            connection.reading += usize::from(purpose.reads());
        }
        self.operations.insert(token, (conn, purpose));
        token
    }

    /// Starts an operation on a connection's endpoint; does nothing before there is one.
    fn on_endpoint(&mut self, conn: ConnId, purpose: Purpose, start: impl FnOnce(&Endpoint, Operation)) {
        if self.connections.get(&conn).is_some_and(|c| c.endpoint().is_some()) {
            let token = self.begin(conn, purpose);
            if let Some(endpoint) = self.connections[&conn].endpoint() {
                start(endpoint, token);
            }
        }
    }

    /// Handles an event of the control channel: its end is not yet the end of the lanes.
    fn channel_event(&mut self, event: Event, now: Instant, events: &mut Vec<Event>) {
        let is_open = |conn: &ConnId| self.connections.live(*conn).is_some();
        match event {
            Event::Closed { conn, reason, unproven, .. } => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.channel_is_gone = true;
                    connection.unproven |= unproven;
                }
                self.force_close(conn, &reason, now);
            }
            Event::Accepted { conn, .. } => {
                self.connections.insert(conn, Connection::new(None));
                events.push(event);
            }
            Event::Message(ref conn, _) | Event::Flushed(ref conn, _) if !is_open(conn) => {}
            Event::Flushed(conn, id) => {
                if let Some(writing) = self.connections.writing_mut(conn) {
                    writing.answered(id);
                    events.extend(writing.take_flushed().into_iter().map(|id| Event::Flushed(conn, id)));
                }
            }
            event => events.push(event),
        }
    }

    fn lane_frame(&mut self, conn: ConnId, frame: LaneFrame, now: Instant, events: &mut Vec<Event>) {
        let done = match frame {
            LaneFrame::Attach(body) => self.attached(conn, &body, events),
            LaneFrame::Flush { id, posted } => self.flush_asked(conn, id, posted),
        };
        if let Err(reason) = done {
            self.force_close(conn, &reason, now);
        }
    }

    fn operation_done(&mut self, token: Operation, result: Result<(), Status>, now: Instant, events: &mut Vec<Event>) {
        let Some((conn, purpose)) = self.operations.remove(&token) else { return };
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.outstanding -= 1;
        connection.reading -= usize::from(purpose.reads());
        let (open, was_reported) = (connection.is_live(), connection.reads_on);
        match purpose {
            Purpose::Put { .. } | Purpose::Get(..) if was_reported => {}
            Purpose::Put { len, number } => {
                events.push(Event::PutDone(conn, len));
                if let (Some(number), Some(writing)) = (number, connection.writing_mut()) {
                    writing.sent(number);
                    writing.freed(len);
                    let flushed = if open { writing.take_flushed() } else { Vec::new() };
                    events.extend(flushed.into_iter().map(|id| Event::Flushed(conn, id)));
                }
            }
            Purpose::Pull(completer) => {
                completer.complete(result.map_err(|status| MemoryError::Failed(format!("UCX: {status}"))));
            }
            Purpose::Get(number, bytes) if result.is_ok() => events.push(Event::Got(number, bytes)),
            Purpose::Flush(id) if open && result.is_ok() => events.push(Event::Flushed(conn, id)),
            Purpose::Wiring if open && result.is_ok() => {
                let waiting = connection.waiting.take().unwrap_or_default();
                waiting.into_messages().into_iter().for_each(|message| self.channel.send(conn, message));
            }
            Purpose::Get(..) | Purpose::Flush(_) | Purpose::Wiring | Purpose::Close => {}
        }
        if let Err(status) = result {
            self.lanes_failed(conn, &format!("UCX: {status}"), now);
        }
    }
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn address(&self) -> TransferAddress {
        TransferAddress::Ucx(self.channel.socket())
    }

    fn region(&self) -> RemoteRegion {
        self.remote.clone()
    }

    fn fences(&self) -> bool {
        self.fences
    }

    fn closing_fences(&self, conn: ConnId) -> bool {
        self.fences && self.connections.get(&conn).is_some_and(|c| !c.reads_on)
    }

    fn connect(&mut self, to: &TransferAddress) -> Result<ConnId, String> {
        let TransferAddress::Ucx(socket) = to else {
            return Err(format!("the peer speaks {}, this instance ucx", to.transport()));
        };
        self.open(*socket)
    }

    fn greeted(&mut self, conn: ConnId, region: &RemoteRegion, message_bytes_max: usize) -> Result<(), String> {
        self.channel.greeted(conn, region, message_bytes_max)?;
        self.aim(conn, region)
    }

    fn send(&mut self, conn: ConnId, message: Vec<u8>) {
        let Some(connection) = self.connections.live_mut(conn) else { return };
        let Some(waiting) = &mut connection.waiting else { return self.channel.send(conn, message) };
        if !waiting.push(message) {
            self.force_close(conn, "too many messages wait until its lanes are connected", Instant::now());
        }
    }

    fn put(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        self.write(conn, ticket, run);
    }

    fn flush(&mut self, conn: ConnId, id: u64) {
        self.flush_writes(conn, id);
    }

    fn one_sided_gets(&self, conn: ConnId) -> bool {
        self.connections.writing(conn).is_some_and(|w| w.gets)
    }

    fn get(&mut self, conn: ConnId, number: u64, run: CopyRun) {
        self.read(conn, number, run);
    }

    fn open_window(&mut self, conn: ConnId, ticket: TicketId, window: Window) {
        if let Some(writing) = self.connections.writing(conn) {
            writing.door.windows.borrow_mut().open(ticket, window);
        }
    }

    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        // The hazard also leaves the write windows open.
        let leaves_open = hazard!(self, PretendedFences);
        match self.connections.get(&conn).map(Connection::writing) {
            Some(Some(writing)) => writing.door.close_window(ticket, leaves_open),
            // Nobody could write yet.
            Some(None) => self.due.push(Event::WindowClosed(conn, ticket)),
            None => {}
        }
    }

    fn is_open(&self, conn: ConnId) -> bool {
        self.connections.live(conn).is_some_and(|c| c.failed.is_none()) && self.channel.is_open(conn)
    }

    fn close(&mut self, conn: ConnId, reason: &str) {
        self.force_close(conn, reason, Instant::now());
    }

    fn lanes(&self, conn: ConnId) -> String {
        let endpoint = self.connections.get(&conn).and_then(Connection::endpoint);
        endpoint.map(|e| e.lanes().join(",")).unwrap_or_default()
    }

    fn progress(&mut self, now: Instant, events: &mut Vec<Event>) -> bool {
        let (before, mut heard) = (events.len(), Vec::new());
        events.append(&mut self.due);
        let mut moved = self.channel.progress(now, &mut heard);
        heard.into_iter().for_each(|event| self.channel_event(event, now, events));
        self.unfenced.iter().for_each(|connection| moved |= turn(connection));
        for conn in self.rotation.next(&self.connections) {
            for frame in self.channel.lane_frames(conn) {
                self.lane_frame(conn, frame, now, events);
            }
            let Some(worker) = self.connections.get(&conn).and_then(Connection::worker).cloned() else { continue };
            moved |= self.connections.get(&conn).is_some_and(turn);
            if self.connections.get(&conn).is_some_and(|c| c.reads_on) {
                continue;
            }
            self.post_staged(conn, now);
            moved |= self.look_at_door(conn, now, events);
            self.tell_pulls(conn);
            for (owner, status) in worker.take_failed() {
                self.lanes_failed(ConnId(owner), &format!("UCX: {status}"), now);
            }
        }
        // Operations may also end inside the call that began them, so these lists are always checked.
        loop {
            let workers = self.connections.values().filter_map(Connection::worker);
            let done: Vec<_> = workers.flat_map(|worker| worker.take_done()).collect();
            if done.is_empty() {
                break;
            }
            done.into_iter().for_each(|d| self.operation_done(d.token, d.result, now, events));
        }
        self.forget_ended(now, events);
        self.drain(events);
        moved || events.len() > before
    }

    fn sleep(&mut self, timeout: Duration) {
        // A connection without room is left out: its worker holds what came. Operations of the device that end wake this thread.
        let deaf = self.connections.iter().find_map(|(&conn, connection)| Some((conn, connection.listen().err()?)));
        if let Some((conn, error)) = deaf {
            return self.lanes_failed(conn, &format!("cannot wait for its lanes: {error}"), Instant::now());
        }
        let connections = self.connections.values().chain(&self.unfenced);
        let mut workers = connections.filter(|connection| connection.has_room()).filter_map(Connection::worker);
        // Does not sleep if something came meanwhile.
        if workers.all(|worker| worker.arm()) {
            self.channel.sleep(timeout);
        }
    }

    fn show_remote_writes(&self) -> Result<(), MemoryError> {
        self.pool.show_remote_writes()
    }

    fn shutdown(&mut self, deadline: Instant, events: &mut Vec<Event>) {
        for conn in self.connections.keys().copied().collect::<Vec<_>>() {
            self.force_close(conn, "the service stops", Instant::now());
        }
        while !(self.connections.is_empty() && self.draining.is_empty()) && Instant::now() < deadline {
            if !self.progress(Instant::now(), events) {
                std::thread::yield_now();
            }
            events.retain(|event| matches!(event, Event::Closed { .. } | Event::Drained { .. }));
        }
        for conn in self.connections.keys().copied().collect::<Vec<_>>() {
            self.forget(conn, events);
        }
        self.memory = None;
    }
}

/// Progresses a connection's worker for a bounded number of rounds, while there is room for what they bring; returns whether anything moved.
fn turn(connection: &Connection) -> bool {
    let Some(worker) = connection.worker() else { return false };
    (0..TURNS).take_while(|_| connection.has_room() && worker.progress()).count() > 0
}
