//! Plain TCP: for where UCX cannot run, and the stricter of the two. Every write is checked against the ticket's granted ranges
//! before a byte is stored, and closing the socket fences the peer, since nothing reaches the region but through it.

mod connection;
mod frame;

use super::{ConnId, Event, Transport, Wake};
use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::{Region, TransferAddress, TransferConfig, TransferError};
use baton_types::TicketId;
use connection::Connection;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
/// Tokens below are not connections.
const FIRST_CONNECTION: u64 = 2;

pub(crate) struct Tcp {
    poll: Poll,
    ready: Events,
    listener: TcpListener,
    address: SocketAddr,
    region: Arc<Region>,
    connections: BTreeMap<ConnId, Connection>,
    next: u64,
    accepting: bool,
    connections_max: usize,
    silent_max: Duration,
    /// Connections that were refused by `connect` or closed by the service, to be reported.
    closed: Vec<(ConnId, String)>,
}

impl Tcp {
    pub(crate) fn start(
        bind: IpAddr,
        port: u16,
        config: &TransferConfig,
        region: Arc<Region>,
    ) -> Result<(Self, Wake), TransferError> {
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
        let mut listener = TcpListener::bind(SocketAddr::new(bind, port)).map_err(|e| failed("bind", e))?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE).map_err(|e| failed("poll", e))?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(|e| failed("wake", e))?;
        let bound = listener.local_addr().map_err(|e| failed("bind", e))?;
        let address = SocketAddr::new(config.advertise.unwrap_or(bound.ip()), bound.port());
        let tcp = Self {
            poll,
            ready: Events::with_capacity(256),
            listener,
            address,
            region,
            connections: BTreeMap::new(),
            next: FIRST_CONNECTION,
            accepting: true,
            connections_max: 2 * config.limits.peers_max,
            silent_max: Duration::from_millis(config.limits.peer_silent_ms),
            closed: Vec::new(),
        };
        let wake = move || waker.wake().expect("an eventfd takes a wake-up at any time");
        Ok((tcp, Box::new(wake)))
    }

    fn add(&mut self, mut stream: TcpStream) -> Result<ConnId, std::io::Error> {
        stream.set_nodelay(true).ok(); // A connecting socket may refuse it; then it is set once connected.
        let id = ConnId(self.next);
        self.next += 1;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut stream, Token(id.0 as usize), interest)?;
        self.connections.insert(id, Connection::new(stream, self.region.clone()));
        Ok(id)
    }

    fn accept(&mut self, events: &mut Vec<Event>) -> bool {
        let mut any = false;
        while self.accepting {
            match self.listener.accept() {
                Ok((stream, _)) if self.connections.len() < self.connections_max => {
                    any = true;
                    events.extend(self.add(stream).ok().map(|conn| Event::Accepted { conn, proven: false }));
                }
                Ok(_) => {} // Full: the peer sees the socket closed.
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.accepting = false,
                Err(e) if e.kind() == ErrorKind::Interrupted || e.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a transfer connection");
                    break;
                }
            }
        }
        any
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
                WAKER => {}
                Token(id) => {
                    if let Some(connection) = self.connections.get_mut(&ConnId(id as u64)) {
                        connection.readable |= event.is_readable() || event.is_error() || event.is_read_closed();
                        connection.writable |= event.is_writable();
                    }
                }
            }
        }
    }

    fn remove(&mut self, id: ConnId, reason: String, events: &mut Vec<Event>) {
        if self.connections.remove(&id).is_some() {
            events.push(Event::Closed { conn: id, reason, fenced: true, unproven: false });
        }
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
        RemoteRegion { address: 0, bytes: self.region.len() as u64, key: Vec::new() }
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
        let stream = TcpStream::connect(*socket).map_err(|e| format!("{socket}: {e}"))?;
        self.add(stream).map_err(|e| format!("{socket}: {e}"))
    }

    fn set_remote(&mut self, _: ConnId, _: &RemoteRegion) -> Result<(), String> {
        Ok(()) // Offsets are all that a write needs.
    }

    fn send(&mut self, conn: ConnId, message: Vec<u8>) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.queue_message(message);
        }
    }

    fn put(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.queue_put(ticket, run);
        }
    }

    fn flush(&mut self, conn: ConnId, id: u64) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.queue_flush(id);
        }
    }

    fn open_window(&mut self, conn: ConnId, ticket: TicketId, ranges: Vec<Range<usize>>) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.windows.open(ticket, ranges);
        }
    }

    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.close_window(ticket);
        }
    }

    fn close(&mut self, conn: ConnId, reason: &str) {
        // What was queued before, say a refusal, gets one chance to leave.
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.writable = true;
            let _ = connection.write(conn, &mut Vec::new());
            self.closed.push((conn, reason.to_owned()));
        }
    }

    fn lanes(&mut self, _: ConnId) -> String {
        "tcp/socket".into()
    }

    fn progress(&mut self, now: Instant, events: &mut Vec<Event>) -> bool {
        self.poll(Duration::ZERO);
        let mut any = self.accept(events);
        for (id, reason) in std::mem::take(&mut self.closed) {
            self.remove(id, reason, events);
        }
        let mut broken = Vec::new();
        for (&id, connection) in &mut self.connections {
            match connection.progress(id, now, self.silent_max, events) {
                Ok(moved) => any |= moved,
                Err(reason) => broken.push((id, reason)),
            }
        }
        for (id, reason) in broken {
            self.remove(id, reason, events);
        }
        any || !events.is_empty()
    }

    fn sleep(&mut self, timeout: Duration) {
        self.poll(timeout);
    }

    fn shutdown(&mut self, _: Instant, events: &mut Vec<Event>) {
        // Sockets and what was queued on them; nothing else refers to the region.
        for id in self.connections.keys().copied().collect::<Vec<_>>() {
            self.remove(id, "the service stops".into(), events);
        }
    }
}
