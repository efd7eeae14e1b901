//! One socket: its output queue, the frame that it is reading, and its TLS session.

use super::frame::begins_frame;
use super::frame_reader::{Arrived, FrameReader};
use super::frame_writer::{FrameWriter, Kinds};
use super::tls::{OUTBOX_BYTES, Outbox, RECORD_BYTES_MAX, Session, begins_record, first_record, whole_records};
use crate::credentials::Credentials;
use crate::transport::incoming::{Ended, Incoming};
use crate::transport::last_operations::LastOperations;
use crate::transport::pool::Pool;
use crate::transport::{ConnId, Event};
use baton_memory::host::Part;
use baton_types::places::host_of;
use mio::net::TcpStream;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes moved on one socket before other sockets are served.
const TURN_BYTES: usize = 2 << 20;
/// Messages read on one socket before other sockets are served, as far as what was received at once has no more: each costs far more than its
/// bytes.
const TURN_EVENTS: usize = 256;
/// Bytes received at once, unless they go directly to host memory. Fits a core's cache, and holds many records.
const INBOX_BYTES: usize = 256 << 10;
/// The same for peers that have not identified themselves: room for one record, which is more than a handshake or a greeting takes.
const UNSETTLED_INBOX_BYTES: usize = 32 << 10;

/// How the connection was opened.
pub(super) enum Origin {
    /// The peer connected from this address; it is closed unless the peer greets by then.
    Accepted { from: IpAddr, greet_by: Instant },
    /// This side connected to this address.
    Dialled { to: IpAddr },
}

/// A frame for lanes that this transport does not carry.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::transport) enum LaneFrame {
    Attach(Vec<u8>),
    /// Requests an answer once this many writes have come over the lanes.
    Flush {
        id: u64,
        posted: u64,
    },
}

/// The TLS session of a connection, and the credentials that verify the peer.
pub(super) struct Secured {
    pub(super) session: Session,
    pub(super) credentials: Arc<dyn Credentials>,
    /// Writes are sent in clear, and may be received in clear.
    pub(super) clear: bool,
    outbox: Outbox,
    /// Plain bytes of the next record.
    record: Vec<u8>,
    /// The peer has proven that it is a worker.
    proven: bool,
    /// One of the sides did not accept the other.
    failed: bool,
    /// Reading has failed in the middle of what was received: the session must encrypt nothing more. What is in the outbox still goes out.
    broken: bool,
}

impl Secured {
    pub(super) fn new(mut session: Session, credentials: Arc<dyn Credentials>, clear: bool) -> Result<Self, String> {
        let mut outbox = Outbox::default();
        // A client sends first.
        session.read(&mut [], &mut outbox, |_| Err("data before the handshake".into()))?;
        let (proven, failed, broken) = (false, false, false);
        Ok(Self { session, credentials, clear, outbox, record: Vec::new(), proven, failed, broken })
    }
}

pub(super) struct Connection {
    stream: TcpStream,
    pool: Pool,
    pub(super) origin: Origin,
    secured: Option<Secured>,
    /// The service was notified of this connection.
    announced: bool,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer sends nothing more. What it sent before may wait here for room.
    pub(super) hung_up: bool,
    pub(super) writer: FrameWriter,
    pub(super) reader: FrameReader,
    /// Bytes received and not processed: `inbox[from..to]`.
    inbox: Box<[u8]>,
    from: usize,
    to: usize,
    /// So many of them, in complete records, were given to TLS and are part of a message of its own that is not complete. TLS remembers where
    /// they end: whatever it is given next begins with them.
    kept: usize,
    /// What is in the inbox waits for room in the pool's buffers.
    paused: bool,
    /// The current incoming frame is in clear.
    in_clear: bool,
    /// Frames that belong to lanes.
    pub(super) lane_frames: Option<VecDeque<LaneFrame>>,
    heard: bool,
    received: bool,
    last_read: Option<Instant>,
    /// Since when the rest of a record is awaited.
    record_due: Option<Instant>,
    last_ping: Option<Instant>,
}

impl Connection {
    pub(super) fn new(
        stream: TcpStream,
        pool: Pool,
        origin: Origin,
        secured: Option<Secured>,
        has_lanes: bool,
    ) -> Self {
        let dialled = matches!(origin, Origin::Dialled { .. });
        Self {
            stream,
            reader: FrameReader::new(pool.clone(), dialled),
            pool,
            announced: dialled,
            origin,
            secured,
            readable: false,
            writable: false,
            hung_up: false,
            writer: FrameWriter::default(),
            inbox: Box::default(),
            from: 0,
            to: 0,
            kept: 0,
            paused: false,
            in_clear: false,
            lane_frames: has_lanes.then(VecDeque::new),
            heard: false,
            received: false,
            last_read: None,
            record_due: None,
            last_ping: None,
        }
    }

    /// Whether the connection failed because one side did not accept the other. A server sees a client's certificate last, when the client
    /// takes the handshake for complete. So the side that connected may receive no reason.
    pub(super) fn is_unproven(&self) -> bool {
        self.secured.as_ref().is_some_and(|secured| secured.failed || (secured.proven && !self.heard))
    }

    /// The peer's host.
    pub(super) fn host(&self) -> IpAddr {
        match self.origin {
            Origin::Accepted { from, .. } => host_of(from),
            Origin::Dialled { to } => host_of(to),
        }
    }

    /// Whether a peer that connected has not identified itself yet.
    pub(super) fn is_unsettled(&self) -> bool {
        matches!(self.origin, Origin::Accepted { .. }) && !self.reader.is_settled()
    }

    /// Whether something has come.
    pub(super) fn has_begun(&self) -> bool {
        self.readable || self.received
    }

    fn is_handshaking(&self) -> bool {
        self.secured.as_ref().is_some_and(|secured| !secured.proven)
    }

    /// Whether bytes may be here with which the handshake goes on.
    pub(super) fn has_step(&self) -> bool {
        self.readable && self.is_handshaking()
    }

    /// Reads and writes as much as possible, and makes one step of a handshake only if it `may_step`; an error says why the connection is
    /// closed.
    pub(super) fn progress(
        &mut self,
        id: ConnId,
        now: Instant,
        silent_max: Duration,
        may_step: bool,
        events: &mut Vec<Event>,
    ) -> Result<bool, String> {
        if self.secured.is_none() && !self.announced {
            self.announced = true;
            events.push(Event::Accepted { conn: id, proven: false });
        }
        let read = self.read(id, now, may_step, events)?;
        let had_room = self.reader.incoming.has_room();
        if !had_room {
            self.last_read = Some(now); // It is this side that does not read.
        }
        for ended in self.reader.incoming.advance(now).map_err(|e| e.to_string())? {
            match ended {
                Ended::Flush(flush) => self.writer.flushed(flush),
                Ended::Window(ticket) => events.push(Event::WindowClosed(id, ticket)),
            }
        }
        // More can be read at once.
        let made_room = !had_room && self.reader.incoming.has_room();
        let last_read = *self.last_read.get_or_insert(now);
        if now - last_read > silent_max {
            return Err(format!("nothing came for {} ms", silent_max.as_millis()));
        }
        self.check_record(now, silent_max / 4)?;
        match self.origin {
            Origin::Accepted { greet_by, .. } if self.is_unsettled() && now >= greet_by => {
                return Err("whoever connected does not say who it is".into());
            }
            _ => {}
        }
        if now - *self.last_ping.get_or_insert(now) > silent_max / 4 {
            self.last_ping = Some(now);
            self.writer.ping();
        }
        self.writer.check()?;
        self.writer.stage(&self.pool, now)?;
        Ok(self.write(id, events)? || read || made_room)
    }

    /// A record that was damaged on its way may claim to be longer than it is. All that comes then counts as part of it, little as that is: so
    /// one that is not complete in time ends the connection, although something comes.
    fn check_record(&mut self, now: Instant, max: Duration) -> Result<(), String> {
        let is_proven = self.secured.as_ref().is_some_and(|secured| secured.proven);
        if !is_proven || self.paused || self.from == self.to {
            self.record_due = None;
        } else if now - *self.record_due.get_or_insert(now) > max {
            return Err(format!("a record is not complete after {} ms", max.as_millis()));
        }
        Ok(())
    }

    pub(super) fn write(&mut self, id: ConnId, events: &mut Vec<Event>) -> Result<bool, String> {
        let mut moved = 0;
        while self.writable && moved < TURN_BYTES {
            let next = self.writer.next();
            let (sent, framed) = match &mut self.secured {
                None if next.is_none() => break,
                None => (self.pool.send_parts(&self.stream, &self.writer.gather(Kinds::All, TURN_BYTES)), true),
                // A session that began in clear stays in clear.
                Some(Secured { clear: true, proven: true, outbox, .. })
                    if next.is_some_and(|(is_put, begun)| is_put && (begun || outbox.waiting().is_empty())) =>
                {
                    let parts = self.writer.gather(Kinds::Puts, TURN_BYTES);
                    (self.pool.send_parts(&self.stream, &parts), true)
                }
                Some(secured) => {
                    let kept = &mut self.inbox[self.from..self.from + self.kept];
                    encrypt(secured, &mut self.writer, &self.pool, kept, id, events)?;
                    if secured.outbox.waiting().is_empty() {
                        break;
                    }
                    (self.pool.send_parts(&self.stream, &[Part::Own(secured.outbox.waiting())]), false)
                }
            };
            match sent {
                Ok(0) => return Err("the socket takes no bytes".into()),
                Ok(n) => {
                    moved += n;
                    match &mut self.secured {
                        Some(secured) if !framed => secured.outbox.went(n),
                        _ => self.writer.went(n, |bytes| events.push(Event::PutDone(id, bytes))),
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::NotConnected => {
                    self.writable = false
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(format!("writing: {e}")),
            }
        }
        Ok(moved > 0)
    }

    fn read(&mut self, id: ConnId, now: Instant, mut may_step: bool, events: &mut Vec<Event>) -> Result<bool, String> {
        let (mut moved, before) = (0, events.len());
        if self.paused && self.reader.incoming.has_room() {
            moved += self.to - self.from;
            self.take_in(id, events)?;
        }
        while self.readable
            && moved < TURN_BYTES
            && events.len() - before < TURN_EVENTS
            && self.reader.incoming.has_room()
        {
            if self.is_handshaking() && !std::mem::take(&mut may_step) {
                break;
            }
            match self.receive() {
                Ok(n) => {
                    moved += n;
                    self.received = true;
                    self.last_read = Some(now);
                    self.take_in(id, events)?;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::NotConnected => {
                    self.readable = false
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Err("the peer closed the connection".into()),
                Err(e) => return Err(format!("reading: {e}")),
            }
        }
        Ok(moved > 0)
    }

    /// Receives once: the rest of a write in clear goes directly to host memory, everything else to the inbox.
    fn receive(&mut self) -> std::io::Result<usize> {
        let bytes = if self.is_unsettled() { UNSETTLED_INBOX_BYTES } else { INBOX_BYTES };
        if self.inbox.len() < bytes {
            let mut larger = vec![0; bytes];
            larger[self.from..self.to].copy_from_slice(&self.inbox[self.from..self.to]);
            self.inbox = larger.into();
        }
        self.inbox.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        let clear = self.secured.is_none() || self.in_clear;
        if let Some((host, offset, len)) = self.reader.landing().filter(|_| clear && self.to == 0) {
            let n = host.receive_from(self.stream.as_fd(), offset, len, &mut self.inbox)?;
            self.reader.landed(n.min(len));
            self.to = n.saturating_sub(len);
            return Ok(n);
        }
        match (&self.stream).read(&mut self.inbox[self.to..])? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            n => {
                self.to += n;
                Ok(n)
            }
        }
    }

    /// Processes the complete parts of the inbox, as far as there is room for writes.
    fn take_in(&mut self, id: ConnId, events: &mut Vec<Event>) -> Result<(), String> {
        let mut arrived = Vec::new();
        self.paused = false;
        loop {
            let before = (self.from, self.kept);
            self.take_once(&mut arrived)?;
            // Before any message is accepted that came with the end of the handshake.
            self.prove(id, events)?;
            arrived.drain(..).try_for_each(|frame| self.act(id, frame, events))?;
            if self.from == self.to || (self.from, self.kept) == before {
                break;
            }
            if !self.reader.incoming.has_room() {
                self.paused = true;
                return Ok(());
            }
        }
        if self.to - self.from == self.inbox.len() {
            return Err("a record that is longer than any".into());
        }
        Ok(())
    }

    fn take_once(&mut self, arrived: &mut Vec<Arrived>) -> Result<(), String> {
        if self.from == self.to {
            return Ok(());
        }
        let (reader, bytes) = (&mut self.reader, &mut self.inbox[self.from..self.to]);
        let (is_between_frames, is_clear) = (reader.is_between_frames(), begins_clear(&bytes[self.kept..]));
        self.in_clear &= !is_between_frames;
        match &mut self.secured {
            // Whoever can add bytes to the stream must not complete what began in a record.
            Some(secured) if secured.proven && is_clear && !self.in_clear && (self.kept > 0 || !is_between_frames) => {
                return Err("bytes in clear where a record continues".into());
            }
            Some(secured) if !(self.in_clear || secured.proven && is_clear) => {
                // A pool elsewhere may have no room for the writes of a second record.
                let records = match self.pool.host() {
                    None if secured.proven => first_record(&bytes[self.kept..]),
                    _ => whole_records(&bytes[self.kept..]),
                };
                let complete = self.kept + records;
                // During the handshake there are only records: what is none is an error.
                let len = if secured.proven { complete } else { bytes.len() };
                let read = secured.session.read(&mut bytes[..len], &mut secured.outbox, |mut plain| {
                    while !plain.is_empty() {
                        arrived.extend(reader.take(&mut plain, false)?);
                    }
                    Ok(())
                });
                secured.failed |= read.is_err() && !self.heard;
                secured.broken |= read.is_err();
                let used = read?;
                self.from += used;
                self.kept = complete.saturating_sub(used);
                if used > 0 {
                    self.record_due = None;
                }
            }
            secured => {
                if secured.as_ref().is_some_and(|secured| !secured.clear) {
                    return Err("the peer sends KV in clear: set transfer.encrypt alike on all workers".into());
                }
                let (mut rest, only_puts) = (&*bytes, secured.is_some());
                self.in_clear = only_puts;
                while !rest.is_empty() && reader.incoming.has_room() {
                    arrived.extend(reader.take(&mut rest, only_puts)?);
                    if only_puts && reader.is_between_frames() {
                        break;
                    }
                }
                self.from = self.to - rest.len();
            }
        }
        Ok(())
    }

    /// Checks the peer's certificate, once the handshake is complete.
    fn prove(&mut self, id: ConnId, events: &mut Vec<Event>) -> Result<(), String> {
        if let Some(secured) = self.secured.as_mut().filter(|s| !s.proven && !s.session.is_handshaking()) {
            secured.failed = true;
            secured.session.check(&*secured.credentials)?;
            (secured.failed, secured.proven) = (false, true);
            secured.record = vec![0; RECORD_BYTES_MAX];
            if !std::mem::replace(&mut self.announced, true) {
                self.heard = true;
                events.push(Event::Accepted { conn: id, proven: true });
            }
        }
        Ok(())
    }

    fn act(&mut self, id: ConnId, frame: Arrived, events: &mut Vec<Event>) -> Result<(), String> {
        self.heard = true;
        match (frame, &mut self.lane_frames) {
            (Arrived::Message(bytes), _) => events.push(Event::Message(id, bytes)),
            (Arrived::Flushed(flush), _) => {
                self.writer.answered(flush)?;
                events.push(Event::Flushed(id, flush));
            }
            (Arrived::Refused, _) => events.push(Event::PutRefused(id)),
            (Arrived::Ping, _) => {}
            (Arrived::Attach(body), Some(lanes)) => lanes.push_back(LaneFrame::Attach(body)),
            (Arrived::Attach(_), None) => return Err("the peer speaks of lanes that this side does not have".into()),
            (Arrived::Flush { id, posted }, Some(lanes)) => lanes.push_back(LaneFrame::Flush { id, posted }),
            (Arrived::Flush { id, .. }, None) => self.reader.incoming.flush(id).map_err(|e| e.to_string())?,
        }
        Ok(())
    }

    /// The service was notified of this connection, and must be notified of its end.
    pub(super) fn was_announced(&self) -> bool {
        self.announced
    }

    /// Takes the operations that run on the pool; nothing is received or sent any more.
    pub(super) fn take_operations(&mut self) -> LastOperations {
        let fresh = Incoming::new(self.pool.clone());
        LastOperations::new(std::mem::replace(&mut self.reader.incoming, fresh), self.writer.take_reads())
    }

    /// Makes one attempt to send what was queued before the end, such as a refusal or an alert.
    pub(super) fn last_words(&mut self, id: ConnId) {
        self.writable = true;
        let _ = self.write(id, &mut Vec::new());
    }
}

fn begins_clear(bytes: &[u8]) -> bool {
    bytes.first().is_some_and(|&byte| begins_frame(byte) && !begins_record(byte))
}

/// Encrypts frames into records, as far as there is room for them and the peer is proven.
fn encrypt(
    secured: &mut Secured,
    writer: &mut FrameWriter,
    pool: &Pool,
    unread: &mut [u8],
    id: ConnId,
    events: &mut Vec<Event>,
) -> Result<(), String> {
    let kinds = if secured.clear { Kinds::AllButPuts } else { Kinds::All };
    while secured.proven && !secured.broken && secured.outbox.waiting().len() < OUTBOX_BYTES {
        let n = writer.copy(kinds, pool, &mut secured.record);
        if n == 0 {
            break;
        }
        secured.session.write(&secured.record[..n], unread, &mut secured.outbox)?;
        writer.went(n, |bytes| events.push(Event::PutDone(id, bytes)));
    }
    Ok(())
}
