//! Zeroed words for packed operands, on huge pages where the system has them.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of large regions: one huge page.
const HUGE: usize = 2 << 20;

/// Words of a cache line, the alignment of each buffer.
const LINE_WORDS: usize = 16;

/// One allocation.
#[derive(Debug)]
struct Region {
    at: NonNull<u32>,
    layout: Layout,
}

// SAFETY: a region hands out no references; its buffers own disjoint words, as `Vec<u32>` does.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated by `Arena::new` with this layout.
        unsafe { dealloc(self.at.as_ptr().cast(), self.layout) };
    }
}

/// Memory from which buffers are cut in order, so that small ones share huge pages and a stream may go on from one into the next.
#[derive(Debug)]
pub(super) struct Arena {
    region: Arc<Region>,
    words: usize,
    used: usize,
}

impl Arena {
    /// An arena of `words` words.
    pub(super) fn new(words: usize) -> Self {
        let words = words.next_multiple_of(LINE_WORDS).max(LINE_WORDS);
        let bytes = words * size_of::<u32>();
        let align = if bytes >= HUGE { HUGE } else { 64 };
        let layout = Layout::from_size_align(bytes, align)
            .unwrap_or_else(|_| panic!("{words} words do not fit the address space"));
        // SAFETY: the layout's size is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        let Some(at) = NonNull::new(at.cast::<u32>()) else { handle_alloc_error(layout) };
        if bytes >= HUGE {
            advise_huge(at.as_ptr().cast(), bytes);
        }
        Self { region: Arc::new(Region { at, layout }), words, used: 0 }
    }

    /// The next `len` words.
    ///
    /// # Panics
    /// If fewer are left.
    pub(super) fn cut(&mut self, len: usize) -> Buffer {
        let end = self.used + len;
        assert!(end <= self.words, "{len} words of {} in an arena", self.words - self.used);
        let first = std::mem::replace(&mut self.used, end.next_multiple_of(LINE_WORDS).min(self.words));
        Buffer { region: self.region.clone(), first, len }
    }
}

/// A fixed number of u32, aligned to 64 bytes.
#[derive(Debug)]
pub(super) struct Buffer {
    region: Arc<Region>,
    first: usize,
    len: usize,
}

impl Buffer {
    /// `len` zeros in memory of their own.
    pub(super) fn zeroed(len: usize) -> Self {
        Arena::new(len).cut(len)
    }
}

impl Buffer {
    /// The words as bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: initialized words that this buffer owns, four bytes each.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len * size_of::<u32>()) }
    }

    /// The words as bytes, to be written.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably, and any bytes are valid words.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), self.len * size_of::<u32>()) }
    }
}

impl Deref for Buffer {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        // SAFETY: `Arena::cut` gave these initialized words to this buffer alone.
        unsafe { std::slice::from_raw_parts(self.region.at.as_ptr().add(self.first), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.region.at.as_ptr().add(self.first), self.len) }
    }
}

/// Asks for huge pages; without them reads are slower and nothing else changes.
#[cfg(target_os = "linux")]
fn advise_huge(at: *mut u8, bytes: usize) {
    // SAFETY: whole pages of an allocation of this process; the advice changes no contents.
    unsafe { libc::madvise(at.cast(), bytes & !(HUGE - 1), libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_at: *mut u8, _bytes: usize) {}
