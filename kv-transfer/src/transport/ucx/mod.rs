//! UCX: RDMA where there is any, shared memory and TCP otherwise.
//!
//! A connection is one worker on each side, with an endpoint to the other. Whoever connects makes its own and tells its address in an
//! *attach*, the one message that goes to the peer's *front* worker, whose address is published; the other side makes one for this
//! connection too, and answers with its address. Messages flow once the lanes between the two are wired up. Active messages of
//! different sizes may overtake each other, so they carry sequence numbers and are put in order here.
//!
//! The remote key is no protection: over TCP and CMA UCX does not check it against what was granted. Nor does closing an endpoint
//! fence the peer's writes: UCX's TCP goes on receiving. Destroying the connection's worker does, on lanes that end with it ([`lanes`]):
//! its sockets are closed with what they hold, its queue pairs gone. Elsewhere blocks of a lost peer stay quarantined.

mod closing;
mod connection;
mod header;
mod lanes;
mod opening;
mod sleeper;
mod starting;
mod writing;

pub(crate) use sleeper::Sleeper;
pub(crate) use starting::TCP_SEGMENTS;

use super::{ConnId, Event, Transport};
use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::ucx::{Arrived, Context, Endpoint, Memory, Status, Token as Operation, Worker};
use crate::{Fencing, Region, TransferAddress, UcxWrites};
use baton_types::TicketId;
use connection::Connection;
use header::{Header, Kind};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use writing::{Door, Writing};

/// Turns of UCX's progress before our own state is looked at.
const TURNS: usize = 16;
/// What an operation in flight was for.
enum Purpose {
    Message,
    /// The attach, and the end of the endpoint that it took.
    Greeting,
    /// The flush that finds every lane wired up.
    Wiring,
    Put(usize),
    /// A read of the service's number, and its bytes.
    Get(u64, usize),
    Flush(u64),
    /// The flush before a close, so that the last messages leave.
    LastFlush,
    Close,
}

pub(crate) struct Ucx {
    /// Of the front worker.
    address: Vec<u8>,
    remote: RemoteRegion,
    /// Random name of this transport among its peers.
    uid: u64,
    next: u64,
    /// Each costs a worker: see ARCHITECTURE.md.
    connections_max: usize,
    silent_max: Duration,
    fences: bool,
    fencing: Fencing,
    writes: UcxWrites,
    operations: HashMap<Operation, (ConnId, Purpose)>,
    /// Connections by the name that their initiator gave them.
    names: HashSet<(u64, u64)>,
    // Dropped in this order: connections with their workers, registration, front worker, context.
    connections: BTreeMap<ConnId, Connection>,
    /// Connections that a test keeps from being fenced.
    unfenced: Vec<Connection>,
    memory: Option<Rc<Memory>>,
    region: Arc<Region>,
    front: Rc<Worker>,
    context: Rc<Context>,
    sleeper: Sleeper,
    events: Rc<dyn AsRawFd>,
}

impl Ucx {
    fn new_id(&mut self) -> ConnId {
        self.next += 1;
        ConnId(self.next)
    }

    fn new_worker(&self) -> Result<(Rc<Worker>, Writing), String> {
        let door = Door::new(self.region.clone());
        let worker = Worker::new(&self.context, self.events.clone(), Some(door.clone()));
        Ok((worker.map_err(|e| format!("no worker for a connection: {e}"))?, Writing::new(door)))
    }

    fn add(&mut self, conn: ConnId, connection: Connection) {
        self.names.insert(connection.name);
        self.connections.insert(conn, connection);
    }

    fn begin(&mut self, conn: ConnId, purpose: Purpose) -> Operation {
        let token = self.front.token();
        self.operations.insert(token, (conn, purpose));
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.outstanding += 1;
        }
        token
    }

    /// Starts an operation on a connection's endpoint, or on nothing before there is one.
    fn on_endpoint(&mut self, conn: ConnId, purpose: Purpose, start: impl FnOnce(&Endpoint, Operation)) {
        if self.connections.get(&conn).is_some_and(|c| c.endpoint.is_some()) {
            let token = self.begin(conn, purpose);
            if let Some(endpoint) = &self.connections[&conn].endpoint {
                start(endpoint, token);
            }
        }
    }

    fn post_message(&mut self, conn: ConnId, kind: Kind, body: Vec<u8>) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let sequence = if kind == Kind::Data { connection.next_sequence() } else { 0 };
        self.post_numbered(conn, kind, sequence, body);
    }

    fn post_numbered(&mut self, conn: ConnId, kind: Kind, sequence: u64, body: Vec<u8>) {
        let Some(connection) = self.connections.get(&conn) else { return };
        let (uid, nonce) = connection.name;
        let header = Header { kind, uid, nonce, sequence }.encode();
        self.on_endpoint(conn, Purpose::Message, |endpoint, token| endpoint.send(token, &header, body));
    }

    fn arrived(&mut self, conn: ConnId, message: Arrived, now: Instant, events: &mut Vec<Event>) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let header = Header::decode(&message.header).filter(|header| (header.uid, header.nonce) == connection.name);
        let Some(header) = header else {
            tracing::warn!("drops a UCX message of another protocol");
            return;
        };
        connection.heard(now);
        match header.kind {
            Kind::Attach | Kind::Ping => {}
            Kind::Attached if connection.endpoint.is_some() || connection.closing.is_some() => {}
            Kind::Attached => self.attached(conn, &message.body),
            Kind::Data if connection.closing.is_some() => {}
            Kind::Data => match connection.in_order(header.sequence, message.body) {
                Ok(bodies) => events.extend(bodies.into_iter().map(|body| Event::Message(conn, body))),
                Err(reason) => self.begin_close(conn, reason, now),
            },
            Kind::Flush => self.flush_asked(conn, header.sequence, &message.body, now),
            Kind::Flushed if connection.closing.is_some() => {}
            Kind::Flushed => events.push(Event::Flushed(conn, header.sequence)),
            Kind::Bye => self.force_close(conn, "the peer closed the connection", now),
        }
    }

    fn operation_done(&mut self, token: Operation, result: Result<(), Status>, now: Instant, events: &mut Vec<Event>) {
        let Some((conn, purpose)) = self.operations.remove(&token) else { return };
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.outstanding -= 1;
        let open = connection.closing.is_none();
        // Once the peer has answered, how the greeting ends is nobody's concern.
        let greeted = matches!(purpose, Purpose::Greeting) && connection.endpoint.is_some();
        match purpose {
            Purpose::Put(bytes) => events.push(Event::PutDone(conn, bytes)),
            Purpose::Get(number, bytes) if result.is_ok() => events.push(Event::Got(number, bytes)),
            Purpose::Flush(id) if open && result.is_ok() => events.push(Event::Flushed(conn, id)),
            Purpose::Wiring if open && result.is_ok() => self.wired(conn),
            Purpose::LastFlush => self.force_close(conn, "closed", now),
            Purpose::Get(..)
            | Purpose::Flush(_)
            | Purpose::Wiring
            | Purpose::Message
            | Purpose::Greeting
            | Purpose::Close => {}
        }
        if let Err(status) = result
            && !greeted
        {
            self.force_close(conn, &format!("UCX: {status}"), now);
        }
        if self.connections.get(&conn).is_some_and(|c| c.forced && c.outstanding == 0) {
            self.forget(conn, events);
        }
    }
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn address(&self) -> TransferAddress {
        TransferAddress::Ucx(self.address.clone())
    }

    fn region(&self) -> RemoteRegion {
        self.remote.clone()
    }

    fn fences(&self) -> bool {
        self.fences
    }

    fn closing_fences(&self, conn: ConnId) -> bool {
        self.fences && self.connections.contains_key(&conn)
    }

    fn connect(&mut self, to: &TransferAddress) -> Result<ConnId, String> {
        let TransferAddress::Ucx(address) = to else {
            return Err(format!("the peer speaks {}, this instance ucx", to.transport()));
        };
        self.open(address)
    }

    fn set_remote(&mut self, conn: ConnId, region: &RemoteRegion) -> Result<(), String> {
        self.aim(conn, region)
    }

    fn send(&mut self, conn: ConnId, message: Vec<u8>) {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| c.closing.is_none()) else { return };
        if let Some(message) = connection.hold_until_wired(message) {
            self.post_message(conn, Kind::Data, message);
        }
    }

    fn put(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        self.write(conn, ticket, run);
    }

    fn flush(&mut self, conn: ConnId, id: u64) {
        self.flush_writes(conn, id);
    }

    fn reads_by_itself(&self, conn: ConnId) -> bool {
        self.connections.get(&conn).is_some_and(|c| c.writing.is_one_sided())
    }

    fn get(&mut self, conn: ConnId, number: u64, run: CopyRun) {
        self.read(conn, number, run);
    }

    fn open_window(&mut self, conn: ConnId, ticket: TicketId, ranges: Vec<Range<usize>>) {
        if let Some(connection) = self.connections.get(&conn) {
            connection.writing.door.windows.borrow_mut().open(ticket, ranges);
        }
    }

    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        // The hazard itself leaves the door open as well.
        if let Some(connection) = self.connections.get(&conn).filter(|_| self.fencing != Fencing::Pretended) {
            connection.writing.door.windows.borrow_mut().close(ticket);
        }
    }

    fn close(&mut self, conn: ConnId, reason: &str) {
        self.begin_close(conn, reason, Instant::now());
    }

    fn lanes(&mut self, conn: ConnId) -> String {
        let endpoint = self.connections.get(&conn).and_then(|c| c.endpoint.as_ref());
        endpoint.map(|e| e.lanes().join(",")).unwrap_or_default()
    }

    fn progress(&mut self, now: Instant, events: &mut Vec<Event>) -> bool {
        let mut moved = turn(&self.front);
        self.unfenced.iter().for_each(|lost| moved |= turn(&lost.worker));
        for message in self.front.take_arrived() {
            self.arrived_in_front(message, now, events);
        }
        for conn in self.connections.keys().copied().collect::<Vec<_>>() {
            let Some(worker) = self.connections.get(&conn).map(|c| c.worker.clone()) else { continue };
            moved |= turn(&worker);
            for message in worker.take_arrived() {
                self.arrived(conn, message, now, events);
            }
            self.look_at_door(conn, now, events);
            for (owner, status) in worker.take_failed() {
                self.force_close(ConnId(owner), &format!("UCX: {status}"), now);
            }
        }
        self.watch(now, events);
        // Operations may also end inside the call that began them, so these lists are looked at whether or not anything moved.
        loop {
            let workers = self.connections.values().map(|c| &c.worker).chain([&self.front]);
            let done: Vec<_> = workers.flat_map(|worker| worker.take_done()).collect();
            if done.is_empty() {
                break;
            }
            done.into_iter().for_each(|d| self.operation_done(d.token, d.result, now, events));
        }
        moved || !events.is_empty()
    }

    fn sleep(&mut self, timeout: Duration) {
        let workers = self.connections.values().chain(&self.unfenced).map(|c| &*c.worker).chain([&*self.front]);
        self.sleeper.sleep(workers, timeout);
    }

    fn shutdown(&mut self, deadline: Instant, events: &mut Vec<Event>) {
        for conn in self.connections.keys().copied().collect::<Vec<_>>() {
            self.begin_close(conn, "the service stops", Instant::now());
        }
        while !self.connections.is_empty() && Instant::now() < deadline {
            if !self.progress(Instant::now(), events) {
                std::thread::yield_now();
            }
            events.retain(|event| matches!(event, Event::Closed { .. }));
        }
        for conn in self.connections.keys().copied().collect::<Vec<_>>() {
            self.forget(conn, events);
        }
        self.memory = None;
    }
}

/// Moves a worker on for a bounded number of turns; whether anything moved.
fn turn(worker: &Worker) -> bool {
    (0..TURNS).take_while(|_| worker.progress()).count() > 0
}
