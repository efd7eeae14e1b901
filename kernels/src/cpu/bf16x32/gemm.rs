//! GEMM: blocks of rows times panels.
//!
//! A panel is read from memory once for as many rows as fit half of the second-level cache with it; threads take ranges of panels.

use super::GROUP;
use super::level::has_tiles;
use super::pack::{GROUP_WORDS, PANEL, Rows, Weights};
use super::tile::{self, Sums, Tile};
use super::words::{at_once, parts, with_words};
use crate::cpu::Level;
use crate::cpu::lines::Lines;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::target::Target;
use crate::host::Store;
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of x that stay in the second-level cache (1 MiB a core, or more) while panels pass by.
const ROW_BYTES: usize = 512 << 10;

/// The same with AMX, whose processors have 2 MiB.
const ROW_BYTES_AMX: usize = 1 << 20;

/// Groups of K that one tile takes: a panel's part is 256 KiB and stays in the second-level cache for all rows.
const TILE_GROUPS: usize = 4096 / GROUP;

/// Groups of a panel that tiles of AMX meet one after another with all rows: 36 KiB, which stay in the first-level cache (48 KiB). Rows pass them by.
const TILE_PART_GROUPS: usize = 18;

/// Rows that one call of a tile takes, so that setting MXCSR costs little and their totals and outputs stay in the first-level cache.
const STRIP_ROWS: usize = 32;

/// Most bytes ahead that weights are prefetched into the second-level cache. The hardware's prefetcher stops at every page.
const AHEAD_MAX: usize = 256 << 10;

/// Bytes after which the hardware's prefetcher stops.
const PAGE: usize = 4 << 10;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Takes the sums of a GEMM.
pub(super) trait Epilogue {
    /// Takes the sums of a row and panel. Features beyond the part's n are zero and not to be stored.
    fn put(&mut self, row: usize, panel: usize, sums: &[f32; PANEL]);

    /// Where the sums of a whole panel may be added up, from a row on: address, and bytes from one row to the next. Then [`Epilogue::put`] is not called.
    fn memory(&self, _row: usize, _panel: usize) -> Option<(*mut Sums, usize)> {
        None
    }

    /// Hears, a strip of rows ahead, what [`Epilogue::put`] will take.
    #[inline(always)]
    fn expect(&self, _row: usize, _panel: usize) {}
}

/// Stores the sums of some features of a part.
pub(super) struct Features {
    pub(super) target: Target,
    /// Of the part.
    pub(super) first_panel: usize,
}

impl Epilogue for Features {
    fn memory(&self, row: usize, panel: usize) -> Option<(*mut Sums, usize)> {
        let (target, feature) = (self.target, (panel - self.first_panel) * PANEL);
        let whole = target.features().start <= feature && feature + PANEL <= target.features().end;
        let set = target.store() == Store::Set && whole;
        set.then(|| (target.at(row, feature).cast(), target.stride() * size_of::<f32>()))
    }

    #[inline(always)]
    fn expect(&self, row: usize, panel: usize) {
        self.target.expect::<PANEL>(row, (panel - self.first_panel) * PANEL);
    }

    #[inline(always)]
    fn put(&mut self, row: usize, panel: usize, sums: &[f32; PANEL]) {
        self.target.put(row, (panel - self.first_panel) * PANEL, sums);
    }
}

/// Totals of some rows of one panel, in the first-level cache.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Total(pub(super) Sums);

/// `sum_k x[m][k] * w[n][k]` for all rows and the features of `panels`.
///
/// # Panics
/// If the two K differ, a panel does not exist, or the processor lacks the instructions that x is packed for.
pub(super) fn gemm(x: &Rows, w: &Weights, panels: Range<usize>, epilogue: &mut impl Epilogue) {
    assert!(x.k() == w.k() && panels.end <= w.panels() && x.level().available() && w.suit(x.level()));
    let blocks = x.m().div_ceil(x.height());
    // Equal numbers of blocks between one pass over the panels and the next; one pass over panels that would be expanded again.
    let row_bytes = if has_tiles(x.level()) { ROW_BYTES_AMX } else { ROW_BYTES };
    let passes = if w.has_words() { (x.m() * x.k() * 2).div_ceil(row_bytes).clamp(1, blocks.max(1)) } else { 1 };
    let per_pass = blocks.div_ceil(passes).max(1);
    if has_tiles(x.level()) {
        return by_parts(x, w, panels, per_pass, epilogue);
    }
    let strip = (STRIP_ROWS / x.height()).max(1);
    for first in (0..blocks).step_by(per_pass) {
        let blocks = first..(first + per_pass).min(blocks);
        for panel in panels.clone() {
            let pass = Pass { x, w, panel, blocks: blocks.clone() };
            if blocks.len() <= strip {
                pass.strip(blocks.clone(), None, epilogue);
                continue;
            }
            with_words(x.level(), w, panel, 0..w.groups(), |words| {
                for at in blocks.clone().step_by(strip) {
                    pass.strip(at..(at + strip).min(blocks.end), Some(words), epilogue);
                }
            });
        }
    }
}

thread_local! {
    static TOTALS: RefCell<Lines> = RefCell::default();
}

/// As [`gemm`], for tiles, which take longer to be loaded than to be multiplied: all rows of a pass meet some groups of a panel while these are in
/// the first-level cache.
fn by_parts(x: &Rows, w: &Weights, panels: Range<usize>, per_pass: usize, epilogue: &mut impl Epilogue) {
    assert!(w.groups() > 0, "weights of no elements");
    let blocks = x.m().div_ceil(x.height());
    TOTALS.with_borrow_mut(|totals| {
        for first in (0..blocks).step_by(per_pass) {
            let blocks = first..(first + per_pass).min(blocks);
            let rows = x.block_rows(blocks.start).start..x.block_rows(blocks.end - 1).end;
            let room = totals.room::<Total>(rows.len());
            for panel in panels.clone() {
                // Totals that are loaded again for each part lie side by side.
                let is_fit = |(_, stride): &(_, usize)| w.groups() <= TILE_PART_GROUPS || *stride == size_of::<Sums>();
                let memory = epilogue.memory(rows.start, panel).filter(is_fit);
                let sums = memory.unwrap_or((room.cast(), size_of::<Total>()));
                for groups in parts(w.groups(), TILE_PART_GROUPS) {
                    with_words(x.level(), w, panel, groups.clone(), |words| {
                        let ahead = Ahead::of_blocks(w, words, blocks.len(), 0);
                        // SAFETY: room for all rows, or the memory of a target, which is valid for the rows of the product.
                        unsafe { run_blocks(x, words, groups.start, blocks.clone(), ahead, sums) };
                    });
                }
                if memory.is_none() {
                    // SAFETY: room for as many, all of which were written; nothing else uses it meanwhile.
                    let totals = unsafe { std::slice::from_raw_parts(room.cast_const(), rows.len()) };
                    Level::of(x.level()).run(Put { first: rows.start, panel, totals, epilogue: &mut *epilogue });
                }
            }
        }
    });
}

/// All rows of a panel for an epilogue.
struct Put<'a, E> {
    first: usize,
    panel: usize,
    totals: &'a [Total],
    epilogue: &'a mut E,
}

impl<E: Epilogue> Kernel for Put<'_, E> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, _simd: S) {
        for (row, total) in self.totals.iter().enumerate() {
            self.epilogue.put(self.first + row, self.panel, &total.0);
        }
    }
}

/// Blocks of rows that pass over a panel.
struct Pass<'a> {
    x: &'a Rows,
    w: &'a Weights,
    panel: usize,
    blocks: Range<usize>,
}

impl Pass<'_> {
    /// Blocks of at most [`STRIP_ROWS`] rows. `all` are the words of the panel; without them, those that have to be made are made in parts.
    fn strip(&self, blocks: Range<usize>, all: Option<&[u32]>, epilogue: &mut impl Epilogue) {
        let Self { x, w, panel, .. } = *self;
        let rows = x.block_rows(blocks.start).start..x.block_rows(blocks.end - 1).end;
        let totals = &mut [Total([0.0; PANEL]); STRIP_ROWS][..rows.len()];
        rows.clone().for_each(|row| epilogue.expect(row, panel));
        let most = if all.is_some() { TILE_GROUPS } else { at_once(w, TILE_GROUPS) };
        for groups in parts(w.groups(), most) {
            let mut run = |words: &[u32]| {
                let ahead = Ahead::of_blocks(w, words, self.blocks.len(), blocks.start - self.blocks.start);
                let sums = (totals.as_mut_ptr().cast(), size_of::<Total>());
                // SAFETY: a total for each row.
                unsafe { run_blocks(x, words, groups.start, blocks.clone(), ahead, sums) };
            };
            match all {
                Some(all) => run(&all[groups.start * GROUP_WORDS..groups.end * GROUP_WORDS]),
                None => with_words(x.level(), w, panel, groups.clone(), run),
            }
        }
        rows.zip(&*totals).for_each(|(row, total)| epilogue.put(row, panel, &total.0));
    }
}

/// Prefetches of a tile.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) at: *const u32,
    pub(super) stride: usize,
}

impl Ahead {
    /// What block `block` of `blocks` prefetches while they pass over `words`: each a share of the memory that follows, so that reading it takes
    /// as long as computing.
    fn of_blocks(w: &Weights, words: &[u32], blocks: usize, block: usize) -> Self {
        if !w.has_words() {
            return Self::nothing(words);
        }
        let stride = LINE.div_ceil(blocks);
        let far = size_of_val(words).min(AHEAD_MAX) + block * (size_of_val(words) / LINE) * stride;
        Self { at: words.as_ptr().wrapping_byte_add(far), stride }
    }

    /// For words that were just made: whoever makes them reads ahead.
    fn nothing(words: &[u32]) -> Self {
        Self { at: words.as_ptr(), stride: 0 }
    }

    /// What one pass of `rows` rows over `words` prefetches: as many bytes of what follows them. A single row waits for memory all
    /// the time and needs only a bridge over the ends of pages (10 % faster than a panel ahead); more rows need more ahead.
    pub(super) fn of_stream(w: &Weights, words: &[u32], rows: usize) -> Self {
        if !w.has_words() {
            return Self::nothing(words);
        }
        let far = if rows == 1 { PAGE } else { size_of_val(words).min(AHEAD_MAX) };
        Self { at: words.as_ptr().wrapping_byte_add(far), stride: LINE }
    }
}

/// All blocks times the groups of a panel from `group` on that `w` holds; `sums` are address and stride of their totals.
///
/// # Safety
/// The totals are valid for all rows of the blocks, as [`Tile`] says.
unsafe fn run_blocks(
    x: &Rows,
    w: &[u32],
    group: usize,
    blocks: Range<usize>,
    ahead: Ahead,
    (sums, sums_stride): (*mut Sums, usize),
) {
    let groups = w.len() / GROUP_WORDS;
    // The last block of all may have fewer rows.
    let whole = blocks.clone().filter(|block| x.block_rows(*block).len() == x.height()).count();
    let rest = sums.wrapping_byte_add(whole * x.height() * sums_stride);
    for (blocks, sums) in [(blocks.start..blocks.start + whole, sums), (blocks.start + whole..blocks.end, rest)] {
        if blocks.is_empty() {
            continue;
        }
        let rows = x.block_rows(blocks.start).len();
        let tile = Tile {
            x: x.block(blocks.start, group).as_ptr(),
            blocks: blocks.len(),
            skip: x.skip(blocks.start, groups),
            w: w.as_ptr(),
            groups,
            sums,
            sums_stride,
            from_zero: group == 0,
            ahead: ahead.at,
            ahead_stride: ahead.stride,
        };
        // SAFETY: the operands hold these groups and rows by their slices; `gemm` has checked the instructions; the caller's promise.
        unsafe { tile::run(x.level(), rows, tile) };
    }
}
