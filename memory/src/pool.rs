//! The interface to pool memory.

use crate::{MemoryError, NoRoom, Pending, Rows};
use baton_types::MemoryKind;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// One region that holds KV blocks, reached by asynchronous operations.
///
/// An operation owns its buffer until it ends, and gives it back with its result. So does a device that has no room for it. Nothing can
/// read or refill a buffer that a device still uses:
///
/// ```compile_fail,E0382
/// # use baton_memory::{HostPool, PoolMemory, Rows};
/// # let pool = HostPool::new(4096).unwrap();
/// let mut staged = vec![1; 64];
/// let write = PoolMemory::write(&*pool, Rows::run(0, 64), staged);
/// staged.fill(2); // The write has not ended.
/// ```
///
/// ```
/// # use baton_memory::{HostPool, PoolMemory, Rows};
/// # let pool = HostPool::new(4096).unwrap();
/// # let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
/// let mut staged = vec![1; 64];
/// let write = PoolMemory::write(&*pool, Rows::run(0, 64), staged);
/// staged = write.wait(deadline).unwrap();
/// staged.fill(2);
/// ```
///
/// Two operations are ordered only if the second one starts after the first one ended. A step of the device that stores to the same bytes
/// is ordered by its fence. A peer may write under a grant at any time, so no code forms a reference into the memory.
pub trait PoolMemory: Send + Sync + fmt::Debug {
    /// Where the memory is.
    fn kind(&self) -> MemoryKind;

    /// Size in bytes.
    fn bytes(&self) -> usize;

    /// Where a NIC reaches the memory by itself once it is registered. The host must not follow this address: it may be a device's. It is
    /// valid for as long as the pool lives, so a registration keeps the pool alive. `None`: only operations reach the memory.
    fn dma_address(&self) -> Option<u64> {
        None
    }

    /// Lets operations and steps that start later see everything that a NIC had stored by itself before the call. Blocks for microseconds.
    ///
    /// # Errors
    /// If the device failed: then nothing that a NIC stored may be used.
    fn show_remote_writes(&self) -> Result<(), MemoryError> {
        Ok(())
    }

    /// Reads rows into a buffer, whose contents and length are replaced.
    ///
    /// # Errors
    /// If the device has no room, with the buffer as it was.
    fn try_read(&self, from: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>>;

    /// Writes a buffer, as long as the rows, and gives it back once the bytes are visible to every later operation.
    ///
    /// # Errors
    /// If the device has no room, with the buffer as it was.
    fn try_write(&self, to: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>>;

    /// Copies rows to other rows of the same length that do not overlap them.
    fn copy(&self, from: Rows, to: Rows) -> Pending<()>;

    /// The [checksum](crate::checksum) of each of these rows.
    ///
    /// # Errors
    /// If the device has no room, with the rows.
    fn try_checksum(&self, rows: Vec<Rows>) -> Result<Pending<Vec<u64>>, NoRoom<Vec<Rows>>>;

    /// [`PoolMemory::try_read`] for callers that do not try again: without room it fails with [`MemoryError::Busy`].
    fn read(&self, from: Rows, into: Vec<u8>) -> Pending<Vec<u8>> {
        self.try_read(from, into).unwrap_or_else(NoRoom::ended)
    }

    /// [`PoolMemory::try_write`], likewise.
    fn write(&self, to: Rows, data: Vec<u8>) -> Pending<Vec<u8>> {
        self.try_write(to, data).unwrap_or_else(NoRoom::ended)
    }

    /// [`PoolMemory::try_checksum`], likewise.
    fn checksum(&self, rows: Vec<Rows>) -> Pending<Vec<u64>> {
        self.try_checksum(rows).unwrap_or_else(NoRoom::ended)
    }

    /// For backends, which look for their own type.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

impl dyn PoolMemory {
    /// Reads contiguous bytes and waits for them.
    ///
    /// # Errors
    /// As the operation, and [`MemoryError::Late`].
    pub fn read_by(&self, deadline: Instant, offset: usize, out: &mut [u8]) -> Result<(), MemoryError> {
        let bytes = self.read(Rows::run(offset, out.len()), Vec::new()).wait(deadline)?;
        out.copy_from_slice(&bytes);
        Ok(())
    }

    /// Writes contiguous bytes and waits until they are stored.
    ///
    /// # Errors
    /// As the operation, and [`MemoryError::Late`].
    pub fn write_by(&self, deadline: Instant, offset: usize, data: &[u8]) -> Result<(), MemoryError> {
        self.write(Rows::run(offset, data.len()), data.to_vec()).wait(deadline).map(drop)
    }
}
