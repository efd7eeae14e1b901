//! Errors of pool memory.

use crate::Pending;
use std::io::Error;

/// The operating system refused the memory of a pool.
#[derive(Debug, thiserror::Error)]
#[error("cannot map {bytes} bytes of pool memory: {source}; lower --kv-cache-bytes or free memory")]
pub struct PoolError {
    pub(crate) bytes: usize,
    #[source]
    pub(crate) source: Error,
}

/// An operation on pool memory failed. What it should have read or written is undefined.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Rows outside of the pool: a defect of the caller, because offsets come from a checked layout.
    #[error("rows from {start} on leave a pool of {bytes} bytes")]
    Outside { start: usize, bytes: usize },
    /// Rows and buffer, or the rows of both sides of a copy, differ in length.
    #[error("{rows} bytes of rows for {data} bytes")]
    Length { rows: usize, data: usize },
    /// More operations run than the device has room for.
    #[error("{running} operations run on the pool: no room for another")]
    Busy { running: usize },
    /// The operation did not end by the deadline of its waiter. It may still end.
    #[error("an operation on pool memory did not end in time")]
    Late,
    /// The device failed, or ended before the operation did.
    #[error("the memory's device failed: {0}")]
    Failed(String),
}

/// A device has no room for another operation now. What the operation was to own comes back, so that it can be tried again as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{running} operations run on the pool: no room for another")]
pub struct NoRoom<B> {
    /// Number of operations that run.
    pub running: usize,
    /// What the operation was to own.
    pub buffer: B,
}

impl<B> NoRoom<B> {
    /// An operation that has failed with [`MemoryError::Busy`]. Drops the buffer.
    pub fn ended<T>(self) -> Pending<T> {
        Pending::ended(Err(MemoryError::Busy { running: self.running }))
    }
}
