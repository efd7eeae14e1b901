//! Zeroed words for packed operands. Those of weights lie on huge pages where the system has them.

use crate::device::DeviceError;
use crate::host::huge_pages_of;
use baton_memory::HostPool;
use baton_types::MemoryKind;
use parking_lot::Mutex;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut, Range};
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
static WEIGHTS: Mutex<Option<Arc<Region>>> = Mutex::new(None);

/// One allocation, from which buffers are cut in order, so that small ones share huge pages and a stream may go on from one into the next.
///
/// The memory of a buffer that is dropped is cut again once those behind it are dropped too: a damaged weight that is packed again takes the
/// place of the damaged bytes. Other gaps stay until all buffers of the region are dropped, as those of a device are.
#[derive(Debug)]
struct Region {
    at: NonNull<u32>,
    words: usize,
    cuts: Mutex<Cuts>,
    /// Of the allocator's memory.
    layout: Option<Layout>,
    /// Mapped memory, whose end unmaps it.
    _mapped: Option<Arc<HostPool>>,
}

/// What is cut from a region, in words.
#[derive(Debug, Default)]
struct Cuts {
    /// The end of the last buffer.
    used: usize,
    /// Up to where words may be no zeros, because a buffer had them.
    touched: usize,
    /// Dropped buffers before `used`.
    gaps: Vec<Range<usize>>,
}

impl Cuts {
    /// Takes `len` of `words` words: those of the buffer, and how many words from its first on may be no zeros. `None` if fewer are left.
    fn cut(&mut self, len: usize, words: usize) -> Option<(Range<usize>, usize)> {
        let first = self.used;
        let end = first.checked_add(len).filter(|end| *end <= words)?;
        self.used = end.next_multiple_of(LINE_WORDS).min(words);
        let touched = self.touched.min(end).saturating_sub(first);
        self.touched = self.touched.max(self.used);
        Some((first..self.used, touched))
    }

    fn give_back(&mut self, cut: Range<usize>) {
        if !cut.is_empty() {
            self.gaps.push(cut);
        }
        while let Some(last) = self.gaps.iter().position(|gap| gap.end == self.used) {
            self.used = self.gaps.swap_remove(last).start;
        }
    }
}

// SAFETY: a region hands out no references; its buffers own disjoint words, as `Vec<u32>` does.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated by `Region::on_heap` with this layout.
            unsafe { dealloc(self.at.as_ptr().cast(), layout) };
        }
    }
}

/// Mapped memory, which nobody has touched.
///
/// # Errors
/// If the system gives none.
pub(super) fn pool_of(bytes: usize) -> Result<Arc<HostPool>, DeviceError> {
    HostPool::new(bytes).map_err(|error| {
        let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        refused(bytes, &why)
    })
}

/// The system gives no memory for weights.
fn refused(bytes: usize, why: &str) -> DeviceError {
    let help = format!(
        "{why}; raise the limit of this process (ulimit -v, vm.overcommit_memory), or lower engine.kv_cache_bytes \
         if the pool takes what is missing, or take a file of fewer bits with engine.numerics = \"i8x32\" or \"bf16x32\""
    );
    DeviceError::OutOfMemory { kind: MemoryKind::Host, bytes, what: "weights".into(), help }
}

impl Region {
    /// A region of `words` words, of the allocator.
    fn on_heap(words: usize) -> Arc<Self> {
        let words = words.next_multiple_of(LINE_WORDS).max(LINE_WORDS);
        let layout = Layout::from_size_align(words * size_of::<u32>(), 64)
            .unwrap_or_else(|_| panic!("{words} words do not fit the address space"));
        // SAFETY: the layout's size is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        let Some(at) = NonNull::new(at.cast::<u32>()) else { handle_alloc_error(layout) };
        Arc::new(Self { at, words, cuts: Mutex::default(), layout: Some(layout), _mapped: None })
    }

    /// A region of at least `words` words on huge pages. Nobody has touched them.
    fn mapped(words: usize) -> Result<Arc<Self>, DeviceError> {
        let bytes = words.checked_next_multiple_of(LINE_WORDS).and_then(|words| words.checked_mul(size_of::<u32>()));
        let with_start = bytes.and_then(|bytes| bytes.max(LINE_WORDS * size_of::<u32>()).checked_add(HUGE));
        let Some(with_start) = with_start else {
            return Err(refused(words.saturating_mul(size_of::<u32>()), "the size overflows"));
        };
        let pool = pool_of(with_start)?;
        huge_pages_of(&pool);
        let base = pool.base();
        // SAFETY: the mapping is a huge page longer than the words.
        let at = unsafe { base.add(base.align_offset(HUGE)) };
        let Some(at) = NonNull::new(at.cast::<u32>()) else { unreachable!("a mapping is not at 0") };
        let words = (with_start - HUGE) / size_of::<u32>();
        Ok(Arc::new(Self { at, words, cuts: Mutex::default(), layout: None, _mapped: Some(pool) }))
    }

    /// The next `len` words, all zero; `None` if fewer are left.
    fn cut(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        let (cut, touched) = self.cuts.lock().cut(len, self.words)?;
        let mut buffer = Buffer { region: self.clone(), cut, len };
        buffer[..touched].fill(0);
        Some(buffer)
    }
}

/// A fixed number of u32, aligned to 64 bytes.
#[derive(Debug)]
pub(super) struct Buffer {
    region: Arc<Region>,
    /// Its words of the region, and those up to the next buffer.
    cut: Range<usize>,
    len: usize,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region.cuts.lock().give_back(self.cut.clone());
    }
}

impl Buffer {
    /// `len` zeros in memory of their own.
    pub(super) fn zeroed(len: usize) -> Self {
        let Some(buffer) = Region::on_heap(len).cut(len) else { unreachable!("a region of {len} words") };
        buffer
    }

    /// `len` zeros on huge pages of their own.
    ///
    /// # Errors
    /// If the system gives no memory.
    pub(super) fn mapped(len: usize) -> Result<Self, DeviceError> {
        let Some(buffer) = Region::mapped(len)?.cut(len) else { unreachable!("a region of {len} words") };
        Ok(buffer)
    }

    /// `len` zeros for weights, which follow those before them.
    ///
    /// # Errors
    /// If the system gives no memory.
    pub(super) fn for_weights(len: usize) -> Result<Self, DeviceError> {
        let mut weights = WEIGHTS.lock();
        if let Some(buffer) = weights.as_ref().and_then(|region| region.cut(len)) {
            return Ok(buffer);
        }
        // With a limit of addresses, there may be room for this weight and not for others behind it.
        let region = Region::mapped(len.max(ARENA_BYTES / size_of::<u32>())).or_else(|_| Region::mapped(len))?;
        let Some(buffer) = weights.insert(region).cut(len) else { unreachable!("a region of {len} words") };
        Ok(buffer)
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
        // SAFETY: `Region::cut` gave these initialized words to this buffer alone.
        unsafe { std::slice::from_raw_parts(self.region.at.as_ptr().add(self.cut.start), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.region.at.as_ptr().add(self.cut.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_buffers_at_the_end_are_cut_again_and_zero() {
        let region = Region::on_heap(64 * LINE_WORDS);
        let cut = |len| {
            let mut buffer = region.cut(len).unwrap();
            assert!(buffer.iter().all(|word| *word == 0), "{len} words");
            buffer.fill(7);
            buffer
        };
        let kept = cut(5);
        let lines = |buffer: &Buffer| buffer.cut.start / LINE_WORDS..buffer.cut.end / LINE_WORDS;
        for _ in 0..3 {
            // Parts of a matrix are dropped first to last.
            let parts = [cut(100), cut(0), cut(17)];
            assert_eq!(parts.each_ref().map(lines), [1..8, 8..8, 8..10]);
            drop(parts);
        }
        assert_eq!((lines(&cut(3)), &kept[..]), (1..2, &[7; 5][..]));
        let (gap, last) = (cut(40), cut(40));
        assert_eq!([lines(&gap), lines(&last)], [1..4, 4..7]);
        drop(gap);
        assert_eq!(lines(&cut(1)), 7..8, "what is in use stays");
        drop((last, kept));
        assert_eq!(lines(&cut(64 * LINE_WORDS)), 0..64);
        assert!(region.cut(64 * LINE_WORDS + 1).is_none() && region.cut(usize::MAX).is_none());
    }

    #[test]
    fn memory_that_the_system_refuses_is_an_error_that_says_what_to_do() {
        for words in [1 << 46, usize::MAX / 8, usize::MAX] {
            let error = Buffer::for_weights(words).unwrap_err();
            let DeviceError::OutOfMemory { kind: MemoryKind::Host, bytes, .. } = error else { panic!("{error}") };
            assert!(bytes >= words, "{bytes}");
            let text = error.to_string();
            assert!(
                text.contains("weights") && text.contains("ulimit -v") && text.contains("engine.numerics"),
                "{text}"
            );
        }
        assert!(Buffer::for_weights(3).is_ok());
    }
}
