//! The words of a panel: as memory holds them, or made in scratch memory of the thread where it holds weights as the file stores them.

use super::SimdLevel;
use super::pack::{GROUP_WORDS, Weights};
use crate::cpu::buffer::Buffer;
use std::cell::RefCell;
use std::ops::Range;

/// Most groups that are made at once for few rows: 20 KiB, which stay in the first-level cache.
const PART_GROUPS: usize = 10;

thread_local! {
    static SCRATCH: RefCell<Buffer> = RefCell::new(Buffer::zeroed(0));
}

/// Calls `each` with the words of some groups of a panel.
pub(super) fn with_words<T>(
    level: SimdLevel,
    w: &Weights,
    panel: usize,
    groups: Range<usize>,
    each: impl FnOnce(&[u32]) -> T,
) -> T {
    if w.has_words() {
        return each(w.words(panel, groups));
    }
    let len = groups.len() * GROUP_WORDS;
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            *scratch = Buffer::zeroed(w.groups() * GROUP_WORDS);
        }
        let words = &mut scratch[..len];
        w.expand(level, panel, groups, words);
        each(words)
    })
}

/// Most groups that few rows take at once: `most`, or fewer of those that have to be made.
pub(super) fn at_once(w: &Weights, most: usize) -> usize {
    if w.has_words() { most } else { most.min(PART_GROUPS) }
}

/// Divides the groups of a panel into parts of nearly equal length, at most `most`.
pub(super) fn parts(groups: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let each = groups.div_ceil(groups.div_ceil(most).max(1)).max(1);
    (0..groups).step_by(each).map(move |first| first..(first + each).min(groups))
}
