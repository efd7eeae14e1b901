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

use super::SimdLevel;
use super::target::Target;
use crate::numerics::flushed::GROUP;
use gemm::Features;
use pack::PANEL;

/// Most rows of a tile, and bytes of a packed row of `k` elements.
pub(super) fn rows(level: SimdLevel, k: usize) -> (usize, usize) {
    (level::tile_rows(level), k.div_ceil(GROUP) * GROUP / 2 * level::pair_words(level) * size_of::<u32>())
}

/// Name of the layout of packed weights.
pub(super) fn layout(level: SimdLevel) -> &'static str {
    if level::has_tiles(level) { "tiles" } else { "pairs" }
}

/// Products of all rows of `x` with the target's features of part `part`, which begin with a panel.
pub(super) fn product(x: &Rows, w: &Weights, part: usize, target: Target) {
    if x.m() == 0 {
        return;
    }
    let (first_panel, features) = (w.first_panel(part), target.features());
    assert!(features.start.is_multiple_of(PANEL) && features.end <= w.parts()[part], "{features:?} of part {part}");
    let panels = first_panel + features.start / PANEL..first_panel + features.end.div_ceil(PANEL);
    let mut epilogue = Features { target, first_panel };
    if x.m() <= gemv::GEMV_ROWS_MAX {
        gemv::gemv(x, w, panels, &mut epilogue);
    } else {
        gemm::gemm(x, w, panels, &mut epilogue);
    }
}
