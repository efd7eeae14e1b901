//! Operations as one parallel region each.
//!
//! A task has a block of rows and some columns. Its thread norms and packs the rows, unless it holds them from the task before, and keeps the
//! packed form; then it computes its products, and finishes them (bias, norm and rotation of heads, store to the pool, activation,
//! residual) while they are in its cache. With few rows, as in decode, every thread packs all of them: that takes less time than a barrier.
//!
//! So nothing goes to memory but the residual stream, the query, what attention yields, the gated rows and logits.

mod grid;
mod ops;

use super::CpuKernels;
use super::lines::Lines;
use super::matrix::{Input, Matrix};
use super::source::Source;
use crate::host::NormOf;
pub(super) use grid::{Columns, Grid, share};
pub(super) use ops::{embed, gate_up, head, normed_linear, project, qkv};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    static LANE: RefCell<Lane> = RefCell::default();
}

/// Number of the next operation of this process; 0 is none.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What a thread keeps from task to task.
#[derive(Default)]
struct Lane {
    /// The rows that `input` holds: which operation's, and which block.
    holds: (u64, usize),
    input: Input,
    normed: Vec<f32>,
    tile: Lines,
}

/// Products of rows with a matrix.
struct Fused<'a> {
    kernels: &'a CpuKernels,
    w: &'a Matrix,
    /// `[rows, k]`
    x: &'a [f32],
    norm: Option<NormOf<'a>>,
}

/// A part of an operation: some rows, and columns of one part.
struct Piece<'a> {
    /// The rows, packed.
    input: &'a Input,
    rows: Range<usize>,
    part: usize,
    columns: Range<usize>,
    /// Memory of the thread.
    tile: &'a mut Lines,
}

impl Fused<'_> {
    /// Calls `work` for all pieces. Their columns are at most so many that what is `kept` of them stays in the cache.
    fn run(&self, columns: Columns<'_>, kept: bool, work: &(dyn Fn(Piece<'_>) + Sync)) {
        let (kernels, k) = (self.kernels, self.w.k());
        let (rows, units) = (self.x.len() / k, columns.units());
        if rows == 0 || units == 0 {
            return;
        }
        let grid = Grid::new(kernels.threads.count(), rows, self.w.tiles(kernels), units);
        let most = if kept { grid.units_kept(columns.unit) } else { usize::MAX };
        let operation = NEXT.fetch_add(1, Ordering::Relaxed);
        kernels.threads.run(grid.tasks(), &|task| {
            LANE.with_borrow_mut(|lane| {
                let block = grid.block(task);
                let rows = grid.rows(block);
                let Lane { holds, input, normed, tile } = lane;
                if *holds != (operation, block) {
                    *holds = (0, 0);
                    let x = &self.x[rows.start * k..rows.end * k];
                    let mut source = match self.norm {
                        Some(norm) => Source::normed(x, norm, kernels.level, normed),
                        None => Source::dense(x, k),
                    };
                    input.fill(kernels, self.w, rows.len(), &mut source);
                    *holds = (operation, block);
                }
                columns.each(grid.units(task), most, |part, columns| {
                    work(Piece { input, rows: rows.clone(), part, columns, tile });
                });
            });
        });
    }
}
