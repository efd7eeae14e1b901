//! Class `i8x32`: int8 activations with a scale for each 32, weights as they are stored; see `docs/numerics.md`.
//!
//! Subnormals cannot occur, except as activations that become 0: every scale and minimum of weights is a multiple of 2^-24, hence so is every
//! term, and a scale of activations is at least 2^-79 and a multiple of 2^-102. So every sum is a multiple of 2^-126: zero or normal.

#[cfg(target_arch = "x86_64")]
mod by_tiles;
mod gemm;
mod known;
mod level;
mod quantize;
#[cfg(test)]
mod tests;
mod tile;

pub(super) use known::known_answers;
pub(super) use quantize::Rows;

use super::source::Source;
use super::stored::{PANEL, Weights};
use super::target::Target;
use super::{SimdLevel, threads::Threads};
use crate::numerics::QUANTIZED_BLOCK as BLOCK;
use level::Level;

/// Most rows of a tile, and bytes of a quantized row of `k` elements.
pub(super) fn rows(k: usize) -> (usize, usize) {
    (quantize::ROWS_MAX, k / BLOCK * size_of::<quantize::Record>())
}

/// Rows that have to pass over a panel together, if there are so many.
pub(super) fn rows_min(level: SimdLevel) -> usize {
    if Level::of(level).has_tiles() { quantize::TILED_ROWS } else { 1 }
}

/// Quantizes `m` rows of `k` elements.
pub(super) fn quantize(level: SimdLevel, m: usize, k: usize, source: &mut Source<'_>, to: &mut Rows) {
    to.quantize(Level::of(level), m, k, source);
}

/// Products of all rows of `x` with the target's features, which begin with a panel.
pub(super) fn product(level: SimdLevel, x: &Rows, w: &Weights, mut target: Target) {
    let features = target.features();
    assert!(features.start.is_multiple_of(PANEL) && features.end <= w.n(), "{features:?} of {}", w.n());
    let panels = features.start / PANEL..features.end.div_ceil(PANEL);
    gemm::gemm(Level::of(level), x, w, 0..x.blocks(), panels, &mut target);
}
