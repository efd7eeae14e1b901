//! Attention by VDPBF16PS on 512-bit vectors.

mod pack;
mod softmax;
mod tile;

use super::plan::{Heads, Item};
use super::work::{self, BlockRows, Kernels, Scores, Softmax, Tile};
use super::{Rows, Task};
use crate::numerics::ATTENTION_BLOCK;
use crate::numerics::flushed::GROUP;

/// Lanes of a panel.
const PANEL: usize = 32;

/// Words of one query in one group: 8 pairs of even elements, 8 of odd ones, and the ends of both chains.
const QUERY_GROUP: usize = 18;

/// Words of a panel of keys or values in one group.
const PANEL_GROUP: usize = GROUP / 2 * PANEL;

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx512Bf16`], and as [`work::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,fma")]
pub(super) unsafe fn run(task: &Task<'_>) {
    // SAFETY: the caller's promise.
    unsafe { work::run::<Avx512Bf16>(task) }
}

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx512Bf16`], and as [`work::merge_item`].
#[target_feature(enable = "avx512f,fma")]
pub(super) unsafe fn merge_item(rows: &Rows<'_>, heads: Heads, item: &Item, states: *mut f32, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { work::merge_item::<Avx512Bf16>(rows, heads, item, states, out) }
}

struct Avx512Bf16;

impl Kernels for Avx512Bf16 {
    const QUERY_GROUP: usize = QUERY_GROUP;
    const KEY_GROUP: usize = PANEL_GROUP;
    const PANEL: usize = PANEL;
    const TILE: usize = tile::QUERIES;

    fn value_words(padded: usize) -> usize {
        padded / PANEL * (ATTENTION_BLOCK / GROUP) * PANEL_GROUP
    }

    #[inline(always)]
    unsafe fn query(q: &[f32], to: *mut u32) {
        // SAFETY: the caller's promise, here and below.
        unsafe { pack::query(q, to) }
    }

    #[inline(always)]
    unsafe fn keys(rows: &BlockRows, dim: usize, to: *mut u32) {
        let whole = dim.is_multiple_of(GROUP);
        // SAFETY: as above.
        unsafe { if whole { pack::keys::<true>(rows, dim, to) } else { pack::keys::<false>(rows, dim, to) } }
    }

    #[inline(always)]
    unsafe fn values(rows: &BlockRows, dim: usize, _tiles: usize, to: *mut u32) -> *const u32 {
        let whole = dim.is_multiple_of(GROUP);
        // SAFETY: as above.
        unsafe { if whole { pack::values::<true>(rows, dim, to) } else { pack::values::<false>(rows, dim, to) } }
        to
    }

    #[inline(always)]
    unsafe fn finite(rows: &BlockRows, dim: usize) -> bool {
        // SAFETY: as above.
        unsafe { pack::finite(rows, dim) }
    }

    #[inline(always)]
    unsafe fn weigh(block: &Scores<'_>, states: &mut [Softmax], weights: *mut u32, factors: &mut [f32]) {
        // SAFETY: as above.
        unsafe { softmax::weigh(block, states, weights, factors) }
    }

    #[inline(always)]
    unsafe fn sums(queries: usize, tile: Tile) {
        // SAFETY: as above.
        unsafe { tile::sums(queries, tile) }
    }

    #[inline(always)]
    unsafe fn scaled_sums(queries: usize, tile: Tile, factors: *const f32) {
        // SAFETY: as above.
        unsafe { tile::scaled_sums(queries, tile, factors) }
    }

    #[inline(always)]
    fn finish(o: &[f32], sum: f32, out: &mut [f32]) {
        out.iter_mut().zip(o).for_each(|(out, o)| *out = o / sum);
    }
}
