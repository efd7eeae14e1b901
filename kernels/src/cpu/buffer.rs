//! Zeroed words for packed operands. Those of weights lie on huge pages where the system has them.

use crate::host::huge_pages_of;
use baton_memory::HostPool;
use parking_lot::Mutex;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// A huge page, and the alignment of large regions.
const HUGE: usize = 2 << 20;

/// Words of a cache line, the alignment of each buffer.
const LINE_WORDS: usize = 16;

/// Bytes from which weights are cut. Nothing of it takes memory until it is touched.
const ARENA_BYTES: usize = 64 << 20;

/// Where the next weights of this process are cut from. A huge page is shared by weights that follow one another: pages of their own would take
/// up to 2 MiB more for each.
static WEIGHTS: Mutex<Option<Arena>> = Mutex::new(None);

/// One allocation.
#[derive(Debug)]
struct Region {
    at: NonNull<u32>,
    /// Of the allocator's memory.
    layout: Option<Layout>,
    /// Mapped memory, whose end unmaps it.
    _mapped: Option<Arc<HostPool>>,
}

// SAFETY: a region hands out no references; its buffers own disjoint words, as `Vec<u32>` does.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated by `Arena::on_heap` with this layout.
            unsafe { dealloc(self.at.as_ptr().cast(), layout) };
        }
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
    /// An arena of `words` words, of the allocator.
    fn on_heap(words: usize) -> Self {
        let words = words.next_multiple_of(LINE_WORDS).max(LINE_WORDS);
        let layout = Layout::from_size_align(words * size_of::<u32>(), 64)
            .unwrap_or_else(|_| panic!("{words} words do not fit the address space"));
        // SAFETY: the layout's size is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        let Some(at) = NonNull::new(at.cast::<u32>()) else { handle_alloc_error(layout) };
        Self { region: Arc::new(Region { at, layout: Some(layout), _mapped: None }), words, used: 0 }
    }

    /// An arena of `words` words on huge pages. Nobody has touched them.
    pub(super) fn mapped(words: usize) -> Self {
        let words = words.next_multiple_of(LINE_WORDS).max(LINE_WORDS);
        let Ok(pool) = HostPool::new(words * size_of::<u32>() + HUGE) else {
            handle_alloc_error(Layout::new::<[u8; ARENA_BYTES]>())
        };
        huge_pages_of(&pool);
        let base = pool.base();
        // SAFETY: the mapping is a huge page longer than the words.
        let at = unsafe { base.add(base.align_offset(HUGE)) };
        let Some(at) = NonNull::new(at.cast::<u32>()) else { unreachable!("a mapping is not at 0") };
        Self { region: Arc::new(Region { at, layout: None, _mapped: Some(pool) }), words, used: 0 }
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
        Arena::on_heap(len).cut(len)
    }

    /// `len` zeros for weights, which follow those before them.
    pub(super) fn for_weights(len: usize) -> Self {
        let mut arena = WEIGHTS.lock();
        match &mut *arena {
            Some(arena) if arena.words - arena.used >= len => arena.cut(len),
            arena => arena.insert(Arena::mapped(len.max(ARENA_BYTES / size_of::<u32>()))).cut(len),
        }
    }

    /// The words as steps of a larger type.
    ///
    /// # Panics
    /// If the words are not whole steps.
    pub(super) fn steps<T: Words>(&self) -> &[T] {
        const { assert!(align_of::<T>() <= 64 && size_of::<T>().is_multiple_of(size_of::<u32>())) };
        assert!(self.bytes().len().is_multiple_of(size_of::<T>()));
        // SAFETY: a buffer is aligned to 64 bytes; `T` consists of words of any value.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.bytes().len() / size_of::<T>()) }
    }

    /// As [`Buffer::steps`], to be written.
    pub(super) fn steps_mut<T: Words>(&mut self) -> &mut [T] {
        let len = self.steps::<T>().len();
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), len) }
    }
}

/// A type that consists of 32-bit words, each of which may have any value.
///
/// # Safety
/// It has no padding, and every value of its bytes is valid.
pub(super) unsafe trait Words: Copy {}

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
