//! A lane: page-locked memory of the host with as much scratch memory of the device, through which one operation moves at a time.

use super::work::{Operation, Work};
use crate::cuda::arguments::pool::{CopyRows, RowsCopy, StridedRows, SumRows};
use crate::cuda::arguments::{Argument, In, Out, bytes_of};
use crate::cuda::driver::{Address, Buffer, Command, Driver, Event, Pinned, Stream};
use crate::cuda::launch::Launcher;
use crate::device::DeviceError;
use baton_memory::{MemoryError, Rows};
use baton_types::FenceStatus;
use std::sync::Arc;

/// Enough that copies of 64 KiB to 1 MiB keep the bus busy.
pub(super) const LANES: usize = 8;

/// Bytes of a piece: from here on, a larger one is hardly faster.
const PIECE: usize = 1 << 20;

/// Most sums of one launch.
const SUMS_MAX: usize = 4096;

/// Bytes of what describes a launch, and of its sums.
const DESCRIPTION: usize = SUMS_MAX * (StridedRows::BYTES + size_of::<u64>());

pub(super) struct Lane {
    driver: Arc<dyn Driver>,
    stream: Stream,
    pool: Address,
    /// Dense bytes of rows. Freed before the host's memory: that waits for the copies that still use both.
    device: Buffer,
    description: Buffer,
    host: Arc<dyn Pinned>,
    running: Option<(Operation, Piece)>,
}

/// What of an operation is under way.
struct Piece {
    end: End,
    /// In the unit of the operation.
    len: usize,
    failed: Option<DeviceError>,
}

/// When a piece has ended.
enum End {
    /// Nothing was enqueued for it.
    Now,
    /// With this event.
    Event(Event),
    /// Behind what is enqueued, and no event could be recorded yet. Until then it reads and writes the lane and the pool.
    Unknown,
}

impl Lane {
    /// Of device memory.
    pub(super) const BYTES: usize = PIECE + DESCRIPTION;

    pub(super) fn new(driver: &Arc<dyn Driver>, stream: Stream, pool: Address) -> Result<Self, DeviceError> {
        Ok(Self {
            driver: driver.clone(),
            stream,
            pool,
            // The piece, then its description.
            host: driver.pinned(PIECE + DESCRIPTION)?,
            device: Buffer::new(driver, PIECE, "copies of KV")?,
            description: Buffer::new(driver, DESCRIPTION, "copies of KV")?,
            running: None,
        })
    }

    pub(super) fn is_free(&self) -> bool {
        self.running.is_none()
    }

    /// Begins an operation.
    pub(super) fn take(&mut self, operation: Operation) {
        let piece = self.begin(&operation);
        self.running = Some((operation, piece));
    }

    /// Looks whether the piece has come, and goes on. Says whether an operation has ended; `None`: there is none.
    pub(super) fn advance(&mut self) -> Option<bool> {
        let (mut operation, mut piece) = self.running.take()?;
        if let End::Unknown = piece.end {
            piece.end = self.end();
        }
        let status = match piece.end {
            End::Now => FenceStatus::Done,
            End::Unknown => FenceStatus::Pending,
            End::Event(event) => self.driver.poll(event),
        };
        if status == FenceStatus::Pending {
            self.running = Some((operation, piece));
            return Some(false);
        }
        if let End::Event(event) = piece.end {
            self.driver.forget(event);
        }
        if status == FenceStatus::Failed || piece.failed.is_some() {
            let why = piece.failed.map_or_else(|| "the GPU reports an error".to_owned(), |error| error.to_string());
            operation.end(Err(MemoryError::Failed(why)));
            return Some(true);
        }
        self.arrive(&mut operation, piece.len);
        operation.done += piece.len;
        if operation.done >= operation.size() {
            operation.end(Ok(()));
            return Some(true);
        }
        self.take(operation);
        Some(false)
    }

    /// Enqueues the next piece.
    fn begin(&mut self, operation: &Operation) -> Piece {
        let (at, rest) = (operation.done, operation.size() - operation.done);
        if rest == 0 {
            return Piece { end: End::Now, len: 0, failed: None };
        }
        let piece = rest.min(PIECE);
        let (len, enqueued) = match &operation.work {
            Work::Read { from, .. } => (piece, self.read(from, at, piece)),
            Work::Write { to, data, .. } => (piece, self.write(to, at, &data[at..at + piece])),
            Work::Copy { from, to, .. } => {
                let copy = RowsCopy { from: from.into(), to: to.into() };
                (rest, self.copy(self.pool, self.pool, &[copy]))
            }
            Work::Checksum { rows, .. } => {
                let len = rest.min(SUMS_MAX);
                (len, self.sum(&rows[at..at + len]))
            }
        };
        // What was enqueued before a failure still reads and writes the lane and the pool: the operation ends behind it.
        Piece { end: self.end(), len, failed: enqueued.err() }
    }

    /// The end of what is enqueued.
    fn end(&self) -> End {
        self.driver.record(self.stream).map_or(End::Unknown, End::Event)
    }

    /// Takes what a piece has brought.
    fn arrive(&self, operation: &mut Operation, len: usize) {
        match &mut operation.work {
            Work::Read { into, .. } => {
                let at = into.len();
                into.resize(at + len, 0);
                self.host.load(0, &mut into[at..]);
            }
            Work::Checksum { sums, .. } => {
                let mut bytes = vec![0; len * size_of::<u64>()];
                self.host.load(0, &mut bytes);
                sums.extend(bytes.as_chunks::<8>().0.iter().map(|sum| u64::from_ne_bytes(*sum)));
            }
            Work::Write { .. } | Work::Copy { .. } => {}
        }
    }

    fn enqueue(&self, command: Command) -> Result<(), DeviceError> {
        self.driver.enqueue(self.stream, &command)
    }

    fn read(&self, rows: &Rows, at: usize, len: usize) -> Result<(), DeviceError> {
        let from = match contiguous(rows, at, len) {
            Some(start) => self.pool.plus(start),
            None => {
                let copy = |(from, place): (Rows, usize)| {
                    let to = StridedRows::from(&Rows::run(place, from.len()));
                    RowsCopy { from: (&from).into(), to }
                };
                self.copy(self.pool, self.device.at(), &cut(rows, at, len).map(copy).collect::<Vec<_>>())?;
                self.device.at()
            }
        };
        self.enqueue(Command::Download { from, to: self.host.clone(), offset: 0, bytes: len })
    }

    fn write(&self, rows: &Rows, at: usize, data: &[u8]) -> Result<(), DeviceError> {
        self.host.store(0, data);
        let upload = |to| Command::Upload { from: self.host.clone(), offset: 0, to, bytes: data.len() };
        match contiguous(rows, at, data.len()) {
            Some(start) => self.enqueue(upload(self.pool.plus(start))),
            None => {
                self.enqueue(upload(self.device.at()))?;
                let copy = |(to, place): (Rows, usize)| {
                    let from = StridedRows::from(&Rows::run(place, to.len()));
                    RowsCopy { from, to: (&to).into() }
                };
                self.copy(self.device.at(), self.pool, &cut(rows, at, data.len()).map(copy).collect::<Vec<_>>())
            }
        }
    }

    fn copy(&self, from: Address, to: Address, copies: &[RowsCopy]) -> Result<(), DeviceError> {
        self.describe(copies)?;
        self.enqueue(Command::Launch(Launcher::copy_rows(CopyRows {
            from: In::at(from),
            to: Out::at(to),
            copies: In::at(self.description.at()),
            count: copies.len() as i32,
            reserved: 0,
        })))
    }

    fn sum(&self, rows: &[Rows]) -> Result<(), DeviceError> {
        self.describe(&rows.iter().map(StridedRows::from).collect::<Vec<_>>())?;
        let sums = self.description.at().plus(SUMS_MAX * StridedRows::BYTES);
        self.enqueue(Command::Launch(Launcher::sum_rows(SumRows {
            pool: In::at(self.pool),
            lists: In::at(self.description.at()),
            sums: Out::at(sums),
            count: rows.len() as i32,
            reserved: 0,
        })))?;
        let bytes = rows.len() * size_of::<u64>();
        self.enqueue(Command::Download { from: sums, to: self.host.clone(), offset: 0, bytes })
    }

    /// Uploads what describes a launch.
    fn describe<T: Argument>(&self, all: &[T]) -> Result<(), DeviceError> {
        let bytes = bytes_of(all);
        self.host.store(PIECE, &bytes);
        let (from, to, bytes) = (self.host.clone(), self.description.at(), bytes.len());
        self.enqueue(Command::Upload { from, offset: PIECE, to, bytes })
    }
}

/// Where the bytes `at .. at + len` of rows begin, if they are contiguous.
fn contiguous(rows: &Rows, at: usize, len: usize) -> Option<usize> {
    let place = rows.place(at);
    (place.len() >= len).then_some(place.start)
}

/// The bytes `at .. at + len` of rows as whole rows: the rest of a row, rows, and the beginning of one; each with its place among these bytes.
fn cut(rows: &Rows, at: usize, len: usize) -> impl Iterator<Item = (Rows, usize)> + use<> {
    let (rows, row) = (*rows, rows.row_bytes);
    let head = ((row - at % row) % row).min(len);
    let whole = (len - head) / row;
    let parts = [(head, 1), (row, whole), (len - head - whole * row, 1)];
    let mut dense = 0;
    parts.into_iter().filter(|(row_bytes, count)| row_bytes * count > 0).map(move |(row_bytes, count)| {
        let place = dense;
        dense += row_bytes * count;
        (Rows { start: rows.place(at + place).start, row_bytes, stride: rows.stride, rows: count }, place)
    })
}
