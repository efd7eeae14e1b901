//! How bytes come into a peer's region: by UCX's puts where the lanes write by themselves, by messages of ours elsewhere.
//!
//! Over TCP UCX emulates a put: the peer's UCX stores it wherever it says and acknowledges it, and if this side's socket is reset by
//! then it aborts the peer's process (`ucp_request_try_send`). A message is not acknowledged, and the peer's progress thread stores it
//! only where a window is open: a late write finds the door closed. A flush is a message as well, which tells how many writes were
//! posted before it and is answered once that many have come, in whatever order.

use super::header::Kind;
use super::{Purpose, Ucx, lanes};
use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::transport::windows::Windows;
use crate::transport::{ConnId, Event};
use crate::ucx::{Landing, RemoteKey};
use crate::{Region, UcxWrites};
use baton_types::{PoolMemory, TicketId};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Largest write that goes as one message. Well within a segment of TCP lanes (`TCP_SEGMENTS`), since UCX would put a message of several
/// together in a buffer of its own.
const MESSAGE_BYTES_MAX: usize = 128 << 10;
/// Flushes of one peer that may wait for writes. A service has one under way at a time.
const FLUSHES_MAX: usize = 16;

/// How one side of a connection writes, and what came of the other's.
pub(super) struct Writing {
    /// The peer's region, for puts: its key on this endpoint, and where it begins over there.
    key: Option<(RemoteKey, u64)>,
    /// The peer's region is known.
    ready: bool,
    /// Writes posted as messages.
    posted: u64,
    pub(super) door: Rc<Door>,
    /// Writes of the peer that were seen to come.
    seen: u64,
    /// Flushes that the peer asked for, with the number of writes that each waits for.
    flushes: Vec<(u64, u64)>,
}

impl Writing {
    pub(super) fn new(door: Rc<Door>) -> Self {
        Self { key: None, ready: false, posted: 0, door, seen: 0, flushes: Vec::new() }
    }

    /// Whether this side writes and reads the peer's region by itself.
    pub(super) fn is_one_sided(&self) -> bool {
        self.key.is_some()
    }
}

/// What stores the peer's messages, if a window is open for them.
pub(super) struct Door {
    region: Arc<Region>,
    pub(super) windows: RefCell<Windows>,
    /// Writes that came, stored or not.
    came: Cell<u64>,
    refused: Cell<u64>,
    /// Something came that no correct peer sends.
    broken: Cell<bool>,
}

impl Door {
    pub(super) fn new(region: Arc<Region>) -> Rc<Self> {
        let (windows, came, refused, broken) = Default::default();
        Rc::new(Self { region, windows, came, refused, broken })
    }
}

impl Landing for Door {
    fn land(&self, header: &[u8], bytes: &[u8]) {
        let place =
            decode(header).and_then(|(ticket, offset)| Some((ticket, offset..offset.checked_add(bytes.len())?)));
        match place.filter(|(_, range)| self.region.contains(range)) {
            Some((ticket, range)) if self.windows.borrow().allow(ticket, &range) => {
                self.region.write(range.start, bytes)
            }
            Some(_) => self.refused.set(self.refused.get() + 1),
            None => self.broken.set(true),
        }
        self.came.set(self.came.get() + 1);
    }
}

/// Ticket and offset in the sink's region.
fn encode(ticket: TicketId, offset: usize) -> [u8; 16] {
    let mut header = [0; 16];
    header[..8].copy_from_slice(&ticket.0.to_le_bytes());
    header[8..].copy_from_slice(&(offset as u64).to_le_bytes());
    header
}

fn decode(header: &[u8]) -> Option<(TicketId, usize)> {
    let ([ticket, offset], []) = header.as_chunks::<8>() else { return None };
    Some((TicketId(u64::from_le_bytes(*ticket)), usize::try_from(u64::from_le_bytes(*offset)).ok()?))
}

impl Ucx {
    /// The peer told where its region is: from now on it can be written.
    pub(super) fn aim(&mut self, conn: ConnId, region: &RemoteRegion) -> Result<(), String> {
        let Some(connection) = self.connections.get_mut(&conn).filter(|c| !c.forced) else { return Ok(()) };
        let endpoint = connection.endpoint.as_ref().ok_or("it is not wired up")?;
        if self.writes == UcxWrites::OneSided || lanes::write_by_themselves(&endpoint.lanes()) {
            let key = endpoint.unpack(&region.key).map_err(|e| e.to_string())?;
            connection.writing.key = Some((key, region.address));
        }
        connection.writing.ready = true;
        Ok(())
    }

    pub(super) fn write(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        let usable = self.connections.get(&conn).is_some_and(|c| c.closing.is_none() && c.writing.ready);
        let Some(memory) = self.memory.clone().filter(|_| usable) else { return };
        let piece_max = if self.connections[&conn].writing.is_one_sided() { run.len } else { MESSAGE_BYTES_MAX };
        for at in (0..run.len).step_by(piece_max.max(1)) {
            let (from, to, len) = (run.from + at, run.to + at, piece_max.min(run.len - at));
            let token = self.begin(conn, Purpose::Put(len));
            let Some(connection) = self.connections.get_mut(&conn) else { return };
            let (Some(endpoint), writing) = (&connection.endpoint, &mut connection.writing) else { return };
            match &writing.key {
                Some((key, base)) => endpoint.put(token, &memory, from, len, base + to as u64, key),
                None => {
                    writing.posted += 1;
                    endpoint.send_region(token, &encode(ticket, to), &memory, from, len);
                }
            }
        }
    }

    pub(super) fn read(&mut self, conn: ConnId, number: u64, run: CopyRun) {
        let usable = self.connections.get(&conn).is_some_and(|c| c.closing.is_none() && c.writing.is_one_sided());
        let Some(memory) = self.memory.clone().filter(|_| usable) else { return };
        let token = self.begin(conn, Purpose::Get(number, run.len));
        let Some(connection) = self.connections.get(&conn) else { return };
        if let (Some(endpoint), Some((key, base))) = (&connection.endpoint, &connection.writing.key) {
            endpoint.get(token, &memory, run.to, run.len, base + run.from as u64, key);
        }
    }

    pub(super) fn flush_writes(&mut self, conn: ConnId, id: u64) {
        let Some(connection) = self.connections.get(&conn).filter(|c| c.closing.is_none()) else { return };
        if connection.writing.is_one_sided() {
            self.on_endpoint(conn, Purpose::Flush(id), |endpoint, token| endpoint.flush(token));
        } else {
            let posted = connection.writing.posted.to_le_bytes().to_vec();
            self.post_numbered(conn, Kind::Flush, id, posted);
        }
    }

    /// The peer asks to be told once so many of its writes have come.
    pub(super) fn flush_asked(&mut self, conn: ConnId, id: u64, posted: &[u8], now: Instant) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        match <[u8; 8]>::try_from(posted) {
            Ok(posted) if connection.writing.flushes.len() < FLUSHES_MAX => {
                connection.writing.flushes.push((id, u64::from_le_bytes(posted)));
            }
            _ => self.begin_close(conn, "a flush that no peer asks for", now),
        }
    }

    /// Looks at what came through the door.
    pub(super) fn look_at_door(&mut self, conn: ConnId, now: Instant, events: &mut Vec<Event>) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let writing = &mut connection.writing;
        let came = writing.door.came.get();
        events.extend((0..writing.door.refused.take()).map(|_| Event::PutRefused(conn)));
        let done: Vec<u64> = writing.flushes.extract_if(.., |(_, posted)| *posted <= came).map(|(id, _)| id).collect();
        if std::mem::replace(&mut writing.seen, came) != came {
            connection.heard(now);
        }
        if connection.writing.door.broken.take() {
            self.begin_close(conn, "a write outside of the region", now);
        }
        done.into_iter().for_each(|id| self.post_numbered(conn, Kind::Flushed, id, Vec::new()));
    }
}
