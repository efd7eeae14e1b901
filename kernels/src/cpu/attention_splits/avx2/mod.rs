//! Attention by FMA on 256-bit vectors. Queries and weights are bf16 widened to f32, elements of a group in their order. Keys are packed as
//! words of two neighbouring elements; values are read where they are stored.

mod pack;
mod softmax;
mod tile;

use super::plan::{Heads, Item};
use super::states::{self, Softmax};
use super::work::{self, BlockRows, Kernels, Scores, Tile};
use super::{Rows, Task};
use crate::numerics::ATTENTION_BLOCK;
use crate::numerics::flushed::GROUP;
use half::bf16;
use std::ops::Range;

/// Lanes of a panel.
const PANEL: usize = 16;

/// Words of one query in one group: its elements and the ends of both chains.
const QUERY_GROUP: usize = GROUP + 2;

/// Words of a panel of keys in one group.
const KEY_GROUP: usize = GROUP / 2 * PANEL;

/// Words of the addresses of a block's rows.
const ROW_WORDS: usize = size_of::<BlockRows>() / 4;

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx2Fma`], and as [`work::run`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run(task: &Task<'_>) {
    // SAFETY: the caller's promise.
    unsafe { work::run::<Avx2Fma>(task) }
}

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx2Fma`], and as [`states::merge_item`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn merge_item(rows: &Rows<'_>, heads: Heads, item: &Item, states: *mut f32, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { states::merge_item::<Avx2Fma>(rows, heads, item, states, out) }
}

#[derive(Default)]
struct Avx2Fma;

impl Kernels for Avx2Fma {
    const QUERY_GROUP: usize = QUERY_GROUP;
    const PANEL: usize = PANEL;
    const TILE: usize = tile::QUERIES;
    const FEW: usize = 0;

    fn key_words(padded: usize) -> usize {
        ATTENTION_BLOCK / PANEL * (padded / GROUP) * KEY_GROUP
    }

    fn value_words(padded: usize) -> usize {
        ROW_WORDS + ATTENTION_BLOCK * padded / 2
    }

    #[inline(always)]
    unsafe fn query(q: &[f32], to: *mut u32) {
        // SAFETY: the caller's promise, here and below.
        unsafe { pack::query(q, to) }
    }

    #[inline(always)]
    unsafe fn keys(rows: &BlockRows, heads: usize, dim: usize, _few: bool, to: *mut u32) {
        debug_assert_eq!(heads, 1, "items of one head");
        // SAFETY: as above.
        unsafe { pack::keys(rows, dim, to) }
    }

    #[inline(always)]
    unsafe fn values(rows: &BlockRows, heads: usize, dim: usize, tiles: usize, to: *mut u32) -> *const u32 {
        debug_assert_eq!(heads, 1, "items of one head");
        // SAFETY: as above.
        unsafe { pack::values(rows, dim, tiles, to) }
    }

    #[inline(always)]
    unsafe fn finite(rows: &BlockRows, dim: usize) -> bool {
        rows.iter().all(|row| {
            // SAFETY: as above.
            (0..dim).all(|d| unsafe { row.cast::<bf16>().add(d).read_unaligned() }.is_finite())
        })
    }

    #[inline(always)]
    unsafe fn weigh(block: &Scores<'_>, states: &mut [Softmax], weights: *mut u32, factors: &mut [f32]) {
        // SAFETY: as above.
        unsafe { softmax::weigh(block, states, weights, factors) }
    }

    #[inline(always)]
    unsafe fn sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: as above.
        unsafe { tile::sums(queries, tile) }
    }

    #[inline(always)]
    unsafe fn scaled_sums(&mut self, seen: &[Range<usize>], tile: Tile, factors: &[f32]) {
        // SAFETY: as above.
        unsafe { tile::scaled_sums(seen.len(), tile, factors.as_ptr()) }
    }

    /// Panels have their even elements first.
    #[inline(always)]
    fn finish(o: &[f32], sum: f32, out: &mut [f32]) {
        let mut panels = out.chunks_mut(PANEL);
        for (panel, out) in o.as_chunks::<PANEL>().0.iter().zip(&mut panels) {
            let mut elements = [0.0; PANEL];
            for (i, pair) in elements.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *pair = [panel[i] / sum, panel[i + PANEL / 2] / sum];
            }
            match <&mut [f32; PANEL]>::try_from(&mut *out) {
                Ok(out) => *out = elements,
                Err(_) => out.copy_from_slice(&elements[..out.len()]),
            }
        }
    }
}
