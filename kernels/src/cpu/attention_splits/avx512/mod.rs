//! Attention on 512-bit vectors, whose sums of products are by [VDPBF16PS](vdpbf16ps) or by [tiles](tiles). These differ in the order of words and
//! in how many queries share keys and values.

mod pack;
mod softmax;
mod tiles;
mod vdpbf16ps;

use super::plan::{Heads, Item};
use super::states::{self, Softmax};
use super::work::{self, BlockRows, Kernels, Scores, Tile};
use super::{Rows, Task};
use crate::numerics::ATTENTION_BLOCK;
use crate::numerics::flushed::GROUP;
use std::ops::Range;

/// Lanes of a panel.
const PANEL: usize = 32;

/// Words of a panel of keys or values in one group.
const PANEL_GROUP: usize = GROUP / 2 * PANEL;

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx512Bf16`], and as [`work::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,fma")]
pub(super) unsafe fn run_vdpbf16ps(task: &Task<'_>) {
    // SAFETY: the caller's promise.
    unsafe { work::run::<Avx512<vdpbf16ps::Vdpbf16ps>>(task) }
}

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Amx`], and as [`work::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,fma")]
pub(super) unsafe fn run_amx(task: &Task<'_>) {
    // SAFETY: the caller's promise.
    unsafe { work::run::<Avx512<tiles::Amx>>(task) }
}

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx512`], and as [`work::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,fma")]
pub(super) unsafe fn run_amx_scalar(task: &Task<'_>) {
    // SAFETY: the caller's promise.
    unsafe { work::run::<Avx512<tiles::AmxScalar>>(task) }
}

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx512`], and as [`states::merge_item`].
#[target_feature(enable = "avx512f,fma")]
pub(super) unsafe fn merge_item(rows: &Rows<'_>, heads: Heads, item: &Item, states: *mut f32, out: *mut f32) {
    // SAFETY: the caller's promise. Nothing of merging depends on the products.
    unsafe { states::merge_item::<Avx512<vdpbf16ps::Vdpbf16ps>>(rows, heads, item, states, out) }
}

/// Sums of products. Their functions are as those of [`Kernels`].
#[allow(clippy::missing_safety_doc, reason = "the same as of `Kernels`")]
trait Sums: Default {
    /// Whether words are pairs of neighbours, as TDPBF16PS takes them: see [`pack`].
    const TILES: bool;
    /// Words of one query in one group.
    const QUERY_GROUP: usize;
    /// Most queries at once.
    const QUERIES: usize;
    /// Most queries that take keys where they are; 0: none.
    const FEW: usize;

    unsafe fn sums(&mut self, queries: usize, tile: Tile);
    unsafe fn scaled_sums(&mut self, seen: &[Range<usize>], tile: Tile, factors: &[f32]);
}

#[derive(Default)]
struct Avx512<S>(S);

impl<S: Sums> Kernels for Avx512<S> {
    const QUERY_GROUP: usize = S::QUERY_GROUP;
    const PANEL: usize = PANEL;
    const TILE: usize = S::QUERIES;
    const FEW: usize = S::FEW;

    fn key_words(padded: usize) -> usize {
        pack::key_words::<S>(padded)
    }

    fn value_words(padded: usize) -> usize {
        padded / PANEL * (ATTENTION_BLOCK / GROUP) * PANEL_GROUP
    }

    #[inline(always)]
    unsafe fn query(q: &[f32], to: *mut u32) {
        // SAFETY: the caller's promise, here and below.
        unsafe { pack::query::<S>(q, to) }
    }

    #[inline(always)]
    unsafe fn keys(rows: &BlockRows, heads: usize, dim: usize, few: bool, to: *mut u32) {
        // SAFETY: as above.
        unsafe {
            match (few, dim.is_multiple_of(GROUP)) {
                (true, true) => pack::key_places::<S, true>(rows, heads, dim, to),
                (true, false) => pack::key_places::<S, false>(rows, heads, dim, to),
                (false, true) => pack::keys::<S, true>(rows, heads, dim, to),
                (false, false) => pack::keys::<S, false>(rows, heads, dim, to),
            }
        }
    }

    #[inline(always)]
    unsafe fn values(rows: &BlockRows, heads: usize, dim: usize, _tiles: usize, to: *mut u32) -> *const u32 {
        // SAFETY: as above.
        unsafe {
            if dim.is_multiple_of(GROUP) {
                pack::values::<S, true>(rows, heads, dim, to);
            } else {
                pack::values::<S, false>(rows, heads, dim, to);
            }
        }
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
        unsafe { softmax::weigh::<S>(block, states, weights, factors) }
    }

    #[inline(always)]
    unsafe fn sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: as above.
        unsafe { self.0.sums(queries, tile) }
    }

    #[inline(always)]
    unsafe fn scaled_sums(&mut self, seen: &[Range<usize>], tile: Tile, factors: &[f32]) {
        // SAFETY: as above.
        unsafe { self.0.scaled_sums(seen, tile, factors) }
    }

    #[inline(always)]
    fn finish(o: &[f32], sum: f32, out: &mut [f32]) {
        out.iter_mut().zip(o).for_each(|(out, o)| *out = o / sum);
    }
}
