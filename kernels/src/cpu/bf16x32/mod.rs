//! Class `bf16x32`: bf16 activations and weights, even and odd chains over groups of 32; see `docs/numerics.md`.
//!
//! The arithmetic of a tile stands in assembly blocks of [`tile`], since subnormals must count as zero there and nowhere else.

mod gemm;
mod gemv;
mod known;
mod level;
mod pack;
#[cfg(test)]
mod tests;
mod tile;
mod words;

pub(super) use known::known_answers;
pub(super) use pack::{Rows, Weights};

use super::{Shared, SimdLevel, threads::Threads};
use crate::host::Store;
use crate::numerics::flushed::GROUP;
use gemm::Outputs;

/// Tasks per thread, so that a slow thread takes fewer.
const TASKS_PER_THREAD: usize = 4;

/// Name of the layout of packed weights.
pub(super) fn layout(level: SimdLevel) -> &'static str {
    if level::has_tiles(level) { "tiles" } else { "pairs" }
}

/// `out = x * w^T` for all rows of `x` and each part of `w`; an output is `[rows, n]` of its part.
pub(super) fn linear(threads: &Threads, x: &Rows, w: &Weights, store: Store, outs: &mut [&mut [f32]]) {
    assert!(outs.len() == w.parts().len() && outs.iter().zip(w.parts()).all(|(out, n)| out.len() == x.m() * n));
    if x.m() == 0 {
        return;
    }
    // A stream of weights is divided once for each thread, so that each reads one sequence.
    let streams = x.m() <= gemv::GEMV_ROWS_MAX;
    let tasks = threads.count() * if streams { 1 } else { TASKS_PER_THREAD };
    let each = w.panels().div_ceil(tasks).max(1);
    // SAFETY: the outputs have `[m, n]` elements each, and tasks take different panels.
    let outputs = unsafe { Outputs::new(w, outs.iter_mut().map(|out| out.as_mut_ptr()), store) };
    threads.run(w.panels().div_ceil(each), &|task| {
        let panels = task * each..((task + 1) * each).min(w.panels());
        if streams {
            gemv::gemv(x, w, panels, &mut &outputs);
        } else {
            gemm::gemm(x, w, panels, &mut &outputs);
        }
    });
}
