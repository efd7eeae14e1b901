//! A lane: page-locked memory of the host with as much scratch memory of the device, through which one operation moves at a time.

use super::work::{Operation, Work};
use crate::cuda::arguments::pool::{CopyRows, RowsCopy, StridedRows, SumRows};
use crate::cuda::arguments::{Argument, In, Out};
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

/// Most copies of one launch.
const COPIES_MAX: usize = DESCRIPTION / RowsCopy::BYTES;

pub(super) struct Lane {
    driver: Arc<dyn Driver>,
    stream: Stream,
    pool: Address,
    host: Arc<dyn Pinned>,
    /// Dense bytes of rows.
    device: Buffer,
    description: Buffer,
    running: Option<(Operation, Piece)>,
}

/// What of an operation is under way.
struct Piece {
    event: Option<Event>,
    /// In the unit of the operation.
    len: usize,
    failed: Option<DeviceError>,
}

impl Lane {
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
        let (mut operation, piece) = self.running.take()?;
        let status = match (&piece.failed, piece.event) {
            (Some(_), _) => FenceStatus::Failed,
            (None, Some(event)) => self.driver.poll(event),
            (None, None) => FenceStatus::Done,
        };
        if status == FenceStatus::Pending {
            self.running = Some((operation, piece));
            return Some(false);
        }
        if let Some(event) = piece.event {
            self.driver.forget(event);
        }
        if status == FenceStatus::Failed {
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
            return Piece { event: None, len: 0, failed: None };
        }
        let piece = rest.min(PIECE);
        let (len, enqueued) = match &operation.work {
            Work::Read { from, .. } => (piece, self.read(from, at, piece)),
            Work::Write { to, data, .. } => (piece, self.write(to, at, &data[at..at + piece])),
            Work::Copy { from, to, .. } => {
                let (copies, len) = copies_between(from, to, at);
                (len, self.copy(self.pool, self.pool, &copies))
            }
            Work::Checksum { rows, .. } => {
                let len = rest.min(SUMS_MAX);
                (len, self.sum(&rows[at..at + len]))
            }
        };
        match enqueued.and_then(|()| self.driver.record(self.stream)) {
            Ok(event) => Piece { event: Some(event), len, failed: None },
            Err(error) => Piece { event: None, len, failed: Some(error) },
        }
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
                self.copy(self.pool, self.device.at(), &copies_to_dense(rows, at, len, true))?;
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
                self.copy(self.device.at(), self.pool, &copies_to_dense(rows, at, data.len(), false))
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
        let of = |rows: &Rows| StridedRows {
            start: rows.start as u64,
            row_bytes: rows.row_bytes as u64,
            stride: rows.stride as u64,
            rows: rows.rows as u64,
        };
        self.describe(&rows.iter().map(of).collect::<Vec<_>>())?;
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
        let mut bytes = Vec::with_capacity(all.len() * T::BYTES);
        all.iter().for_each(|each| each.append(&mut bytes));
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

/// The bytes `at .. at + len` of rows to dense memory, or back: the rest of a row, whole rows, and the beginning of one.
fn copies_to_dense(rows: &Rows, at: usize, len: usize, from_rows: bool) -> Vec<RowsCopy> {
    let row = rows.row_bytes;
    let head = (row - at % row) % row;
    let head = head.min(len);
    let whole = (len - head) / row;
    let mut copies = Vec::new();
    let mut dense = 0;
    for (row_bytes, count) in [(head, 1), (row, whole), (len - head - whole * row, 1)] {
        if row_bytes * count == 0 {
            continue;
        }
        let start = rows.place(at + dense).start as u64;
        let (in_rows, in_dense) = ((start, rows.stride as u64), (dense as u64, row_bytes as u64));
        let ((from, from_stride), (to, to_stride)) = if from_rows { (in_rows, in_dense) } else { (in_dense, in_rows) };
        copies.push(RowsCopy { from, from_stride, to, to_stride, row_bytes: row_bytes as u64, rows: count as u64 });
        dense += row_bytes * count;
    }
    copies
}

/// The bytes of `from` from `at` on to the same bytes of `to`, whose rows may be cut otherwise: as many as one launch describes. Returns their
/// number, too.
fn copies_between(from: &Rows, to: &Rows, mut at: usize) -> (Vec<RowsCopy>, usize) {
    let begin = at;
    let mut copies = Vec::new();
    if from.row_bytes == to.row_bytes {
        copies.push(RowsCopy {
            from: from.start as u64,
            from_stride: from.stride as u64,
            to: to.start as u64,
            to_stride: to.stride as u64,
            row_bytes: from.row_bytes as u64,
            rows: from.rows as u64,
        });
        return (copies, from.len());
    }
    while at < from.len() && copies.len() < COPIES_MAX {
        let (source, target) = (from.place(at), to.place(at));
        let len = source.len().min(target.len()).min(from.len() - at);
        let stride = len as u64;
        copies.push(RowsCopy {
            from: source.start as u64,
            from_stride: stride,
            to: target.start as u64,
            to_stride: stride,
            row_bytes: stride,
            rows: 1,
        });
        at += len;
    }
    (copies, at - begin)
}
