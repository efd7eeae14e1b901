//! A KV pool in ordinary memory.

use baton_types::{MemoryKind, PoolMemory};
use std::cell::UnsafeCell;
use std::fmt;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A pool in ordinary memory that no transport writes to, for benchmarks, tests and tools.
///
/// Accesses are not ordered with one another: code that shares a pool between threads must order reads after writes, e.g. by a fence.
pub struct HeapPool {
    lines: Box<[UnsafeCell<Line>]>,
    bytes: usize,
}

// SAFETY: all access is through raw pointers; callers order conflicting accesses, see the type's contract.
unsafe impl Send for HeapPool {}
// SAFETY: as above.
unsafe impl Sync for HeapPool {}

impl HeapPool {
    /// A pool of `bytes` bytes, each with the value `fill`.
    pub fn new(bytes: usize, fill: u8) -> Self {
        let lines = (0..bytes.div_ceil(64)).map(|_| UnsafeCell::new(Line([fill; 64]))).collect();
        Self { lines, bytes }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of {}",
            self.bytes
        );
        self.base().wrapping_add(offset)
    }
}

impl fmt::Debug for HeapPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeapPool({} bytes)", self.bytes)
    }
}

// SAFETY: the box is never reallocated, `Line` is aligned to 64, and `UnsafeCell` makes writes through a shared reference sound.
unsafe impl PoolMemory for HeapPool {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn base(&self) -> *mut u8 {
        self.lines.as_ptr().cast_mut().cast()
    }
    fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.at(offset, out.len());
        // SAFETY: `at` checked the range; `out` is exclusive, so it cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }
    fn write(&self, offset: usize, data: &[u8]) {
        let to = self.at(offset, data.len());
        // SAFETY: as in `read`: no reference into the pool exists.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }
}
