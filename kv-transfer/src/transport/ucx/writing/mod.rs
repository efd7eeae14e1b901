//! How bytes reach a peer's pool: by UCX puts where the path allows them on these lanes ([`super::data_path`]) and both pools are
//! registered, by our own messages elsewhere. Bytes of a pool that is not in host memory pass through buffers on the way out and in
//! ([`crate::transport::pool`]).
//!
//! Over TCP, UCX emulates a put: the peer's UCX stores it at the address it names and acknowledges it. If this side's socket is reset by
//! then, UCX aborts the peer's process (`ucp_request_try_send`). A message is not acknowledged, and the peer's progress thread stores it
//! only where a window is open, so a late write is dropped. A flush goes over the control channel. It states how many writes were posted
//! before it, and is answered once that many have come, in any order.

use super::connection::Connection;
use super::data_path::DataPath;
use super::pulling::{Pull, Pulls};
use super::{Purpose, Ucx};
use crate::UcxWrites;
use crate::message::RemoteRegion;
use crate::plan::CopyRun;
use crate::transport::incoming::{Ended, Incoming, Pulling, StoreError};
use crate::transport::last_operations::LastOperations;
use crate::transport::outgoing::{Outgoing, Progress, Staged};
use crate::transport::pool::{Pool, STAGE_BYTES};
use crate::transport::windows::Windows;
use crate::transport::{ConnId, Event};
use crate::ucx::{Endpoint, HEADER_BYTES_MAX, KeyHead, Landing, RemoteKey, Token as Operation};
use baton_memory::Pending;
use baton_types::TicketId;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

/// Largest write sent as one message. Well within a segment of TCP lanes (`TCP_SEGMENTS`), because UCX would reassemble a message of
/// several segments in its own buffer.
const MESSAGE_BYTES_MAX: usize = 128 << 10;
/// Most flushes of one peer that wait for writes. A service has at most one in progress.
const FLUSHES_MAX: usize = 16;

/// A secret that a side sends only to the peer of one connection: writes without it come from another connection.
pub(super) type Nonce = [u8; NONCE_BYTES];
pub(super) const NONCE_BYTES: usize = 16;
const HEADER_BYTES: usize = NONCE_BYTES + 16;
const _: () = assert!(HEADER_BYTES <= HEADER_BYTES_MAX && MESSAGE_BYTES_MAX <= STAGE_BYTES);

/// How one side of a connection writes, and the state of the other side's writes.
pub(super) struct Writing {
    /// The peer's region, for puts and gets: its key on this endpoint, and its address at the peer.
    pub(super) key: Option<(RemoteKey, u64)>,
    /// Bytes of the peer's region.
    region_bytes: u64,
    /// This side writes the peer's region by UCX's puts.
    pub(super) puts: bool,
    /// This side reads the peer's region by UCX's gets.
    pub(super) gets: bool,
    pub(super) pulls: Pulls,
    /// The nonce that the peer requires in writes to it.
    nonce: Nonce,
    /// The peer's region is known.
    ready: bool,
    /// Writes posted as messages; each has the number of those before it.
    posted: u64,
    /// Those that have not ended: they may still read the pool.
    sending: BTreeSet<u64>,
    /// Flushes that the peer is to answer.
    asked: Vec<AskedFlush>,
    /// Writes that wait for their bytes.
    staged: VecDeque<StagedWrite>,
    /// Reads that run though nothing is sent any more.
    reads: Vec<Pending<Vec<u8>>>,
    outgoing: Outgoing,
    pub(super) door: Rc<WriteWindows>,
    /// Flushes that the peer requested, with the number of writes that each waits for.
    flushes: Vec<(u64, u64)>,
}

/// A flush that the peer is to answer, once this many writes have come.
struct AskedFlush {
    id: u64,
    posted: u64,
    answered: bool,
}

/// A write from a pool that is not in host memory.
struct StagedWrite {
    token: Operation,
    ticket: TicketId,
    to: usize,
    staged: Staged,
}

impl Writing {
    pub(super) fn new(door: Rc<WriteWindows>) -> Self {
        Self {
            key: None,
            region_bytes: 0,
            puts: false,
            gets: false,
            pulls: Pulls::default(),
            nonce: [0; NONCE_BYTES],
            ready: false,
            posted: 0,
            sending: BTreeSet::new(),
            asked: Vec::new(),
            staged: VecDeque::new(),
            reads: Vec::new(),
            outgoing: Outgoing::default(),
            door,
            flushes: Vec::new(),
        }
    }

    /// Stores nothing more, and sends nothing more. Returns the operations that have not begun.
    pub(super) fn shut(&mut self) -> Vec<Operation> {
        self.door.shut.set(true);
        self.pulls.shut();
        let (tokens, staged): (Vec<_>, Vec<_>) = self.staged.drain(..).map(|write| (write.token, write.staged)).unzip();
        self.reads.extend(staged.into_iter().filter_map(Staged::into_read));
        tokens
    }

    /// Whether the pool's device works for a connection that was shut.
    pub(super) fn is_draining(&mut self) -> bool {
        self.reads.retain_mut(|read| read.poll_or_wake(self.door.pool.waker()).is_none());
        !self.reads.is_empty() || !self.door.incoming.borrow_mut().has_ended()
    }

    /// Takes what the device still does for a connection whose worker is destroyed.
    pub(super) fn take_operations(&mut self) -> LastOperations {
        let fresh = Incoming::new(self.door.pool.clone());
        LastOperations::new(self.door.incoming.replace(fresh), std::mem::take(&mut self.reads))
    }

    fn advance(&mut self, pool: &Pool, endpoint: &Endpoint, now: Instant) -> Result<(), String> {
        for write in &mut self.staged {
            if self.outgoing.advance(pool, &mut write.staged, now)? == Progress::NoRoom {
                break;
            }
        }
        while let Some(StagedWrite { token, ticket, to, staged }) =
            self.staged.pop_front_if(|write| write.staged.bytes().is_some())
        {
            // UCX has the buffer until the operation ends.
            endpoint.send(token, &encode(&self.nonce, ticket, to), staged.into_bytes());
        }
        Ok(())
    }

    /// Begins a write as a message, or as one that the peer reads.
    fn number(&mut self) -> u64 {
        let number = self.posted;
        self.posted += 1;
        self.sending.insert(number);
        number
    }

    /// A write that was sent as a message, or that the peer reads, has ended.
    pub(super) fn sent(&mut self, number: u64) {
        self.sending.remove(&number);
    }

    /// A message of so many bytes has ended, and with it its buffer, where it had one.
    pub(super) fn freed(&mut self, len: usize) {
        if self.door.pool.host().is_none() {
            self.outgoing.freed(len);
        }
    }

    /// The peer answers a flush.
    pub(super) fn answered(&mut self, id: u64) {
        self.asked.iter_mut().filter(|flush| flush.id == id).for_each(|flush| flush.answered = true);
    }

    /// Takes the flushes that are answered and whose writes have ended here. A peer may answer before it has received anything.
    pub(super) fn take_flushed(&mut self) -> Vec<u64> {
        let first = self.sending.first().copied().unwrap_or(u64::MAX);
        self.asked.extract_if(.., |flush| flush.answered && flush.posted <= first).map(|flush| flush.id).collect()
    }

    /// Sets the nonce that the peer requires.
    pub(super) fn name(&mut self, nonce: Nonce) {
        self.nonce = nonce;
    }

    /// Address of a range of the peer's region; `None` if it leaves it.
    pub(super) fn remote_address(&self, offset: usize, len: usize) -> Option<u64> {
        let (_, base) = self.key.as_ref()?;
        let end = (offset as u64).checked_add(len as u64)?;
        (end <= self.region_bytes).then(|| base.checked_add(offset as u64))?
    }
}

/// Stores the peer's messages for which a window is open.
pub(super) struct WriteWindows {
    pool: Pool,
    /// The writes that came, and those that are being stored in memory that is not the host's.
    incoming: RefCell<Incoming>,
    nonce: Nonce,
    pub(super) windows: RefCell<Windows>,
    refused: Cell<u64>,
    /// Why no correct peer sends a message that came.
    broken: Cell<Option<&'static str>>,
    /// The connection ends.
    shut: Cell<bool>,
}

impl WriteWindows {
    pub(super) fn new(pool: Pool, nonce: Nonce) -> Rc<Self> {
        let (windows, refused, broken, shut) = Default::default();
        let incoming = RefCell::new(Incoming::new(pool.clone()));
        Rc::new(Self { pool, incoming, nonce, windows, refused, broken, shut })
    }

    /// Whether there is room for more writes.
    pub(super) fn has_room(&self) -> bool {
        self.incoming.borrow().has_room()
    }

    /// Begins to store nothing more under this ticket, except where a test `leaves_open` its window.
    pub(super) fn close_window(&self, ticket: TicketId, leaves_open: bool) {
        if !leaves_open {
            self.windows.borrow_mut().close(ticket);
        }
        self.incoming.borrow_mut().close_window(ticket);
    }

    /// Whether the peer may write this range under this ticket. Counts it as refused if not.
    pub(super) fn admits(&self, ticket: TicketId, range: &Range<usize>) -> bool {
        let allowed = self.windows.borrow().allow(ticket, range) && !self.shut.get();
        self.refused.set(self.refused.get() + u64::from(!allowed));
        allowed
    }

    /// A write of the peer that this side carries out, of so many bytes.
    pub(super) fn follow(&self, write: Pending<()>, bytes: usize) {
        self.incoming.borrow_mut().follow(write, bytes);
    }

    /// Those that have not ended.
    pub(super) fn pulls(&self) -> Pulling {
        self.incoming.borrow().pulls()
    }

    /// Number of those that have ended, with all writes before them.
    pub(super) fn pulled(&self) -> u64 {
        self.incoming.borrow().pulled()
    }

    /// Takes what is stored. Returns the closed windows that waited for it. An error closes the connection.
    fn advance(&self, now: Instant) -> Result<Vec<Ended>, StoreError> {
        self.incoming.borrow_mut().advance(now)
    }

    /// Number of writes that came and are stored, or were refused, with all those that came before them.
    fn stored(&self) -> u64 {
        self.incoming.borrow().stored()
    }

    fn store(&self, offset: usize, bytes: &[u8]) {
        let mut incoming = self.incoming.borrow_mut();
        if let Some(host) = self.pool.host() {
            host.copy_in(offset, bytes);
            return incoming.is_over();
        }
        if bytes.is_empty() {
            return incoming.is_over();
        }
        let mut buffer = incoming.buffer();
        buffer.extend_from_slice(bytes);
        incoming.store(offset, buffer);
    }
}

impl Landing for WriteWindows {
    fn land(&self, header: &[u8], bytes: &[u8]) {
        // It would wait behind them, and fill the room without which the worker does not progress: the reads would never end.
        if self.incoming.borrow().pulls().count > 0 {
            return self.broken.set(Some("the peer writes by messages among the reads that it asks for"));
        }
        let place = decode(&self.nonce, header)
            .and_then(|(ticket, offset)| Some((ticket, offset..offset.checked_add(bytes.len())?)));
        match place.filter(|(_, range)| self.pool.contains(range)) {
            Some((ticket, range)) if self.admits(ticket, &range) => return self.store(range.start, bytes),
            Some(_) => {}
            None => self.broken.set(Some("a write outside of the region")),
        }
        self.incoming.borrow_mut().is_over();
    }
}

/// Encodes the connection's nonce, the ticket and the offset in the sink's region.
fn encode(nonce: &Nonce, ticket: TicketId, offset: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..NONCE_BYTES].copy_from_slice(nonce);
    header[NONCE_BYTES..NONCE_BYTES + 8].copy_from_slice(&ticket.0.to_le_bytes());
    header[NONCE_BYTES + 8..].copy_from_slice(&(offset as u64).to_le_bytes());
    header
}

/// `None` if the header names another connection.
fn decode(nonce: &Nonce, header: &[u8]) -> Option<(TicketId, usize)> {
    let ([ticket, offset], []) = header.strip_prefix(&nonce[..])?.as_chunks::<8>() else { return None };
    Some((TicketId(u64::from_le_bytes(*ticket)), usize::try_from(u64::from_le_bytes(*offset)).ok()?))
}

impl Ucx {
    /// The peer sent the address of its region: from now on it can be written.
    pub(super) fn aim(&mut self, conn: ConnId, region: &RemoteRegion) -> Result<(), String> {
        let Some(connection) = self.connections.live_mut(conn) else { return Ok(()) };
        if region.address.checked_add(region.bytes).is_none() {
            return Err("it goes beyond the end of memory".into());
        }
        let lanes = connection.lanes.as_mut().ok_or("it has no lanes")?;
        let endpoint = lanes.endpoint.as_ref().ok_or("it is not wired up")?;
        // Nobody puts into memory of a device over another lane than `rc`.
        let is_of_host = KeyHead::of(&region.key).is_some_and(KeyHead::is_of_host);
        let (names, both_registered) = (endpoint.lanes(), self.memory.is_some() && !region.key.is_empty());
        let (puts, gets) = match self.writes {
            UcxWrites::OneSided => (true, true),
            UcxWrites::Read => (false, true),
            UcxWrites::ByLanes => {
                let into_it = is_of_host || DataPath::DirectPuts.puts_over(&names);
                (into_it && self.path.puts_over(&names), self.path.gets_over(&names))
            }
        };
        let writing = &mut lanes.writing;
        (writing.puts, writing.gets) = (both_registered && puts && !region.reads_only, both_registered && gets);
        if writing.puts || writing.gets {
            let key = endpoint.unpack(&region.key).map_err(|e| e.to_string())?;
            writing.key = Some((key, region.address));
        }
        (writing.region_bytes, writing.ready) = (region.bytes, true);
        if region.takes_reads {
            self.offer_reads(conn, region.reads_only);
        }
        Ok(())
    }

    /// The writing state of a connection, while it is open.
    fn open_writing(&self, conn: ConnId) -> Option<&Writing> {
        self.connections.live(conn).and_then(Connection::writing)
    }

    pub(super) fn write(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        let Some(writing) = self.open_writing(conn).filter(|w| w.ready) else { return };
        let one_sided = writing.puts;
        if !one_sided && writing.pulls.peer_reads {
            if let Some(writing) = self.connections.writing_mut(conn) {
                let number = writing.number();
                writing.pulls.push(number, Pull { ticket, run });
            }
            return;
        }
        let memory = self.memory.clone();
        let piece_max = if one_sided { run.len } else { MESSAGE_BYTES_MAX };
        for at in (0..run.len).step_by(piece_max.max(1)) {
            let (from, to, len) = (run.from + at, run.to + at, piece_max.min(run.len - at));
            let writing = self.connections.writing_mut(conn);
            let number = writing.filter(|_| !one_sided).map(Writing::number);
            let token = self.begin(conn, Purpose::Put { len, number });
            let Some(lanes) = self.connections.get_mut(&conn).and_then(|c| c.lanes.as_mut()) else { return };
            let (Some(endpoint), writing) = (&lanes.endpoint, &mut lanes.writing) else { return };
            match (&writing.key, &memory) {
                (Some((key, base)), Some(memory)) if one_sided => {
                    endpoint.put(token, memory, from, len, base + to as u64, key);
                }
                (_, Some(memory)) if self.pool.host().is_some() => {
                    endpoint.send_region(token, &encode(&writing.nonce, ticket, to), memory, from, len);
                }
                _ => {
                    writing.staged.push_back(StagedWrite { token, ticket, to, staged: Staged::new(from, len) });
                }
            }
        }
    }

    /// Sends the writes whose bytes were read, and reads those of the next.
    pub(super) fn post_staged(&mut self, conn: ConnId, now: Instant) {
        let Some(lanes) = self.connections.live_mut(conn).and_then(|c| c.lanes.as_mut()) else { return };
        let (Some(endpoint), writing) = (&lanes.endpoint, &mut lanes.writing) else { return };
        if let Err(reason) = writing.advance(&self.pool, endpoint, now) {
            self.force_close(conn, &reason, now);
        }
    }

    pub(super) fn read(&mut self, conn: ConnId, number: u64, run: CopyRun) {
        let usable = self.open_writing(conn).is_some_and(|writing| writing.gets);
        let Some(memory) = self.memory.clone().filter(|_| usable) else { return };
        let token = self.begin(conn, Purpose::Get(number, run.len));
        let Some(lanes) = self.connections.get(&conn).and_then(|c| c.lanes.as_ref()) else { return };
        if let (Some(endpoint), Some((key, base))) = (&lanes.endpoint, &lanes.writing.key) {
            endpoint.get(token, &memory, run.to, run.len, base + run.from as u64, key);
        }
    }

    pub(super) fn flush_writes(&mut self, conn: ConnId, id: u64) {
        match self.open_writing(conn).map(|writing| (writing.puts, writing.posted)) {
            Some((true, _)) => self.on_endpoint(conn, Purpose::Flush(id), |endpoint, token| endpoint.flush(token)),
            Some((false, posted)) => {
                self.channel.flush_lanes(conn, id, posted);
                if let Some(writing) = self.connections.writing_mut(conn) {
                    writing.asked.push(AskedFlush { id, posted, answered: false });
                }
            }
            None => {}
        }
    }

    /// The peer requests an answer once this many of its writes have come.
    pub(super) fn flush_asked(&mut self, conn: ConnId, id: u64, posted: u64) -> Result<(), String> {
        let Some(connection) = self.connections.live_mut(conn) else { return Ok(()) };
        match connection.writing_mut() {
            Some(writing) if writing.flushes.len() < FLUSHES_MAX => {
                writing.flushes.push((id, posted));
                Ok(())
            }
            _ => Err("a flush that no peer asks for".into()),
        }
    }

    /// Checks which writes came in as messages, and answers flushes. Returns whether there is room for writes again.
    pub(super) fn look_at_door(&mut self, conn: ConnId, now: Instant, events: &mut Vec<Event>) -> bool {
        let Some(connection) = self.connections.get_mut(&conn) else { return false };
        let is_live = connection.is_live();
        let Some(writing) = connection.writing_mut() else { return false };
        events.extend((0..writing.door.refused.take()).map(|_| Event::PutRefused(conn)));
        if let Some(reason) = writing.door.broken.take() {
            self.force_close(conn, reason, now);
            return false;
        }
        let had_room = writing.door.has_room();
        let ended = match writing.door.advance(now) {
            Ok(ended) => ended,
            Err(error) => {
                self.force_close(conn, &error.to_string(), now);
                return false;
            }
        };
        events.extend(ended.into_iter().filter_map(|ended| match ended {
            Ended::Window(ticket) => Some(Event::WindowClosed(conn, ticket)),
            Ended::Flush(_) => None, // Flushes of lanes count writes, see below.
        }));
        let stored = writing.door.stored();
        // The peer of a connection that ends is told nothing more.
        let is_done = |(_, posted): &mut (u64, u64)| *posted <= stored && is_live;
        let done: Vec<u64> = writing.flushes.extract_if(.., is_done).map(|(id, _)| id).collect();
        let has_room = writing.door.has_room();
        done.into_iter().for_each(|id| self.channel.flushed_lanes(conn, id));
        !had_room && has_room
    }
}

#[cfg(test)]
pub(super) mod flush_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_does_not_name_the_connection_is_none() {
        let (mine, other) = ([7; NONCE_BYTES], [8; NONCE_BYTES]);
        let header = encode(&mine, TicketId(1), 2);
        assert_eq!(decode(&mine, &header), Some((TicketId(1), 2)));
        assert_eq!(decode(&other, &header), None);
        assert_eq!(decode(&mine, &header[NONCE_BYTES..]), None);
        assert_eq!(decode(&mine, &[&header[..], &[0]].concat()), None);
    }
}
