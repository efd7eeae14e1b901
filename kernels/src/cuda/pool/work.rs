//! Operations, cut into pieces that fit a lane.

use baton_memory::{Completer, MemoryError, Rows};

/// What an operation does, and what it owns.
pub(super) enum Work {
    Read { from: Rows, into: Vec<u8>, end: Completer<Vec<u8>> },
    Write { to: Rows, data: Vec<u8>, end: Completer<Vec<u8>> },
    Copy { from: Rows, to: Rows, end: Completer<()> },
    Checksum { rows: Vec<Rows>, sums: Vec<u64>, end: Completer<Vec<u64>> },
}

/// An operation, and how much of it is done.
pub(super) struct Operation {
    pub(super) work: Work,
    /// Bytes, or sums.
    pub(super) done: usize,
}

impl Operation {
    pub(super) fn new(mut work: Work) -> Self {
        if let Work::Read { into, .. } = &mut work {
            into.clear();
        }
        Self { work, done: 0 }
    }

    /// All of it, in the unit of [`Operation::done`].
    pub(super) fn size(&self) -> usize {
        match &self.work {
            Work::Read { from: rows, .. } | Work::Write { to: rows, .. } | Work::Copy { from: rows, .. } => rows.len(),
            Work::Checksum { rows, .. } => rows.len(),
        }
    }

    /// Ends it.
    pub(super) fn end(self, result: Result<(), MemoryError>) {
        match self.work {
            Work::Read { into, end, .. } => end.complete(result.map(|()| into)),
            Work::Write { data, end, .. } => end.complete(result.map(|()| data)),
            Work::Copy { end, .. } => end.complete(result),
            Work::Checksum { sums, end, .. } => end.complete(result.map(|()| sums)),
        }
    }
}
