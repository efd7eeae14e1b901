//! GEMM: divides the rows into blocks and tiles. The arithmetic of one tile is in [`tile`].

mod tile;
mod vectors;

use super::pack::{Format, PANEL, PairStep, Panels, Step, WideStep};
use crate::cpu::target::Target;
use std::ops::Range;
use tile::{Output, Tile};

pub(in crate::cpu) use vectors::PanelVectors;
pub(in crate::cpu::f32fma) use vectors::Vectors;
use vectors::{Sizes, Work};

/// Bytes of x that are read for every panel: half of a common L2; the rest is for the panel and the output.
const ROW_BLOCK_BYTES: usize = 512 << 10;

/// Farthest distance of prefetching weights: a quarter of a common L2.
const AHEAD_BYTES: usize = 256 << 10;

/// Products of all rows of `x` with the target's features, which begin with a panel.
pub(in crate::cpu) fn product(vectors: PanelVectors, x: &[f32], w: &Panels, partitions: usize, target: Target) {
    let (rows, features) = (x.len() / w.k, target.features());
    assert!(x.len() == rows * w.k, "{} elements are no rows of {}", x.len(), w.k);
    assert!(features.start.is_multiple_of(PANEL) && features.end <= w.n, "{features:?} of {}", w.n);
    match w.format {
        Format::Pairs => blocks::<PairStep>(vectors, x, w, partitions, target),
        Format::Wide => blocks::<WideStep>(vectors, x, w, partitions, target),
    }
}

fn blocks<W: Step>(vectors: PanelVectors, x: &[f32], w: &Panels, partitions: usize, target: Target) {
    let steps = w.steps.steps::<W>();
    let (all, features) = (x.len() / w.k, target.features());
    let tile_rows = vectors.rows_max();
    let rows_max = (ROW_BLOCK_BYTES / (4 * w.k) / tile_rows).max(1) * tile_rows;
    let each = all.div_ceil(all.div_ceil(rows_max).max(1)).next_multiple_of(tile_rows);
    let panels = features.start / PANEL..features.end.div_ceil(PANEL);
    for first in (0..all).step_by(each) {
        let rows = first..(first + each).min(all);
        vectors.run(Block { x, w, steps, partitions, target, rows, panels: panels.clone() });
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

impl<W: Step> Work for Block<'_, W> {
    #[inline(always)]
    fn call<V: Vectors>(self, vectors: V) {
        let at_once = V::panels(self.rows.len());
        let mut panel = self.panels.start;
        while panel < self.panels.end {
            let panels = if panel + at_once <= self.panels.end { at_once } else { 1 };
            self.rows(vectors, panel, panels);
            panel += panels;
        }
    }
}

impl<W: Step> Block<'_, W> {
    /// All rows of the block times some panels, in tiles of nearly equal height.
    #[inline(always)]
    fn rows<V: Vectors>(&self, vectors: V, panel: usize, panels: usize) {
        let rows = self.rows.len();
        let tiles = rows.div_ceil(V::ROWS_MAX);
        let mut row = self.rows.start;
        for tile in 0..tiles {
            let height = rows / tiles + usize::from(tile < rows % tiles);
            // The last tile finds its own weights in the cache, or is the only one: it prefetches those of the next panels.
            let ahead = if tile + 1 == tiles { (panels * self.w.k).min(AHEAD_BYTES / size_of::<W>()) } else { 0 };
            V::pick(height, panels, At { block: self, vectors, row, panel, ahead });
            row += height;
        }
    }
}

/// Where a tile of a block begins.
struct At<'a, 'b, W, V> {
    block: &'a Block<'b, W>,
    vectors: V,
    row: usize,
    panel: usize,
    ahead: usize,
}

impl<W: Step, V: Vectors> Sizes for At<'_, '_, W, V> {
    #[inline(always)]
    fn tile<const R: usize, const P: usize>(self) {
        let Self { block, vectors, row, panel, ahead } = self;
        let (k, end) = (block.w.k, block.target.features().end);
        assert!(panel * PANEL < end && row + R <= block.rows.end);
        let (first, n) = (block.target.at(row, panel * PANEL), block.target.stride());
        vectors.run(Tile::<W, R, P> {
            x: &block.x[row * k..(row + R) * k],
            panels: std::array::from_fn(|p| &block.steps[(panel + p) * k..(panel + p + 1) * k]),
            partitions: block.partitions,
            ahead,
            output: Output { first, n, features: end - panel * PANEL },
            store: block.target.store(),
        });
    }
}
