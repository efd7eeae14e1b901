//! The TCP transport: frames on one socket, in TLS where there are credentials. Every write is checked against the ticket's granted ranges
//! before a byte is stored. Closing the socket fences the peer, because the peer reaches the pool only through it. Writes that are on their
//! way into memory of a device are waited for first, and reads of what was to be sent.
//!
//! It is a complete transport, and also the control channel of others. Where lanes carry the writes, their connections are opened here.
//! What the sides need to know of each other's lanes, and all messages, go over this channel.

mod accepting;
mod connection;
mod frame;
mod frame_reader;
mod frame_writer;
mod handshakes;
mod queues;
mod tls;

use super::last_operations::LastOperations;
use super::pool::Pool;
use super::rotation::Rotation;
use super::{ConnId, Event, Transport, Wake};
use crate::hazards::hazard;
use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::pool_turns::SharedPoolMemory;
use crate::window::Window;
use crate::{Credentials, TransferAddress, TransferConfig, TransferError};
use accepting::{AcceptFailure, Room, Unsettled, room};
use baton_types::TicketId;
pub(super) use connection::LaneFrame;
use connection::{Connection, Origin, Secured};
use handshakes::Handshakes;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use queues::Queued;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tls::Session;

/// Lanes that report to the same epoll set use number 0.
pub(super) const LANES: Token = Token(0);
const LISTENER: Token = Token(1);
const WAKER: Token = Token(2);
/// Lower tokens are not connections.
const FIRST_CONNECTION: u64 = 3;
/// How long the operations of an ended connection may take before its end is reported without them.
const ENDING_MAX: Duration = Duration::from_secs(5);
/// How often a transport that shuts down looks at deadlines. The end of an operation wakes it.
const SHUTDOWN_POLL: Duration = Duration::from_millis(1);
/// Most connections accepted before existing connections are served.
const ACCEPTED_A_TURN_MAX: usize = 16;

/// Longest sleep while connections wait to be accepted.
const CROWDED_SLEEP_MAX: Duration = Duration::from_millis(5);

/// Most memory of what is queued for all peers together, apart from writes: beyond it, one of the host with the most is closed.
const CONTROL_BYTES_MAX: usize = 512 << 20;

/// Where a control channel listens, and its kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Listen {
    pub(crate) bind: IpAddr,
    pub(crate) port: u16,
    /// Writes go over lanes: the owner of the lanes handles their frames.
    pub(crate) has_lanes: bool,
}

pub(crate) struct Tcp {
    poll: Poll,
    ready: Events,
    listener: TcpListener,
    address: SocketAddr,
    pool: Pool,
    credentials: Option<Arc<dyn Credentials>>,
    encrypt: bool,
    has_lanes: bool,
    connections: BTreeMap<ConnId, Connection>,
    rotation: Rotation,
    handshakes: Handshakes,
    /// Connections that have ended, for which the pool's device still works.
    ending: Vec<Ending>,
    /// Connections that a test prevents from being fenced: their sockets stay open and are not read.
    unfenced: Vec<Connection>,
    keeps_lost: bool,
    next: u64,
    accepting: bool,
    /// Connections wait to be accepted, for which there is no room yet.
    crowded: bool,
    /// Most connections whose peer has not identified itself.
    ungreeted_max: usize,
    silent_max: Duration,
    connect_max: Duration,
    /// Connections that `connect` refused or the service closed, to be reported.
    closed: Vec<(ConnId, String)>,
}

impl Tcp {
    pub(super) fn start(
        listen: Listen,
        config: &TransferConfig,
        shared: Arc<SharedPoolMemory>,
    ) -> Result<(Self, Wake), TransferError> {
        let Listen { bind, port, has_lanes } = listen;
        if bind.is_unspecified() && config.advertise.is_none() {
            return Err(TransferError::Config(format!(
                "bound to {bind}, no peer could connect: set the host to advertise"
            )));
        }
        let failed = |what: &str, e: std::io::Error| TransferError::Transport {
            transport: "tcp",
            detail: format!("{what} {bind}:{port}: {e}"),
        };
        let poll = Poll::new().map_err(|e| failed("poll for", e))?;
        let mut listener = accepting::listen(SocketAddr::new(bind, port)).map_err(|e| failed("bind", e))?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE).map_err(|e| failed("poll", e))?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(|e| failed("wake", e))?;
        let waker = Arc::new(PollWaker(waker));
        let mut pool = Pool::new(shared, waker.clone().into());
        pool.counts_unstored = hazard!(config, UnstoredWrites);
        let bound = listener.local_addr().map_err(|e| failed("bind", e))?;
        let address = SocketAddr::new(config.advertise.unwrap_or(bound.ip()), bound.port());
        let tcp = Self {
            poll,
            ready: Events::with_capacity(256),
            listener,
            address,
            pool,
            credentials: config.credentials.clone(),
            encrypt: config.encrypt,
            has_lanes,
            connections: BTreeMap::new(),
            rotation: Rotation::default(),
            handshakes: Handshakes::default(),
            ending: Vec::new(),
            unfenced: Vec::new(),
            keeps_lost: has_lanes && hazard!(config, PretendedFences),
            next: FIRST_CONNECTION,
            accepting: true,
            crowded: false,
            ungreeted_max: config.limits.ungreeted_max,
            silent_max: Duration::from_millis(config.limits.peer_silent_ms),
            connect_max: Duration::from_millis(config.limits.connect_ms),
            closed: Vec::new(),
        };
        Ok((tcp, Box::new(move || waker.rouse())))
    }

    /// The pool, for lanes.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The socket address it listens on, as published.
    pub(super) fn socket(&self) -> SocketAddr {
        self.address
    }

    /// The epoll set of [`Transport::sleep`], for other sources that must end a sleep.
    pub(super) fn epoll(&self) -> std::io::Result<OwnedFd> {
        self.poll.registry().as_fd().try_clone_to_owned()
    }

    /// Frames that came for the lanes of a connection.
    pub(super) fn lane_frames(&mut self, conn: ConnId) -> Vec<LaneFrame> {
        let frames = self.connections.get_mut(&conn).and_then(|c| c.lane_frames.as_mut());
        frames.map(|frames| frames.drain(..).collect()).unwrap_or_default()
    }

    /// Sends the peer what it needs to know about this side's lanes.
    pub(super) fn attach(&mut self, conn: ConnId, body: Vec<u8>) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.writer.attach(body);
        }
    }

    /// Asks the peer to answer once this many writes have come over lanes.
    pub(super) fn flush_lanes(&mut self, conn: ConnId, id: u64, posted: u64) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.writer.flush(id, posted);
        }
    }

    /// Answers the peer's [`LaneFrame::Flush`] with this id.
    pub(super) fn flushed_lanes(&mut self, conn: ConnId, id: u64) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.writer.flushed(id);
        }
    }

    /// Connects to a control channel.
    pub(super) fn dial(&mut self, socket: SocketAddr) -> Result<ConnId, String> {
        let stream = TcpStream::connect(socket).map_err(|e| format!("{socket}: {e}"))?;
        self.add(stream, Origin::Dialled { to: socket.ip() }).map_err(|e| format!("{socket}: {e}"))
    }

    fn add(&mut self, mut stream: TcpStream, origin: Origin) -> Result<ConnId, String> {
        let secured = self.credentials.as_ref().map(|credentials| {
            let session = match origin {
                Origin::Dialled { .. } => Session::client(&**credentials),
                Origin::Accepted { .. } => Session::server(&**credentials),
            };
            Secured::new(session?, credentials.clone(), !self.encrypt)
        });
        let secured = secured.transpose()?;
        stream.set_nodelay(true).ok(); // A connecting socket may refuse it; then it is set once connected.
        let id = ConnId(self.next);
        self.next += 1;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut stream, Token(id.0 as usize), interest).map_err(|e| e.to_string())?;
        let connection = Connection::new(stream, self.pool.clone(), origin, secured, self.has_lanes);
        self.connections.insert(id, connection);
        Ok(id)
    }

    fn accept(&mut self, now: Instant, events: &mut Vec<Event>) -> bool {
        let mut any = false;
        // Bounded, so that a client that keeps connecting cannot delay existing connections.
        for _ in 0..ACCEPTED_A_TURN_MAX {
            if !self.accepting {
                break;
            }
            let room = self.room(now);
            self.crowded = room == Room::Later;
            if self.crowded {
                break;
            }
            match self.listener.accept() {
                Ok((stream, from)) => {
                    any = true;
                    if let Room::Of(conn) = room {
                        self.remove(conn, "too many have connected without a greeting".into(), false, events);
                    }
                    let (from, greet_by) = (from.ip().to_canonical(), now + self.connect_max);
                    let origin = Origin::Accepted { from, greet_by };
                    if let Err(error) = self.add(stream, origin) {
                        tracing::warn!(error, "cannot set up an accepted connection");
                    }
                }
                Err(error) => match AcceptFailure::from(error.kind()) {
                    AcceptFailure::NoneWaiting => self.accepting = false,
                    AcceptFailure::Retry => {}
                    AcceptFailure::OutOfResources => {
                        tracing::warn!(%error, "cannot accept a transfer connection");
                        break;
                    }
                },
            }
        }
        any
    }

    /// The room for one more connection whose peer has not identified itself yet.
    fn room(&self, now: Instant) -> Room {
        let unsettled = self.connections.iter().filter_map(|(&conn, c)| match c.origin {
            Origin::Accepted { from, greet_by } if c.is_unsettled() => {
                let accepted_at = greet_by - self.connect_max;
                Some(Unsettled { conn, from, accepted_at, has_begun: c.has_begun() })
            }
            _ => None,
        });
        room(&unsettled.collect::<Vec<_>>(), self.ungreeted_max, now)
    }

    /// Closes connections while the memory of all queues is beyond its bound.
    fn bound_queues(&mut self, events: &mut Vec<Event>) {
        loop {
            let queued = self.connections.iter().map(|(&conn, connection)| Queued {
                conn,
                host: connection.host(),
                bytes: connection.writer.control_bytes(),
            });
            let Some(conn) = queues::to_close(queued, CONTROL_BYTES_MAX) else { return };
            self.remove(conn, "the peers do not read their messages, and this one the least".into(), false, events);
        }
    }

    /// Collects readiness, waiting up to `timeout` for it.
    fn poll(&mut self, timeout: Duration) {
        if let Err(error) = self.poll.poll(&mut self.ready, Some(timeout)) {
            if error.kind() != ErrorKind::Interrupted {
                tracing::error!(%error, "cannot poll transfer sockets");
            }
            return;
        }
        for event in &self.ready {
            match event.token() {
                LISTENER => self.accepting = true,
                WAKER | LANES => {}
                Token(id) => {
                    if let Some(connection) = self.connections.get_mut(&ConnId(id as u64)) {
                        connection.readable |= event.is_readable() || event.is_error() || event.is_read_closed();
                        connection.writable |= event.is_writable();
                        connection.hung_up |= event.is_error() || event.is_read_closed();
                    }
                }
            }
        }
    }

    fn remove(&mut self, id: ConnId, reason: String, unproven: bool, events: &mut Vec<Event>) {
        if let Some(mut connection) = self.connections.remove(&id) {
            connection.last_words(id);
            if connection.was_announced() {
                let (operations, until) = (connection.take_operations(), Instant::now() + ENDING_MAX);
                self.ending.push(Ending { conn: id, report: Some((reason, unproven)), operations, until });
                self.end(Instant::now(), events);
            } else {
                tracing::info!(reason, "closes a connection without a greeting");
            }
            if self.keeps_lost {
                self.unfenced.push(connection);
            }
        }
    }

    /// Reports connections whose operations have all ended, or did not end for too long: then the peer is not fenced yet.
    fn end(&mut self, now: Instant, events: &mut Vec<Event>) {
        self.ending.retain_mut(|ending| {
            let (conn, fenced) = (ending.conn, ending.operations.have_ended());
            match ending.report.take_if(|_| fenced || now >= ending.until) {
                Some((reason, unproven)) => {
                    events.push(Event::Closed { conn, reason, fenced, draining: !fenced, unproven });
                }
                None if fenced => events.push(Event::Drained { conn, fenced }),
                None => {}
            }
            !fenced
        });
    }
}

/// A connection without a socket, whose last operations run.
struct Ending {
    conn: ConnId,
    /// Why it closed, and whether one side was not proven, until that is reported.
    report: Option<(String, bool)>,
    operations: LastOperations,
    /// When to report it at the latest.
    until: Instant,
}

/// Ends a sleep of the transport.
struct PollWaker(Waker);

impl PollWaker {
    fn rouse(&self) {
        self.0.wake().expect("an eventfd takes a wake-up at any time");
    }
}

impl std::task::Wake for PollWaker {
    fn wake(self: Arc<Self>) {
        self.rouse();
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> TransferAddress {
        TransferAddress::Tcp(self.address)
    }

    fn region(&self) -> RemoteRegion {
        RemoteRegion { bytes: self.pool.bytes() as u64, ..RemoteRegion::default() }
    }

    fn fences(&self) -> bool {
        true
    }

    fn closing_fences(&self, _: ConnId) -> bool {
        true
    }

    fn connect(&mut self, to: &TransferAddress) -> Result<ConnId, String> {
        let TransferAddress::Tcp(socket) = to else {
            return Err(format!("the peer speaks {}, this instance tcp", to.transport()));
        };
        self.dial(*socket)
    }

    fn greeted(&mut self, conn: ConnId, _: &RemoteRegion, message_bytes_max: usize) -> Result<(), String> {
        // A write needs only offsets.
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.reader.limit_messages(message_bytes_max);
            connection.reader.settle();
        }
        Ok(())
    }

    fn send(&mut self, conn: ConnId, message: Vec<u8>) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.writer.message(message);
        }
    }

    fn put(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.writer.put(&self.pool, ticket, run);
        }
    }

    fn flush(&mut self, conn: ConnId, id: u64) {
        self.flush_lanes(conn, id, 0);
    }

    fn open_window(&mut self, conn: ConnId, ticket: TicketId, window: Window) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.reader.windows.open(ticket, window);
        }
    }

    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.reader.close_window(ticket);
        }
    }

    fn is_open(&self, conn: ConnId) -> bool {
        self.connections.get(&conn).is_some_and(|connection| !connection.hung_up)
    }

    fn close(&mut self, conn: ConnId, reason: &str) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.last_words(conn);
            self.closed.push((conn, reason.to_owned()));
        }
    }

    fn lanes(&self, _: ConnId) -> String {
        match (&self.credentials, self.encrypt) {
            (None, _) => "tcp/socket".into(),
            (Some(_), true) => "tcp/tls".into(),
            (Some(_), false) => "tcp/tls-control".into(),
        }
    }

    fn progress(&mut self, now: Instant, events: &mut Vec<Event>) -> bool {
        let before = events.len();
        self.poll(Duration::ZERO);
        let mut any = self.accept(now, events);
        for (id, reason) in std::mem::take(&mut self.closed) {
            self.remove(id, reason, false, events);
        }
        let (mut broken, silent_max) = (Vec::new(), self.silent_max);
        let mut progress = |id, connection: &mut Connection, may_step| {
            connection.progress(id, now, silent_max, may_step, events).unwrap_or_else(|reason| {
                broken.push((id, reason, connection.is_unproven()));
                false
            })
        };
        // Handshakes go on in the order in which they wait: one that is costly leaves no time to those behind it.
        let ready = self.connections.iter().filter(|(_, c)| c.has_step()).map(|(&id, _)| id);
        self.handshakes.begin(now, ready);
        let (began, mut stepped) = (Instant::now(), Vec::new());
        while let Some(id) = self.handshakes.next(began.elapsed()) {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            any |= progress(id, connection, true);
            stepped.push(id);
        }
        any |= self.handshakes.others_wait();
        for id in self.rotation.next(&self.connections) {
            let Some(connection) = self.connections.get_mut(&id).filter(|_| !stepped.contains(&id)) else { continue };
            any |= progress(id, connection, false);
        }
        for (id, reason, unproven) in broken {
            self.remove(id, reason, unproven, events);
        }
        self.bound_queues(events);
        self.end(now, events);
        any || events.len() > before
    }

    fn sleep(&mut self, timeout: Duration) {
        // Nothing tells that places become free with time.
        self.poll(if self.crowded { timeout.min(CROWDED_SLEEP_MAX) } else { timeout });
    }

    fn shutdown(&mut self, deadline: Instant, events: &mut Vec<Event>) {
        // Closes sockets with what was queued on them; only operations that run on the pool still refer to it.
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            self.remove(id, "the service stops".into(), false, events);
        }
        self.ending.iter_mut().for_each(|ending| ending.until = ending.until.min(deadline));
        loop {
            let now = Instant::now();
            self.end(now, events);
            if self.ending.is_empty() || now >= deadline {
                break;
            }
            self.poll(SHUTDOWN_POLL);
        }
    }
}
