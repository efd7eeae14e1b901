//! Pool memory of the host.
//!
//! A NIC or another process may write here at any time under a grant, so no safe code ever gets `&mut [u8]` or `&[u8]` over it. Kernels use
//! the raw address; other code uses copies. Transports move bytes between the pool and a file descriptor without forming a reference
//! ([`HostPool::send_parts`], [`HostPool::receive_from`]).
//!
//! This module is an unsafe fence: it maps and unmaps memory and copies by raw pointer, after checking each range.
#![allow(unsafe_code)]

mod io;
mod mapping;
mod wide;

use crate::{MemoryError, NoRoom, Pending, PoolError, PoolMemory, Rows, checksum};
use baton_types::MemoryKind;
pub use io::{PARTS_MAX, Part};
use mapping::Mapping;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
pub(crate) use wide::sum_chunks;

/// One contiguous region of host memory: page aligned and zeroed. Its operations end at once.
///
/// The system takes a page from its free memory when the page is first touched, near the processor that touches it. So nothing here
/// touches pages: the threads that compute on the pool do.
///
/// Accesses are not ordered with one another: code that shares a pool between threads must order reads after writes, e.g. by a fence.
pub struct HostPool {
    mapping: Mapping,
    bytes: usize,
    huge_pages: HugePages,
}

/// Returns the free pages of the process's heap to the system, where the C library can.
pub fn return_free_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: has no condition; other threads may allocate meanwhile.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Whether a pool may have huge pages. Without them everything works, with more TLB misses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// The system accepted the advice.
    Advised,
    /// It refused, with this error number.
    Refused(i32),
}

impl HostPool {
    /// Maps zeroed memory.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(bytes: usize) -> Result<Arc<Self>, PoolError> {
        let mapping = Mapping::anonymous(bytes).map_err(|source| PoolError { bytes, source })?;
        let huge_pages = match mapping.advise_huge_pages(&mapping::huge_pages_setting()) {
            Ok(()) => HugePages::Advised,
            Err(error) => HugePages::Refused(error.raw_os_error().unwrap_or_default()),
        };
        Ok(Arc::new(Self { mapping, bytes, huge_pages }))
    }

    /// The same, with this value in every byte, for tests and benchmarks.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn filled(bytes: usize, value: u8) -> Result<Arc<Self>, PoolError> {
        let pool = Self::new(bytes)?;
        // SAFETY: the mapping has `bytes` bytes, and nobody else has it yet.
        unsafe { std::ptr::write_bytes(pool.base(), value, bytes) };
        Ok(pool)
    }

    /// A pool, and an alias of its memory that nobody may access: whoever dereferences the alias ends the process.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn with_alias(bytes: usize) -> Result<(Arc<Self>, Arc<Self>), PoolError> {
        let mappings = Mapping::twice(bytes).map_err(|source| PoolError { bytes, source })?;
        let [pool, alias] = mappings.map(|mapping| {
            // Shared memory has huge pages only where its file system is configured for them.
            Arc::new(Self { mapping, bytes, huge_pages: HugePages::Refused(libc::EINVAL) })
        });
        Ok((pool, alias))
    }

    /// The host pool that `memory` is, if it is one.
    pub fn of(memory: &Arc<dyn PoolMemory>) -> Option<Arc<Self>> {
        memory.clone().into_any().downcast().ok()
    }

    /// Address of the first byte: valid for reads and writes of [`HostPool::bytes`] bytes for the life of the value, aligned to a page.
    pub fn base(&self) -> *mut u8 {
        self.mapping.base()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the system accepted the advice to use huge pages.
    pub fn huge_pages(&self) -> HugePages {
        self.huge_pages
    }

    /// Whether `range` lies within the pool.
    pub fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.bytes
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// # Panics
    /// If the range is not within the pool.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        let from = self.at(offset, out.len());
        // SAFETY: `at` checked that the source lies within the mapping; `out` is another allocation, so they do not overlap. A peer
        // that breaks its grant may write meanwhile: the copy is then torn, which the checksum finds.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Panics
    /// If the range is not within the pool.
    pub fn copy_in(&self, offset: usize, data: &[u8]) {
        let to = self.at(offset, data.len());
        // SAFETY: as in `copy_out`, with the roles turned.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len).filter(|&end| end <= self.bytes);
        assert!(end.is_some(), "{len} bytes at {offset} leave a pool of {}", self.bytes);
        self.base().wrapping_add(offset)
    }

    /// Copies the bytes of rows from `at` on; the rows are within the pool.
    fn gather(&self, rows: &Rows, at: usize, out: &mut [u8]) {
        let mut rest = out;
        for place in rows.places(at, rest.len()) {
            let (now, later) = rest.split_at_mut(place.len());
            self.copy_out(place.start, now);
            rest = later;
        }
    }

    pub(crate) fn read_now(&self, from: &Rows, mut into: Vec<u8>) -> Result<Vec<u8>, MemoryError> {
        from.check(self.bytes)?;
        into.resize(from.len(), 0);
        self.gather(from, 0, &mut into);
        Ok(into)
    }

    pub(crate) fn write_now(&self, to: &Rows, data: Vec<u8>) -> Result<Vec<u8>, MemoryError> {
        to.check(self.bytes)?;
        if data.len() != to.len() {
            return Err(MemoryError::Length { rows: to.len(), data: data.len() });
        }
        let mut at = 0;
        for place in to.places(0, data.len()) {
            self.copy_in(place.start, &data[at..at + place.len()]);
            at += place.len();
        }
        Ok(data)
    }

    pub(crate) fn copy_now(&self, from: &Rows, to: &Rows) -> Result<(), MemoryError> {
        from.check(self.bytes)?;
        to.check(self.bytes)?;
        if from.len() != to.len() {
            return Err(MemoryError::Length { rows: from.len(), data: to.len() });
        }
        let mut at = 0;
        while at < from.len() {
            let (source, target) = (from.place(at), to.place(at));
            let len = source.len().min(target.len());
            let (source, target) = (self.at(source.start, len), self.at(target.start, len));
            // SAFETY: `at` checked that both ranges lie within the mapping; they may overlap.
            unsafe { std::ptr::copy(source, target, len) };
            at += len;
        }
        Ok(())
    }

    pub(crate) fn checksum_now(&self, rows: &[Rows]) -> Result<Vec<u64>, MemoryError> {
        let sum = |rows: &Rows| {
            rows.check(self.bytes)?;
            Ok(checksum::sum_by(rows.len(), |at, out| self.gather(rows, at, out)))
        };
        rows.iter().map(sum).collect()
    }
}

impl PoolMemory for HostPool {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dma_address(&self) -> Option<u64> {
        Some(self.base() as u64)
    }

    fn try_read(&self, from: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        Ok(Pending::ended(self.read_now(&from, into)))
    }

    fn try_write(&self, to: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        Ok(Pending::ended(self.write_now(&to, data)))
    }

    fn copy(&self, from: Rows, to: Rows) -> Pending<()> {
        Pending::ended(self.copy_now(&from, &to))
    }

    fn try_checksum(&self, rows: Vec<Rows>) -> Result<Pending<Vec<u64>>, NoRoom<Vec<Rows>>> {
        Ok(Pending::ended(self.checksum_now(&rows)))
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl fmt::Debug for HostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPool({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn starts_zeroed_aligned_and_keeps_what_is_written() {
        let pool = HostPool::new(100_000).unwrap();
        assert_eq!((pool.bytes(), pool.base() as usize % 4096), (100_000, 0));
        let mut out = [1u8; 16];
        pool.copy_out(99_000, &mut out);
        assert_eq!(out, [0; 16]);
        pool.copy_in(99_004, &[7; 8]);
        pool.copy_out(99_000, &mut out);
        assert_eq!(out, [0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0]);
        let mut filled = [0; 3];
        HostPool::filled(10, 0xff).unwrap().copy_out(7, &mut filled);
        assert_eq!(filled, [0xff; 3]);
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(HostPool::new(usize::MAX).is_err());
        assert!(HostPool::new(usize::MAX / 2).is_err());
    }

    #[test]
    #[should_panic(expected = "leave a pool")]
    fn a_range_outside_panics() {
        HostPool::new(4096).unwrap().copy_in(4090, &[0; 8]);
    }

    #[test]
    fn operations_reach_rows_and_nothing_else() {
        let pool = HostPool::new(64).unwrap();
        let memory: Arc<dyn PoolMemory> = pool.clone();
        let now = Instant::now();
        let rows = Rows { start: 2, row_bytes: 3, stride: 8, rows: 3 };
        assert_eq!(memory.write(rows, (1..=9).collect()).wait(now).unwrap(), (1..=9).collect::<Vec<u8>>());
        assert_eq!(memory.read(rows, vec![0; 90]).wait(now).unwrap(), (1..=9).collect::<Vec<u8>>());
        memory.copy(rows, Rows { start: 40, row_bytes: 9, stride: 9, rows: 1 }).wait(now).unwrap();
        let mut all = [0; 64];
        pool.copy_out(0, &mut all);
        let mut expected = [0; 64];
        for (row, bytes) in [[1, 2, 3], [4, 5, 6], [7, 8, 9]].iter().enumerate() {
            expected[2 + 8 * row..][..3].copy_from_slice(bytes);
            expected[40 + 3 * row..][..3].copy_from_slice(bytes);
        }
        assert_eq!(all, expected);
        let sums = memory.checksum(vec![rows, Rows::run(40, 9), Rows::run(40, 8)]).wait(now).unwrap();
        assert_eq!((sums[0], sums[1]), (checksum::sum(&expected[40..49]), checksum::sum(&expected[40..49])));
        assert_ne!(sums[1], sums[2]);
    }

    #[test]
    fn wrong_rows_are_errors() {
        let memory: Arc<dyn PoolMemory> = HostPool::new(64).unwrap();
        let (now, outside) = (Instant::now(), MemoryError::Outside { start: 60, bytes: 64 });
        let rows = Rows::run(60, 8);
        assert_eq!(memory.read(rows, Vec::new()).wait(now), Err(outside.clone()));
        assert_eq!(memory.write(rows, vec![0; 8]).wait(now), Err(outside.clone()));
        assert_eq!(memory.copy(Rows::run(0, 8), rows).wait(now), Err(outside.clone()));
        assert_eq!(memory.checksum(vec![rows]).wait(now), Err(outside));
        let length = MemoryError::Length { rows: 8, data: 7 };
        assert_eq!(memory.write(Rows::run(0, 8), vec![0; 7]).wait(now), Err(length));
        assert!(memory.copy(Rows::run(0, 8), Rows::run(8, 7)).wait(now).is_err());
    }

    #[test]
    fn a_host_pool_is_found_behind_the_trait() {
        let memory: Arc<dyn PoolMemory> = HostPool::new(64).unwrap();
        assert_eq!(HostPool::of(&memory).unwrap().bytes(), 64);
        assert!(matches!(HostPool::of(&memory).unwrap().huge_pages(), HugePages::Advised | HugePages::Refused(_)));
    }
}
