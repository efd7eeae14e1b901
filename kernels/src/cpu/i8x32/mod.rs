//! Class `i8x32`: int8 activations with a scale for each 32, weights as they are stored; see `docs/numerics.md`.
//!
//! Subnormals cannot occur, except as activations that become 0: every scale and minimum of weights is a multiple of 2^-24, hence so is every
//! term, and a scale of activations is at least 2^-79 and a multiple of 2^-102. So every sum is a multiple of 2^-126: zero or normal.

mod gemm;
mod known;
mod level;
mod quantize;
#[cfg(test)]
mod tests;
mod tile;

pub(super) use known::known_answers;
pub(super) use quantize::Rows;

use super::stored::{PANEL, Weights};
use super::{Shared, SimdLevel, threads::Threads};
use crate::host::Store;
use crate::quantized::BLOCK;
use gemm::Output;
use level::Level;

/// Tasks per thread, so that a slow thread delays the end by a part of its share.
const TASKS_PER_THREAD: usize = 4;

/// Packed bytes below which a task is not worth claiming.
const TASK_BYTES: usize = 64 << 10;

/// Quantizes `rows` rows of x, `[rows, k]`.
pub(super) fn quantize(threads: &Threads, level: SimdLevel, x: &[f32], rows: usize, k: usize, to: &mut Rows) {
    to.quantize(threads, Level::of(level), x, rows, k);
}

/// Tasks of one part.
struct Columns {
    first_task: usize,
    panels_each: usize,
    count: usize,
    output: Output,
}

/// `out = x * w^T` for all rows of `x` and each part; an output is `[rows, n]` of its part.
pub(super) fn linear(
    threads: &Threads,
    level: SimdLevel,
    x: &Rows,
    parts: &[Weights],
    store: Store,
    outs: &mut [&mut [f32]],
) {
    assert!(outs.len() == parts.len() && outs.iter().zip(parts).all(|(out, w)| out.len() == x.m() * w.n()));
    if x.m() == 0 {
        return;
    }
    let (level, per_pass) = (Level::of(level), gemm::pass(x));
    let passes = x.blocks().div_ceil(per_pass);
    let bytes: usize = parts.iter().map(|w| w.bytes().len()).sum();
    let wanted = (threads.count() * TASKS_PER_THREAD).div_ceil(passes).min(bytes.div_ceil(TASK_BYTES)).max(1);
    let bytes_each = bytes.div_ceil(wanted).max(1);
    let mut tasks = 0;
    let columns = parts.iter().zip(outs).map(|(w, out)| {
        let panels_each = (w.panels() * bytes_each).div_ceil(w.bytes().len().max(1)).clamp(1, w.panels().max(1));
        let count = w.panels().div_ceil(panels_each);
        let first_task = tasks;
        tasks += count * passes;
        // SAFETY: the output has `[m, n]` elements, and tasks take different panels or rows.
        let output = unsafe { Output::new(out.as_mut_ptr(), w.n(), store) };
        Columns { first_task, panels_each, count, output }
    });
    let columns: Vec<Columns> = columns.collect();
    threads.run(tasks, &|task| {
        let part = columns.partition_point(|columns| columns.first_task <= task) - 1;
        let (w, Columns { first_task, panels_each, count, output }) = (&parts[part], &columns[part]);
        let (pass, column) = ((task - first_task) / count, (task - first_task) % count);
        let panels = column * panels_each..((column + 1) * panels_each).min(w.panels());
        let blocks = pass * per_pass..((pass + 1) * per_pass).min(x.blocks());
        gemm::gemm(level, x, w, blocks, panels, &mut output.clone());
    });
}
