//! GEMM: divides the output into tasks, panels by blocks of rows. The arithmetic of one tile is in [`tile`].

mod tile;

use super::pack::{Format, PANEL, Panels, Step};
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::{CpuKernels, Shared};
use crate::host::Store;
use tile::{Output, Tile};

/// Bytes of x that one task reads for every panel: half of a common L2; the rest is for the panel and the output.
const ROW_BLOCK_BYTES: usize = 512 << 10;

/// Most rows of one tile: 6 x 2 accumulators leave room for two weight vectors and a broadcast in 16 registers.
const TILE_ROWS: usize = 6;

/// Tasks per thread, so that a slow thread takes fewer.
const TASKS_PER_THREAD: usize = 4;

/// Panels that a one-row tile processes at once; tasks begin at multiples of it.
const PANELS_AT_ONCE: usize = 4;

/// Farthest distance of prefetching weights: a quarter of a common L2.
const AHEAD_BYTES: usize = 256 << 10;

pub(in crate::cpu) fn linear(
    kernels: &CpuKernels,
    x: &[f32],
    w: &Panels,
    partitions: usize,
    store: Store,
    out: &mut [f32],
) {
    let rows = x.len() / w.k;
    assert!(x.len() == rows * w.k && out.len() == rows * w.n);
    match &w.format {
        Format::Pairs(steps) => blocks(kernels, x, w, steps, partitions, store, out, rows),
        Format::Wide(steps) => blocks(kernels, x, w, steps, partitions, store, out, rows),
    }
}

#[allow(clippy::too_many_arguments, reason = "the product as the op states it, and its panels by their format")]
fn blocks<W: Step>(
    kernels: &CpuKernels,
    x: &[f32],
    w: &Panels,
    steps: &[W],
    partitions: usize,
    store: Store,
    out: &mut [f32],
    rows: usize,
) {
    if rows == 0 {
        return;
    }
    let rows_max = (ROW_BLOCK_BYTES / (4 * w.k) / TILE_ROWS).max(1) * TILE_ROWS;
    let row_blocks = rows.div_ceil(rows_max);
    let block_rows = rows.div_ceil(row_blocks).next_multiple_of(TILE_ROWS);
    let panels = w.n.div_ceil(PANEL);
    let tasks = kernels.threads.count() * TASKS_PER_THREAD;
    let task_panels = panels.div_ceil(tasks.div_ceil(row_blocks)).next_multiple_of(PANELS_AT_ONCE);
    let panel_tasks = panels.div_ceil(task_panels);
    let out = Shared(out.as_mut_ptr());
    let level = kernels.level;
    kernels.threads.run(row_blocks * panel_tasks, &|task| {
        let (block, chunk) = (task / panel_tasks, task % panel_tasks);
        level.run(Block {
            x,
            w,
            steps,
            partitions,
            store,
            out: out.get(),
            rows: (block * block_rows).min(rows)..((block + 1) * block_rows).min(rows),
            panels: chunk * task_panels..((chunk + 1) * task_panels).min(panels),
        });
    });
}

/// Rows by panels of one task; no other task shares an output element with it.
struct Block<'a, W> {
    x: &'a [f32],
    w: &'a Panels,
    steps: &'a [W],
    partitions: usize,
    store: Store,
    out: *mut f32,
    rows: std::ops::Range<usize>,
    panels: std::ops::Range<usize>,
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
        let (k, n) = (self.w.k, self.w.n);
        assert!(panel * PANEL < n && row + R <= self.rows.end);
        // SAFETY: the first element of the tile lies within the output.
        let first = unsafe { self.out.add(row * n + panel * PANEL) };
        simd.run(Tile::<W, R, P> {
            x: &self.x[row * k..(row + R) * k],
            panels: std::array::from_fn(|p| &self.steps[(panel + p) * k..(panel + p + 1) * k]),
            partitions: self.partitions,
            ahead,
            output: Output { first, n, features: n - panel * PANEL },
            store: self.store,
        });
    }
}
