//! GEMM: divides the rows into blocks and tiles. The arithmetic of one tile is in [`tile`].

mod tile;

use super::pack::{Format, PANEL, PairStep, Panels, Step, WideStep};
use crate::cpu::Level;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::target::Target;
use std::ops::Range;
use tile::{Output, Tile};

/// Bytes of x that are read for every panel: half of a common L2; the rest is for the panel and the output.
const ROW_BLOCK_BYTES: usize = 512 << 10;

/// Most rows of one tile: 6 x 2 accumulators leave room for two weight vectors and a broadcast in 16 registers.
pub(in crate::cpu) const TILE_ROWS: usize = 6;

/// Panels that a one-row tile processes at once.
const PANELS_AT_ONCE: usize = 4;

/// Farthest distance of prefetching weights: a quarter of a common L2.
const AHEAD_BYTES: usize = 256 << 10;

/// Products of all rows of `x` with the target's features, which begin with a panel.
pub(in crate::cpu) fn product(level: Level, x: &[f32], w: &Panels, partitions: usize, target: Target) {
    let (rows, features) = (x.len() / w.k, target.features());
    assert!(x.len() == rows * w.k, "{} elements are no rows of {}", x.len(), w.k);
    assert!(features.start.is_multiple_of(PANEL) && features.end <= w.n, "{features:?} of {}", w.n);
    match w.format {
        Format::Pairs => blocks::<PairStep>(level, x, w, partitions, target),
        Format::Wide => blocks::<WideStep>(level, x, w, partitions, target),
    }
}

fn blocks<W: Step>(level: Level, x: &[f32], w: &Panels, partitions: usize, target: Target) {
    let steps = w.steps.steps::<W>();
    let (all, features) = (x.len() / w.k, target.features());
    let rows_max = (ROW_BLOCK_BYTES / (4 * w.k) / TILE_ROWS).max(1) * TILE_ROWS;
    let each = all.div_ceil(all.div_ceil(rows_max).max(1)).next_multiple_of(TILE_ROWS);
    let panels = features.start / PANEL..features.end.div_ceil(PANEL);
    for first in (0..all).step_by(each) {
        let rows = first..(first + each).min(all);
        level.run(Block { x, w, steps, partitions, target, rows, panels: panels.clone() });
    }
}

/// Rows by panels; no other task shares an output element with it.
struct Block<'a, W> {
    x: &'a [f32],
    w: &'a Panels,
    steps: &'a [W],
    partitions: usize,
    target: Target,
    rows: Range<usize>,
    panels: Range<usize>,
}

impl<W: Step> Kernel for Block<'_, W> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, simd: S) {
        // With few rows, several panels are processed at once: eight chains of additions hide the latency of one.
        match self.rows.len() {
            1 => self.sweep::<S, PANELS_AT_ONCE>(simd),
            2 => self.sweep::<S, 2>(simd),
            _ => self.sweep::<S, 1>(simd),
        }
    }
}

impl<W: Step> Block<'_, W> {
    #[inline(always)]
    fn sweep<S: Simd, const P: usize>(&self, simd: S) {
        let mut panel = self.panels.start;
        while panel + P <= self.panels.end {
            self.rows::<S, P>(simd, panel);
            panel += P;
        }
        while panel < self.panels.end {
            self.rows::<S, 1>(simd, panel);
            panel += 1;
        }
    }

    /// All rows of the block times `P` panels, in tiles of nearly equal height.
    #[inline(always)]
    fn rows<S: Simd, const P: usize>(&self, simd: S, panel: usize) {
        let rows = self.rows.len();
        let tiles = rows.div_ceil(TILE_ROWS);
        let mut row = self.rows.start;
        for tile in 0..tiles {
            let height = rows / tiles + usize::from(tile < rows % tiles);
            // The last tile finds its own weights in the cache, or is the only one: it prefetches those of the next panels.
            let ahead = if tile + 1 == tiles { (P * self.w.k).min(AHEAD_BYTES / size_of::<W>()) } else { 0 };
            match height {
                1 => self.tile::<S, 1, P>(simd, row, panel, ahead),
                2 => self.tile::<S, 2, P>(simd, row, panel, ahead),
                // Taller tiles have enough chains, and no registers for a second panel; `P` is 1 here.
                3 => self.tile::<S, 3, 1>(simd, row, panel, ahead),
                4 => self.tile::<S, 4, 1>(simd, row, panel, ahead),
                5 => self.tile::<S, 5, 1>(simd, row, panel, ahead),
                _ => self.tile::<S, 6, 1>(simd, row, panel, ahead),
            }
            row += height;
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&self, simd: S, row: usize, panel: usize, ahead: usize) {
        let (k, end) = (self.w.k, self.target.features().end);
        assert!(panel * PANEL < end && row + R <= self.rows.end);
        let (first, n) = (self.target.at(row, panel * PANEL), self.target.stride());
        simd.run(Tile::<W, R, P> {
            x: &self.x[row * k..(row + R) * k],
            panels: std::array::from_fn(|p| &self.steps[(panel + p) * k..(panel + p + 1) * k]),
            partitions: self.partitions,
            ahead,
            output: Output { first, n, features: end - panel * PANEL },
            store: self.target.store(),
        });
    }
}
