//! Writes of one peer on their way into memory that is not the host's, within fixed bounds, and what waits for those before it.

use super::pool::{Pool, STAGED_BYTES_MAX, STAGED_OPERATIONS_MAX, keep};
use crate::pool_turns::{OPERATION_MAX, PLACE_MAX};
use baton_memory::{MemoryError, Pending, Rows};
use baton_types::TicketId;
use std::collections::VecDeque;
use std::time::Instant;

/// Most flushes of one peer that wait for writes. A service has at most one in progress on each connection.
const FLUSHES_MAX: usize = 64;
/// Most writes that are being stored before the connection is broken. A transport stops reading at [`STAGED_OPERATIONS_MAX`]; what it still
/// delivers after that is one record of TLS or one round of UCX's progress: a segment of 256 KiB with messages of 48 bytes or more.
const WRITES_MAX: usize = 16 << 10;

/// Why writes of a peer are not stored, or no longer. The connection is closed for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreError {
    #[error("cannot write the pool: {0}")]
    Failed(MemoryError),
    #[error("cannot read the pool of the source: {0}")]
    Unread(String),
    #[error("the pool's device is busy: it has no room for a write")]
    Busy,
    #[error("the pool's device does not answer a write")]
    Late,
    #[error("the peer asks for flushes and does not wait for the answers")]
    Flushes,
    #[error("more than {WRITES_MAX} writes of the peer are being stored")]
    Writes,
}

/// What waited for the writes before it, which are all stored now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// A flush is to be answered.
    Flush(u64),
    /// Nothing is on its way under a ticket whose window was closed.
    Window(TicketId),
}

/// Writes of one peer on their way into the pool, in the order of their arrival, with flushes and closed windows that wait for those before
/// them. Writes into host memory end at once and are only counted.
pub(super) struct Incoming {
    pool: Pool,
    queue: VecDeque<Entry>,
    bytes: usize,
    writes: usize,
    flushes: usize,
    stored: u64,
    /// Of those, the writes that this side carries out.
    pulled: u64,
    pulls: Pulling,
    /// Those of them for which the device has had no room yet: the last ones.
    waiting: usize,
    /// When the first of these must have a place. Those behind it wait for it, not for the device.
    place_by: Option<Instant>,
    free: Vec<Vec<u8>>,
    /// From then on nothing is stored, counted or answered.
    failed: Option<StoreError>,
}

/// Writes that this side carries out, and that have not ended or wait behind others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pulling {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

enum Entry {
    Write {
        write: Write,
        len: usize,
    },
    /// So many writes of which nothing is to be stored any more.
    Over(u64),
    /// A write of the peer that this side carries out, without a buffer.
    Pull {
        write: Pending<()>,
        len: usize,
        until: Instant,
    },
    Waits(Ended),
}

enum Write {
    Runs {
        write: Pending<Vec<u8>>,
        until: Instant,
    },
    /// The device has no room for it.
    Waits {
        offset: usize,
        bytes: Vec<u8>,
    },
}

impl Write {
    /// The result, or `None` if it has not ended.
    fn poll(&mut self, pool: &Pool) -> Option<Result<Vec<u8>, MemoryError>> {
        match self {
            Self::Runs { write, .. } => write.poll_or_wake(pool.waker()),
            Self::Waits { .. } => None,
        }
    }

    fn is_late(&self, now: Instant) -> bool {
        matches!(self, Self::Runs { until, .. } if now > *until)
    }
}

/// Begins a write, or lets it wait with its bytes.
fn start(pool: &Pool, offset: usize, bytes: Vec<u8>, now: Instant) -> Write {
    match pool.start_write(Rows::run(offset, bytes.len()), bytes) {
        Ok(write) => Write::Runs { write, until: now + OPERATION_MAX },
        Err(bytes) => Write::Waits { offset, bytes },
    }
}

impl Incoming {
    pub(super) fn new(pool: Pool) -> Self {
        let (queue, free) = Default::default();
        let (bytes, writes, flushes, stored, pulled, pulls, waiting, place_by, failed) =
            (0, 0, 0, 0, 0, Pulling::default(), 0, None, None);
        Self { pool, queue, bytes, writes, flushes, stored, pulled, pulls, waiting, place_by, free, failed }
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// An empty buffer for the bytes of one write.
    pub(super) fn buffer(&mut self) -> Vec<u8> {
        self.free.pop().unwrap_or_default()
    }

    /// Begins to store bytes, or lets them wait for room in the device. A write beyond the bound is not stored; [`Incoming::advance`] reports
    /// it.
    pub(super) fn store(&mut self, offset: usize, bytes: Vec<u8>) {
        if self.writes >= WRITES_MAX {
            self.failed.get_or_insert(StoreError::Writes);
        }
        if self.failed.is_some() {
            return;
        }
        let (len, now) = (bytes.len(), Instant::now());
        let write = match self.waiting {
            0 => start(&self.pool, offset, bytes, now),
            _ => Write::Waits { offset, bytes },
        };
        if matches!(write, Write::Waits { .. }) {
            self.waiting += 1;
            self.place_by.get_or_insert(now + PLACE_MAX);
        }
        (self.bytes, self.writes) = (self.bytes + len, self.writes + 1);
        self.queue.push_back(Entry::Write { write, len });
    }

    /// Counts a write of which nothing is to be stored any more, because it is stored, was refused or has no bytes. It counts after those
    /// before it.
    pub(super) fn is_over(&mut self) {
        match self.queue.back_mut() {
            None => self.stored += 1,
            Some(Entry::Over(writes)) => *writes += 1,
            Some(_) => self.queue.push_back(Entry::Over(1)),
        }
    }

    /// Waits for a write that this side carries out. Who carries it out bounds them ([`Incoming::pulls`]).
    pub(super) fn follow(&mut self, write: Pending<()>, len: usize) {
        let Pulling { count, bytes } = self.pulls;
        self.pulls = Pulling { count: count + 1, bytes: bytes + len };
        self.queue.push_back(Entry::Pull { write, len, until: Instant::now() + OPERATION_MAX });
    }

    pub(super) fn pulls(&self) -> Pulling {
        self.pulls
    }

    /// Number of the writes that this side has carried out, or refused, with all writes before them.
    pub(super) fn pulled(&self) -> u64 {
        self.pulled
    }

    /// A flush that is to be answered once everything before it is stored.
    pub(super) fn flush(&mut self, id: u64) -> Result<(), StoreError> {
        self.flushes += 1;
        if self.flushes > FLUSHES_MAX {
            return Err(StoreError::Flushes);
        }
        let entry = Entry::Waits(Ended::Flush(id));
        match self.pool.counts_unstored {
            true => self.queue.push_front(entry),
            false => self.queue.push_back(entry),
        }
        Ok(())
    }

    /// Nothing more comes under this ticket. Each handoff has one window, so a peer does not determine the number of these entries.
    pub(super) fn close_window(&mut self, ticket: TicketId) {
        self.queue.push_back(Entry::Waits(Ended::Window(ticket)));
    }

    /// Whether there is room for more writes of the peer.
    pub(super) fn has_room(&self) -> bool {
        self.waiting == 0 && self.bytes < STAGED_BYTES_MAX && self.writes < STAGED_OPERATIONS_MAX
    }

    /// Number of writes that are over, with all those that came before them.
    pub(super) fn stored(&self) -> u64 {
        let waiting = |entry: &Entry| match entry {
            Entry::Write { .. } | Entry::Pull { .. } => 1,
            Entry::Over(writes) => *writes,
            Entry::Waits(_) => 0,
        };
        match self.pool.counts_unstored {
            true => self.stored + self.queue.iter().map(waiting).sum::<u64>(),
            false => self.stored,
        }
    }

    #[cfg(test)]
    pub(super) fn set_stored(&mut self, stored: u64) {
        self.stored = stored;
    }

    /// Begins the writes that wait for room in the device, in order, as far as there is some.
    fn start_waiting(&mut self, now: Instant) {
        for entry in &mut self.queue {
            if self.waiting == 0 {
                break;
            }
            if let Entry::Write { write, .. } = entry
                && let Write::Waits { offset, bytes } = write
            {
                *write = start(&self.pool, *offset, std::mem::take(bytes), now);
                if matches!(write, Write::Waits { .. }) {
                    break;
                }
                self.waiting -= 1;
                self.place_by = (self.waiting > 0).then(|| now + PLACE_MAX);
            }
        }
    }

    /// Takes the writes that have ended, and begins those that waited for room in the device. The transport's own operations and the
    /// verifier wake its thread when there is some; whoever else uses the device does not. Returns what waited for them.
    /// A failure fails the connection, because bytes of the peer are lost.
    /// After it, every further call fails too.
    pub(super) fn advance(&mut self, now: Instant) -> Result<Vec<Ended>, StoreError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.start_waiting(now);
        if self.place_by.is_some_and(|by| now > by) {
            return Err(self.fail(StoreError::Busy));
        }
        let mut all_ended = Vec::new();
        // A write that has ended leaves room, and wakes nobody once it is taken.
        while self.take_ended(now, &mut all_ended)? && self.waiting > 0 {
            self.start_waiting(now);
        }
        Ok(all_ended)
    }

    /// Takes what has ended, in order. Whether writes are among it.
    fn take_ended(&mut self, now: Instant, all_ended: &mut Vec<Ended>) -> Result<bool, StoreError> {
        let mut any = false;
        while let Some(entry) = self.queue.front_mut() {
            match entry {
                Entry::Over(writes) => self.stored += *writes,
                Entry::Waits(ended) => {
                    self.flushes -= usize::from(matches!(ended, Ended::Flush(_)));
                    all_ended.push(*ended);
                }
                Entry::Pull { write, len, until } => match write.poll_or_wake(self.pool.waker()) {
                    None if now > *until => return Err(self.fail(StoreError::Late)),
                    None => break,
                    Some(Ok(())) => {
                        let Pulling { count, bytes } = self.pulls;
                        self.pulls = Pulling { count: count - 1, bytes: bytes - *len };
                        (self.stored, self.pulled) = (self.stored + 1, self.pulled + 1);
                    }
                    Some(Err(error)) => {
                        self.queue.pop_front();
                        let why = if let MemoryError::Failed(why) = error { why } else { error.to_string() };
                        return Err(self.fail(StoreError::Unread(why)));
                    }
                },
                Entry::Write { write, len } => match write.poll(&self.pool) {
                    None if write.is_late(now) => return Err(self.fail(StoreError::Late)),
                    None => break,
                    Some(Ok(mut buffer)) => {
                        (self.bytes, self.writes) = (self.bytes - *len, self.writes - 1);
                        self.stored += 1;
                        any = true;
                        buffer.clear();
                        keep(&mut self.free, buffer);
                    }
                    Some(Err(error)) => {
                        self.queue.pop_front();
                        return Err(self.fail(StoreError::Failed(error)));
                    }
                },
            }
            self.queue.pop_front();
        }
        Ok(any)
    }

    fn fail(&mut self, error: StoreError) -> StoreError {
        self.failed = Some(error.clone());
        error
    }

    /// Waits for what is on its way, after the connection has ended; what waits for room is dropped. Whether nothing can be stored any more.
    pub(super) fn has_ended(&mut self) -> bool {
        (self.waiting, self.place_by) = (0, None);
        self.queue.retain_mut(|entry| match entry {
            Entry::Waits(_) | Entry::Over(_) => false,
            Entry::Write { write: Write::Waits { .. }, .. } => false,
            Entry::Write { write, .. } => write.poll(&self.pool).is_none(),
            Entry::Pull { write, .. } => write.poll_or_wake(self.pool.waker()).is_none(),
        });
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests;
