//! Pool memory: the mapping that holds KV blocks.
//!
//! A NIC or another process may write here at any time under a grant, so no safe code ever gets `&mut [u8]` or `&[u8]` over it. Kernels use
//! the raw base of [`PoolMemory`]; other code uses copies. Transports move bytes between the region and a file descriptor without forming a
//! reference (`send_to`, `receive_from`).
//!
//! This module is an unsafe fence: it maps and unmaps memory and copies by raw pointer, after checking each range.
#![allow(unsafe_code)]

mod io;
mod mapping;
mod wide;

use baton_types::{MemoryKind, PoolMemory};
pub(crate) use io::{PARTS_MAX, Part};
use mapping::Mapping;
use std::fmt;
use std::io::Error;
use std::ops::Range;
use std::sync::Arc;
pub(crate) use wide::sum_chunks;

/// One contiguous region of host memory, page aligned, zeroed, with huge pages advised.
pub struct Region {
    mapping: Mapping,
}

/// Zeroed anonymous host memory, for tests and the CPU engine.
pub type HostMemory = Region;

/// The operating system refused the mapping.
#[derive(Debug, thiserror::Error)]
#[error("cannot map {bytes} bytes of pool memory: {source}; lower --kv-cache-bytes or free memory")]
pub struct RegionError {
    bytes: usize,
    #[source]
    source: Error,
}

impl Region {
    /// Maps `bytes` bytes (rounded up to pages) of anonymous memory. Pages are taken from the system when first touched.
    pub fn anonymous(bytes: usize) -> Result<Arc<Self>, RegionError> {
        let mapping = Mapping::anonymous(bytes).map_err(|source| RegionError { bytes, source })?;
        Ok(Arc::new(Self { mapping }))
    }

    /// Size of the region in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte, as peers need it to compute remote addresses.
    pub(crate) fn address(&self) -> u64 {
        self.mapping.base() as u64
    }

    /// Whether `range` lies within the region.
    pub(crate) fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.len()
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len).filter(|&end| end <= self.len());
        assert!(end.is_some(), "{len} bytes at {offset} leave a region of {}", self.len());
        self.mapping.base().wrapping_add(offset)
    }
}

// SAFETY: the mapping is `len` bytes at a page boundary, readable and writable, and lives as long as `self.mapping`, which
// `Region` owns and never replaces.
unsafe impl PoolMemory for Region {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn bytes(&self) -> usize {
        self.len()
    }

    fn base(&self) -> *mut u8 {
        self.mapping.base()
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.at(offset, out.len());
        // SAFETY: `at` checked that the source lies within the mapping; `out` is another allocation, so they do not overlap. A peer
        // that breaks its grant may write meanwhile: the copy is then torn, which the checksum finds.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    fn write(&self, offset: usize, data: &[u8]) {
        let to = self.at(offset, data.len());
        // SAFETY: as in `read`, with the roles turned.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes of {})", self.len(), self.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_zeroed_aligned_and_keeps_what_is_written() {
        let region = Region::anonymous(100_000).unwrap();
        assert!(region.bytes() >= 100_000);
        assert_eq!(region.base() as usize % 4096, 0);
        let mut out = [1u8; 16];
        region.read(99_000, &mut out);
        assert_eq!(out, [0; 16]);
        region.write(99_004, &[7; 8]);
        region.read(99_000, &mut out);
        assert_eq!(out, [0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0]);
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(Region::anonymous(usize::MAX).is_err());
        assert!(Region::anonymous(usize::MAX / 2).is_err());
    }

    #[test]
    #[should_panic(expected = "leave a region")]
    fn a_range_outside_panics() {
        let region = Region::anonymous(4096).unwrap();
        region.write(4090, &[0; 8]);
    }
}
