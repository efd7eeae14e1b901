//! One socket: what waits to be written, and the frame that is being read.

use super::frame::{HEAD_BYTES, Head};
use crate::Region;
use crate::plan::CopyRun;
use crate::transport::windows::Windows;
use crate::transport::{ConnId, Event};
use baton_types::TicketId;
use mio::net::TcpStream;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes moved on one socket before others get their turn.
const TURN_BYTES: usize = 1 << 20;
/// Control bytes that may wait for a peer that does not read.
const QUEUED_MESSAGE_BYTES_MAX: usize = 128 << 20;

/// Something to be written: a head, and a body of our own or one in the region.
struct Out {
    head: [u8; HEAD_BYTES],
    body: Body,
    written: usize,
}

enum Body {
    Own(Vec<u8>),
    Region(CopyRun),
}

impl Out {
    fn len(&self) -> usize {
        HEAD_BYTES
            + match &self.body {
                Body::Own(bytes) => bytes.len(),
                Body::Region(run) => run.len,
            }
    }
}

/// The frame whose body is arriving.
enum In {
    Head {
        bytes: [u8; HEAD_BYTES],
        filled: usize,
    },
    Message {
        bytes: Vec<u8>,
        len: usize,
    },
    /// Stored at `offset` while the ticket's window is open, dropped otherwise.
    Put {
        ticket: TicketId,
        offset: usize,
        left: usize,
        store: bool,
    },
}

const NO_HEAD: In = In::Head { bytes: [0; HEAD_BYTES], filled: 0 };

pub(super) struct Connection {
    stream: TcpStream,
    region: Arc<Region>,
    pub(super) readable: bool,
    pub(super) writable: bool,
    queue: VecDeque<Out>,
    queued_message_bytes: usize,
    reading: In,
    /// Ranges that the peer may write, by ticket.
    pub(super) windows: Windows,
    scratch: Vec<u8>,
    last_read: Option<Instant>,
    last_ping: Option<Instant>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, region: Arc<Region>) -> Self {
        Self {
            stream,
            region,
            readable: false,
            writable: false,
            queue: VecDeque::new(),
            queued_message_bytes: 0,
            reading: NO_HEAD,
            windows: Windows::default(),
            scratch: Vec::new(),
            last_read: None,
            last_ping: None,
        }
    }

    fn queue(&mut self, head: Head, body: Body) {
        self.queue.push_back(Out { head: head.encode(), body, written: 0 });
    }

    pub(super) fn queue_message(&mut self, message: Vec<u8>) {
        self.queued_message_bytes += message.len();
        self.queue(Head::Message { len: message.len() }, Body::Own(message));
    }

    pub(super) fn queue_put(&mut self, ticket: TicketId, run: CopyRun) {
        let head = Head::Put { ticket: ticket.0, offset: run.to as u64, len: run.len };
        self.queue(head, Body::Region(run));
    }

    pub(super) fn queue_flush(&mut self, id: u64) {
        self.queue(Head::Flush { id }, Body::Own(Vec::new()));
    }

    /// Nothing more is stored under this ticket, not even the rest of a write that has begun.
    pub(super) fn close_window(&mut self, closed: TicketId) {
        self.windows.close(closed);
        if let In::Put { ticket, store, .. } = &mut self.reading {
            *store &= *ticket != closed;
        }
    }

    /// Reads and writes what it can; an error says why the connection is over.
    pub(super) fn progress(
        &mut self,
        id: ConnId,
        now: Instant,
        silent_max: Duration,
        events: &mut Vec<Event>,
    ) -> Result<bool, String> {
        let read = self.readable && self.read(id, now, events)?;
        let last_read = *self.last_read.get_or_insert(now);
        if now - last_read > silent_max {
            return Err(format!("nothing came for {} ms", silent_max.as_millis()));
        }
        if now - *self.last_ping.get_or_insert(now) > silent_max / 4 {
            self.last_ping = Some(now);
            self.queue(Head::Ping, Body::Own(Vec::new()));
        }
        if self.queued_message_bytes > QUEUED_MESSAGE_BYTES_MAX {
            return Err("the peer does not read its messages".into());
        }
        Ok(self.write(id, events)? || read)
    }

    pub(super) fn write(&mut self, id: ConnId, events: &mut Vec<Event>) -> Result<bool, String> {
        let mut moved = 0;
        while self.writable && moved < TURN_BYTES {
            let Some(out) = self.queue.front_mut() else { break };
            let head = &out.head[out.written.min(HEAD_BYTES)..];
            let body_at = out.written.saturating_sub(HEAD_BYTES);
            let result = match &out.body {
                Body::Own(bytes) if head.is_empty() => (&self.stream).write(&bytes[body_at..]),
                Body::Own(bytes) if bytes.is_empty() => (&self.stream).write(head),
                Body::Own(bytes) => {
                    let parts = [std::io::IoSlice::new(head), std::io::IoSlice::new(&bytes[body_at..])];
                    (&self.stream).write_vectored(&parts)
                }
                Body::Region(run) => {
                    self.region.send_to(self.stream.as_fd(), head, run.from + body_at, run.len - body_at)
                }
            };
            match result {
                Ok(0) => return Err("the socket takes no bytes".into()),
                Ok(n) => {
                    out.written += n;
                    moved += n;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::NotConnected => {
                    self.writable = false
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(format!("writing: {e}")),
            }
            if self.queue.front().is_some_and(|out| out.written == out.len()) {
                match self.queue.pop_front().map(|out| out.body) {
                    Some(Body::Region(run)) => events.push(Event::PutDone(id, run.len)),
                    Some(Body::Own(bytes)) => self.queued_message_bytes -= bytes.len(),
                    None => {}
                }
            }
        }
        Ok(moved > 0)
    }

    fn read(&mut self, id: ConnId, now: Instant, events: &mut Vec<Event>) -> Result<bool, String> {
        let mut moved = 0;
        while self.readable && moved < TURN_BYTES {
            match self.read_some() {
                Ok(n) => moved += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::NotConnected => {
                    self.readable = false
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Err("the peer closed the connection".into()),
                Err(e) => return Err(format!("reading: {e}")),
            }
            self.take_frame(id, events)?;
        }
        if moved > 0 {
            self.last_read = Some(now);
        }
        Ok(moved > 0)
    }

    /// One system call towards completing the frame at hand.
    fn read_some(&mut self) -> std::io::Result<usize> {
        let at_least_one = |n: usize| if n == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(n) };
        match &mut self.reading {
            In::Head { bytes, filled } => {
                let n = at_least_one((&self.stream).read(&mut bytes[*filled..])?)?;
                *filled += n;
                Ok(n)
            }
            In::Message { bytes, len } => {
                // Grows with what arrives: a head alone reserves nothing.
                let at = bytes.len();
                bytes.resize((*len).min(at + TURN_BYTES), 0);
                let result = (&self.stream).read(&mut bytes[at..]).and_then(at_least_one);
                bytes.truncate(at + *result.as_ref().unwrap_or(&0));
                result
            }
            In::Put { offset, left, store: true, .. } => {
                let n = self.region.receive_from(self.stream.as_fd(), *offset, *left)?;
                *offset += n;
                *left -= n;
                Ok(n)
            }
            In::Put { left, store: false, .. } => {
                self.scratch.resize(64 << 10, 0);
                let part = self.scratch.len().min(*left);
                let n = at_least_one((&self.stream).read(&mut self.scratch[..part])?)?;
                *left -= n;
                Ok(n)
            }
        }
    }

    /// Acts on the frame at hand once it is complete.
    fn take_frame(&mut self, id: ConnId, events: &mut Vec<Event>) -> Result<(), String> {
        match &mut self.reading {
            In::Head { bytes, filled: HEAD_BYTES } => {
                let head = Head::decode(bytes)?;
                self.reading = NO_HEAD;
                match head {
                    Head::Message { len } => self.reading = In::Message { bytes: Vec::new(), len },
                    Head::Put { ticket, offset, len } => self.begin_put(id, TicketId(ticket), offset, len, events)?,
                    Head::Flush { id } => self.queue(Head::Flushed { id }, Body::Own(Vec::new())),
                    Head::Flushed { id: flush } => events.push(Event::Flushed(id, flush)),
                    Head::Ping => {}
                }
            }
            In::Message { bytes, len } if bytes.len() == *len => {
                events.push(Event::Message(id, std::mem::take(bytes)));
                self.reading = NO_HEAD;
            }
            In::Put { left: 0, .. } => self.reading = NO_HEAD,
            _ => {}
        }
        Ok(())
    }

    /// A write outside of the region breaks the protocol. One that no open window covers may be late, and is dropped.
    fn begin_put(
        &mut self,
        id: ConnId,
        ticket: TicketId,
        offset: u64,
        len: usize,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let offset = usize::try_from(offset).map_err(|_| "a write outside of the region")?;
        let range = offset..offset.checked_add(len).ok_or("a write outside of the region")?;
        if !self.region.contains(&range) {
            return Err("a write outside of the region".into());
        }
        let granted = self.windows.allow(ticket, &range);
        if !granted {
            events.push(Event::PutRefused(id));
        }
        self.reading = In::Put { ticket, offset, left: len, store: granted };
        Ok(())
    }
}
