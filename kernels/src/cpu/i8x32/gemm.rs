//! GEMM and GEMV: blocks of rows times panels.
//!
//! A panel is read from memory once for as many rows as half of the second-level cache holds; tasks are panels times such passes of rows.

#[cfg(target_arch = "x86_64")]
use super::by_tiles::ByTiles;
use super::level::Level;
use super::quantize::{ROWS_MAX, Record, Rows, TILED_ROWS};
use super::tile::{self, Sums, Tile, TileSums};
use super::{BLOCK, PANEL};
use crate::cpu::stored::{Format, Weights};
use crate::cpu::target::Target;
use std::ops::Range;

/// Bytes of x that stay in the second-level cache (1 MiB a core, or more) while panels pass by.
const ROW_BYTES: usize = 512 << 10;

/// The same with AMX, whose processors have 2 MiB.
const ROW_BYTES_TILED: usize = 1 << 20;

/// Bytes ahead that weights are prefetched into the second-level cache. Into the first, the requests take the places of those that the
/// hardware makes by itself: 4 rows then run at 15 instead of 19 GB/s (Zen 4, one thread). 2 KiB are too few, 32 KiB too many.
pub(super) const AHEAD: usize = 8 << 10;

/// Takes the sums of a GEMM.
pub(super) trait Epilogue {
    /// Takes `sums` of features `first..` of row `row`. Features beyond the weight's n are zero or NaN and not to be stored.
    fn put(&mut self, row: usize, first: usize, sums: &[f32; PANEL]);

    /// Hears, a block of rows ahead, what [`Epilogue::put`] will take.
    #[inline(always)]
    fn expect(&self, _row: usize, _first: usize) {}
}

impl Epilogue for Target {
    #[inline(always)]
    fn put(&mut self, row: usize, first: usize, sums: &[f32; PANEL]) {
        Target::put(*self, row, first, sums);
    }

    #[inline(always)]
    fn expect(&self, row: usize, first: usize) {
        Target::expect::<PANEL>(*self, row, first);
    }
}

/// Blocks of rows that pass over the panels together.
fn pass(level: Level, x: &Rows) -> usize {
    let (row_bytes, least) = if level.has_tiles() { (ROW_BYTES_TILED, TILED_ROWS / ROWS_MAX) } else { (ROW_BYTES, 1) };
    let passes = (x.m() * x.k() / BLOCK * size_of::<Record>()).div_ceil(row_bytes).clamp(1, x.blocks().max(1));
    x.blocks().div_ceil(passes).max(least)
}

/// `sum_k x[m][k] * w[n][k]` for the rows of `blocks` and the features of `panels`.
///
/// # Panics
/// If the two K differ, a panel or block does not exist, or the processor lacks the level.
pub(super) fn gemm(
    level: Level,
    x: &Rows,
    w: &Weights,
    blocks: Range<usize>,
    panels: Range<usize>,
    epilogue: &mut impl Epilogue,
) {
    assert!(x.k() == w.k() && panels.end <= w.panels() && level.available());
    let (per_pass, k_blocks) = (pass(level, x), x.k() / BLOCK);
    let mut sums: TileSums = [Sums([0.0; PANEL]); ROWS_MAX];
    #[cfg(target_arch = "x86_64")]
    // SAFETY: other tiles of this function are no tiles of AMX, and epilogues only store.
    let mut tiles = unsafe { ByTiles::new(level, x, w) };
    for from in blocks.clone().step_by(per_pass) {
        let to = (from + per_pass).min(blocks.end);
        for panel in panels.clone() {
            let rest = from;
            #[cfg(target_arch = "x86_64")]
            let rest = tiles.as_mut().map_or(rest, |tiles| tiles.run(from..to, panel, epilogue));
            for block in rest..to {
                let rows = x.block_rows(block);
                // One row leaves the hardware time to read ahead by itself, which is 10 % faster, unless weights have twice the bytes.
                let reads_ahead = block == from && (x.m() > 1 || w.format() == Format::Q8_0);
                let ahead = if reads_ahead { AHEAD } else { 0 };
                let tile = Tile { x: x.block(block), w: w.panel(panel), blocks: 0..k_blocks, ahead };
                tile::run(level, w.format(), rows.len(), &tile, &mut sums);
                rows.zip(&sums).for_each(|(row, sums)| epilogue.put(row, panel * PANEL, &sums.0));
            }
        }
    }
}
