//! UCX: RDMA where there is any, shared memory and TCP otherwise.
//!
//! A connection is one endpoint on each side. Whoever connects sends its worker address in an *attach*, the other side makes an
//! endpoint of its own towards it and answers; only then do messages flow. Active messages of different sizes may overtake each other,
//! so they carry sequence numbers and are put in order here.
//!
//! The remote key is no protection: over TCP and CMA UCX does not check it against what was granted. Nor does closing an endpoint
//! fence the peer's writes on every lane. So tickets are enforced by checksums and by the peer's own word, and blocks of a lost peer
//! stay quarantined.

mod connection;
mod header;
mod sleeper;

pub(crate) use sleeper::Sleeper;

use super::{ConnId, Event, Transport};
use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::service::Wake;
use crate::ucx::{Arrived, Context, Endpoint, Memory, Status, Token as Operation, Worker, devices_at};
use crate::{Region, TransferAddress, TransferConfig, TransferError};
use baton_types::TicketId;
use connection::Connection;
use header::{Header, Kind};
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Turns of UCX's progress before our own state is looked at.
const TURNS: usize = 16;
/// Segments of TCP lanes. In UCX's own of 8 KiB, puts over loopback have a third of the rate and twice the processor time.
pub(crate) const TCP_SEGMENTS: [(&str, &str); 2] = [("TCP_TX_SEG_SIZE", "256k"), ("TCP_RX_SEG_SIZE", "256k")];
/// How long a closing connection may take to hand over its last messages.
const CLOSE_WAIT: Duration = Duration::from_millis(500);

/// What an operation in flight was for.
enum Purpose {
    Message,
    Put(usize),
    Flush(u64),
    /// The flush before a close, so that the last messages leave.
    LastFlush,
    Close,
}

pub(crate) struct Ucx {
    sleeper: Sleeper,
    address: Vec<u8>,
    remote: RemoteRegion,
    /// Random name of this transport among its peers.
    uid: u64,
    next: u64,
    connections_max: usize,
    silent_max: Duration,
    operations: HashMap<Operation, (ConnId, Purpose)>,
    /// Connections by the name that their initiator gave them.
    names: HashMap<(u64, u64), ConnId>,
    // Dropped in this order: endpoints, registration, worker with its context.
    connections: BTreeMap<ConnId, Connection>,
    memory: Option<Rc<Memory>>,
    worker: Rc<Worker>,
}

impl Ucx {
    pub(crate) fn start(
        tls: &str,
        bind: IpAddr,
        devices: Option<&str>,
        config: &TransferConfig,
        region: Arc<Region>,
    ) -> Result<(Self, Wake), TransferError> {
        let devices = devices.map_or_else(|| devices_at(bind), |given| Ok(given.to_owned()));
        let devices = devices.map_err(|why| TransferError::Config(format!("cannot bind UCX to {bind}: {why}")))?;
        let failed = |what: &str, why: String| TransferError::Transport {
            transport: "ucx",
            detail: format!("{what} with UCX_TLS={tls} UCX_NET_DEVICES={devices}: {why}"),
        };
        let ucx = |what: &'static str| move |e: Status| failed(what, e.to_string());
        let io = |what: &'static str| move |e: std::io::Error| failed(what, e.to_string());
        let keepalive = format!("{}ms", (config.limits.peer_silent_ms / 4).max(1));
        // A device may have addresses of both families, of which UCX listens at one.
        let family = if bind.is_ipv4() { "inet" } else { "inet6" };
        let settings =
            [("TLS", tls), ("NET_DEVICES", &devices), ("TCP_AF_PRIO", family), ("KEEPALIVE_INTERVAL", &keepalive)];
        let context = Context::new(&[&settings[..], &TCP_SEGMENTS].concat()).map_err(ucx("no context"))?;
        let worker = Worker::new(&context).map_err(ucx("no worker"))?;
        let base = region.address();
        let bytes = region.len() as u64;
        let memory = Memory::register(&context, region).map_err(ucx("cannot register the region"))?;
        let key = memory.key().map_err(ucx("no key"))?;
        let address = worker.address().map_err(ucx("no address"))?;
        let sleeper = Sleeper::new(&worker).map_err(io("no wake-up"))?;
        let waker = sleeper.waker().map_err(io("no wake-up"))?;
        let transport = Self {
            sleeper,
            address,
            remote: RemoteRegion { address: base, bytes, key },
            uid: rand::random(),
            next: 0,
            connections_max: 2 * config.limits.peers_max,
            silent_max: Duration::from_millis(config.limits.peer_silent_ms),
            operations: HashMap::new(),
            names: HashMap::new(),
            connections: BTreeMap::new(),
            memory: Some(memory),
            worker,
        };
        Ok((transport, Box::new(move || waker.wake().expect("an eventfd takes a wake-up at any time"))))
    }

    fn new_id(&mut self) -> ConnId {
        self.next += 1;
        ConnId(self.next)
    }

    fn begin(&mut self, conn: ConnId, purpose: Purpose) -> Operation {
        let token = self.worker.token();
        self.operations.insert(token, (conn, purpose));
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.outstanding += 1;
        }
        token
    }

    fn post_message(&mut self, conn: ConnId, kind: Kind, body: Vec<u8>) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let sequence = if kind == Kind::Data { connection.next_sequence() } else { 0 };
        let (uid, nonce) = connection.name;
        let header = Header { kind, uid, nonce, sequence }.encode();
        let token = self.begin(conn, Purpose::Message);
        if let Some(connection) = self.connections.get(&conn) {
            connection.endpoint.send(token, &header, body);
        }
    }

    fn arrived(&mut self, message: Arrived, now: Instant, events: &mut Vec<Event>) {
        let Some(header) = Header::decode(&message.header) else {
            tracing::warn!("drops a UCX message of another protocol");
            return;
        };
        let name = (header.uid, header.nonce);
        let Some(&conn) = self.names.get(&name) else {
            if header.kind == Kind::Attach {
                self.attach(name, &message.body, now, events);
            }
            return; // Otherwise late, for a connection that is over.
        };
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.heard(now);
        match header.kind {
            Kind::Attach | Kind::Ping => {}
            Kind::Attached => {
                for body in connection.attached() {
                    self.post_message(conn, Kind::Data, body);
                }
            }
            Kind::Data if connection.closing.is_some() => {}
            Kind::Data => match connection.in_order(header.sequence, message.body) {
                Ok(bodies) => events.extend(bodies.into_iter().map(|body| Event::Message(conn, body))),
                Err(reason) => self.begin_close(conn, reason, now),
            },
            Kind::Bye => self.force_close(conn, "the peer closed the connection"),
        }
    }

    /// A peer connected: makes our own endpoint towards it.
    fn attach(&mut self, name: (u64, u64), address: &[u8], now: Instant, events: &mut Vec<Event>) {
        if self.connections.len() >= self.connections_max || address.is_empty() {
            return; // Its greeting will time out.
        }
        let conn = self.new_id();
        match Endpoint::new(&self.worker, address, conn.0) {
            Ok(endpoint) => {
                let mut connection = Connection::new(endpoint, name, now);
                connection.attached();
                self.connections.insert(conn, connection);
                self.names.insert(name, conn);
                self.post_message(conn, Kind::Attached, Vec::new());
                events.push(Event::Accepted(conn));
            }
            Err(error) => tracing::warn!(%error, "cannot answer a transfer peer"),
        }
    }

    /// Ends a connection after its last messages have left.
    fn begin_close(&mut self, conn: ConnId, reason: &str, now: Instant) {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| c.closing.is_none()) else { return };
        connection.closing = Some(reason.to_owned());
        connection.force_at = Some(now + CLOSE_WAIT);
        self.post_message(conn, Kind::Bye, Vec::new());
        let token = self.begin(conn, Purpose::LastFlush);
        if let Some(connection) = self.connections.get(&conn) {
            connection.endpoint.flush(token);
        }
    }

    /// Ends a connection at once, cancelling what is on it.
    fn force_close(&mut self, conn: ConnId, reason: &str) {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| !c.forced) else { return };
        connection.closing.get_or_insert_with(|| reason.to_owned());
        connection.forced = true;
        let token = self.begin(conn, Purpose::Close);
        if let Some(connection) = self.connections.get(&conn) {
            // Its key stays until the close has ended every write that uses it.
            connection.endpoint.close(token);
        }
    }

    fn operation_done(&mut self, token: Operation, result: Result<(), Status>, events: &mut Vec<Event>) {
        let Some((conn, purpose)) = self.operations.remove(&token) else { return };
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.outstanding -= 1;
        let open = connection.closing.is_none();
        match purpose {
            Purpose::Put(bytes) => events.push(Event::PutDone(conn, bytes)),
            Purpose::Flush(id) if open && result.is_ok() => events.push(Event::Flushed(conn, id)),
            Purpose::LastFlush => self.force_close(conn, "closed"),
            Purpose::Flush(_) | Purpose::Message | Purpose::Close => {}
        }
        if let Err(status) = result {
            self.force_close(conn, &format!("UCX: {status}"));
        }
        self.forget_closed(conn, events);
    }

    /// Reports a connection whose endpoint is closed and whose operations are all over.
    fn forget_closed(&mut self, conn: ConnId, events: &mut Vec<Event>) {
        if !self.connections.get(&conn).is_some_and(|c| c.forced && c.outstanding == 0) {
            return;
        }
        if let Some(connection) = self.connections.remove(&conn) {
            self.names.remove(&connection.name);
            events.push(Event::Closed(conn, connection.closing.unwrap_or_default()));
        }
    }

    /// Pings, silences and closes that take too long.
    fn watch(&mut self, now: Instant) {
        let (mut silent, mut quiet, mut slow) = (Vec::new(), Vec::new(), Vec::new());
        for (&conn, connection) in &mut self.connections {
            if connection.is_silent(now, self.silent_max) {
                silent.push(conn);
            } else if connection.wants_ping(now, self.silent_max / 4) {
                quiet.push(conn);
            }
            if connection.force_at.is_some_and(|at| now >= at) {
                slow.push(conn);
            }
        }
        let reason = format!("nothing came for {} ms", self.silent_max.as_millis());
        silent.into_iter().for_each(|conn| self.force_close(conn, &reason));
        quiet.into_iter().for_each(|conn| self.post_message(conn, Kind::Ping, Vec::new()));
        slow.into_iter().for_each(|conn| self.force_close(conn, "closed"));
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

    fn closing_fences(&self) -> bool {
        false
    }

    fn connect(&mut self, to: &TransferAddress) -> Result<ConnId, String> {
        let TransferAddress::Ucx(address) = to else {
            return Err(format!("the peer speaks {}, this instance ucx", to.transport()));
        };
        let conn = self.new_id();
        let endpoint = Endpoint::new(&self.worker, address, conn.0).map_err(|e| e.to_string())?;
        let name = (self.uid, conn.0);
        self.connections.insert(conn, Connection::new(endpoint, name, Instant::now()));
        self.names.insert(name, conn);
        self.post_message(conn, Kind::Attach, self.address.clone());
        Ok(conn)
    }

    fn set_remote(&mut self, conn: ConnId, region: &RemoteRegion) -> Result<(), String> {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| !c.forced) else { return Ok(()) };
        let key = connection.endpoint.unpack(&region.key).map_err(|e| e.to_string())?;
        connection.key = Some((key, region.address));
        Ok(())
    }

    fn send(&mut self, conn: ConnId, message: Vec<u8>) {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| c.closing.is_none()) else { return };
        if let Some(message) = connection.hold_until_attached(message) {
            self.post_message(conn, Kind::Data, message);
        }
    }

    fn put(&mut self, conn: ConnId, _: TicketId, run: CopyRun) {
        let usable = self.connections.get(&conn).is_some_and(|c| c.closing.is_none() && c.key.is_some());
        let Some(memory) = self.memory.clone().filter(|_| usable) else { return };
        let token = self.begin(conn, Purpose::Put(run.len));
        if let Some(connection) = self.connections.get(&conn) {
            connection.put(token, &memory, run);
        }
    }

    fn flush(&mut self, conn: ConnId, id: u64) {
        let usable = self.connections.get(&conn).is_some_and(|c| c.closing.is_none());
        if usable {
            let token = self.begin(conn, Purpose::Flush(id));
            self.connections[&conn].endpoint.flush(token);
        }
    }

    fn open_window(&mut self, _: ConnId, _: TicketId, _: Vec<Range<usize>>) {}

    fn close_window(&mut self, _: ConnId, _: TicketId) {}

    fn close(&mut self, conn: ConnId, reason: &str) {
        self.begin_close(conn, reason, Instant::now());
    }

    fn lanes(&mut self, conn: ConnId) -> String {
        self.connections.get(&conn).map(|c| c.endpoint.lanes().join(",")).unwrap_or_default()
    }

    fn progress(&mut self, now: Instant, events: &mut Vec<Event>) -> bool {
        let turns = (0..TURNS).take_while(|_| self.worker.progress()).count();
        for message in self.worker.take_arrived() {
            self.arrived(message, now, events);
        }
        for (owner, status) in self.worker.take_failed() {
            self.force_close(ConnId(owner), &format!("UCX: {status}"));
        }
        // Operations may also end inside the call that began them, so this list is looked at whether or not anything moved.
        loop {
            let done = self.worker.take_done();
            if done.is_empty() {
                break;
            }
            done.into_iter().for_each(|d| self.operation_done(d.token, d.result, events));
        }
        self.watch(now);
        turns > 0 || !events.is_empty()
    }

    fn sleep(&mut self, timeout: Duration) {
        self.sleeper.sleep(&self.worker, timeout);
    }

    fn shutdown(&mut self, deadline: Instant) {
        let mut events = Vec::new();
        for conn in self.connections.keys().copied().collect::<Vec<_>>() {
            self.begin_close(conn, "the service stops", Instant::now());
        }
        while !self.connections.is_empty() && Instant::now() < deadline {
            if !self.progress(Instant::now(), &mut events) {
                std::thread::yield_now();
            }
            events.clear();
        }
        if !self.connections.is_empty() {
            tracing::warn!(left = self.connections.len(), "UCX endpoints did not close in time");
        }
        self.connections.clear();
        self.memory = None;
    }
}
