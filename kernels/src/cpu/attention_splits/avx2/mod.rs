//! Attention by FMA on 256-bit vectors. Queries, keys, values and weights are bf16 widened to f32, elements of a group in their order.

mod tile;

use super::plan::{Heads, Item};
use super::work::{self, BlockRows, Kernels, PANEL_GROUP, QUERIES_MAX, Scores, Softmax, Tile, chain_ends};
use super::{Rows, Task};
use crate::numerics::flushed::GROUP;
use crate::numerics::{ATTENTION_BLOCK, exp, lanes};
use half::bf16;
use std::arch::x86_64::*;

/// Lanes of a panel.
const PANEL: usize = 16;

/// Words of one query in one group: its elements and the ends of both chains.
const QUERY_GROUP: usize = GROUP + 2;

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx2Fma`], and as [`work::run`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run(task: &Task<'_>) {
    // SAFETY: the caller's promise.
    unsafe { work::run::<Avx2Fma>(task) }
}

/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx2Fma`], and as [`work::merge_item`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn merge_item(rows: &Rows<'_>, heads: Heads, item: &Item, states: *mut f32, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { work::merge_item(rows, heads, item, states, out) }
}

struct Avx2Fma;

impl Kernels for Avx2Fma {
    const QUERY_GROUP: usize = QUERY_GROUP;
    const PANEL: usize = PANEL;
    const TILE: usize = tile::QUERIES;

    #[inline(always)]
    unsafe fn query(q: &[f32], to: *mut u32) {
        for (group, q) in q.chunks(GROUP).enumerate() {
            // SAFETY: the words of a group.
            let to = unsafe { std::slice::from_raw_parts_mut(to.add(group * QUERY_GROUP).cast::<f32>(), QUERY_GROUP) };
            to.fill(0.0);
            to.iter_mut().zip(q).for_each(|(to, x)| *to = bf16::from_f32(*x).to_f32());
            // Padding in q and keys is +0 alike, so that chains need nothing at their end.
            to[GROUP..].copy_from_slice(&chain_ends(GROUP));
        }
    }

    #[inline(always)]
    unsafe fn keys(rows: &BlockRows, next: &BlockRows, dim: usize, to: *mut u32) {
        // SAFETY: the caller's promise, here and below.
        unsafe { keys(rows, next, dim, to) }
    }

    #[inline(always)]
    unsafe fn values(rows: &BlockRows, next: &BlockRows, dim: usize, to: *mut u32) {
        // SAFETY: as above.
        unsafe { values(rows, next, dim, to) }
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
        unsafe { weigh(block, states, weights, factors) }
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
}

/// # Safety
/// `row` is readable for as many bf16 as `to` has elements.
#[inline(always)]
unsafe fn widen(row: *const u16, to: &mut [f32]) {
    for (i, to) in to.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *to = f32::from_bits(u32::from(unsafe { row.add(i).read_unaligned() }) << 16);
    }
}

/// Prefetches a row of `dim` elements.
#[inline(always)]
fn prefetch(row: *const u8, dim: usize) {
    for line in (0..dim * 2).step_by(64) {
        // SAFETY: a hint; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(line).cast()) };
    }
}

/// # Safety
/// As [`Kernels::keys`].
#[target_feature(enable = "avx2,fma")]
unsafe fn keys(rows: &BlockRows, next: &BlockRows, dim: usize, to: *mut u32) {
    let groups = dim.div_ceil(GROUP);
    for (eight, (rows, next)) in rows.as_chunks::<8>().0.iter().zip(next.as_chunks::<8>().0).enumerate() {
        next.iter().for_each(|next| prefetch(*next, dim));
        let (panel, half) = (eight / 2, eight % 2);
        for d in (0..groups * GROUP).step_by(8) {
            let mut columns = [_mm256_setzero_ps(); 8];
            // SAFETY: the rows' elements, and words of the panel's group.
            unsafe {
                for (column, row) in columns.iter_mut().zip(rows) {
                    let row = row.cast::<u16>().wrapping_add(d);
                    *column = if d + 8 <= dim {
                        widened(_mm_loadu_si128(row.cast()))
                    } else {
                        let mut padded = [0u16; 8];
                        std::ptr::copy_nonoverlapping(row, padded.as_mut_ptr(), dim.saturating_sub(d));
                        widened(_mm_loadu_si128(padded.as_ptr().cast()))
                    };
                }
                transpose(&mut columns);
                let to = to.add((panel * groups + d / GROUP) * PANEL_GROUP + d % GROUP * PANEL + half * 8);
                for (k, column) in columns.iter().enumerate() {
                    _mm256_store_ps(to.add(k * PANEL).cast(), *column);
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn widened(x: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
}

/// Transposes 8 x 8 elements.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(rows: &mut [__m256; 8]) {
    // Within halves: rows 4i .. 4i + 4 to columns c of the low half and c + 4 of the high half.
    let mut halves = [_mm256_setzero_ps(); 8];
    for i in 0..2 {
        let [a, b, c, d] = [rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]];
        let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
        halves[4 * i] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
        halves[4 * i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
        let (ab, cd) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
        halves[4 * i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
        halves[4 * i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
    }
    for c in 0..4 {
        rows[c] = _mm256_permute2f128_ps::<0x20>(halves[c], halves[4 + c]);
        rows[4 + c] = _mm256_permute2f128_ps::<0x31>(halves[c], halves[4 + c]);
    }
}

/// # Safety
/// As [`Kernels::values`].
#[target_feature(enable = "avx2,fma")]
unsafe fn values(rows: &BlockRows, next: &BlockRows, dim: usize, to: *mut u32) {
    for panel in 0..dim.next_multiple_of(GROUP) / PANEL {
        let len = dim.saturating_sub(panel * PANEL).min(PANEL);
        for (token, row) in rows.iter().enumerate() {
            // SAFETY: the row's elements, and words of the panel: groups of tokens follow one another.
            unsafe {
                let to = to.add(panel * (ATTENTION_BLOCK / GROUP) * PANEL_GROUP + token * PANEL).cast::<[f32; PANEL]>();
                let row = row.cast::<u16>().wrapping_add(panel * PANEL);
                if len == PANEL {
                    widen(row, &mut *to);
                } else {
                    *to = [0.0; PANEL];
                    widen(row, &mut (&mut *to)[..len]);
                }
            }
        }
    }
    next.iter().for_each(|next| prefetch(*next, dim));
}

/// # Safety
/// As [`Kernels::weigh`].
#[target_feature(enable = "avx2,fma")]
unsafe fn weigh(block: &Scores<'_>, states: &mut [Softmax], weights: *mut u32, factors: &mut [f32]) {
    assert!(block.seen.len() <= QUERIES_MAX);
    for (query, ((seen, state), factor)) in block.seen.iter().zip(states).zip(factors).enumerate() {
        // SAFETY: a block of scores, and the words of its weights.
        let (scores, words) = unsafe {
            let words = weights.add(query * ATTENTION_BLOCK / GROUP * QUERY_GROUP).cast::<[[f32; QUERY_GROUP]; 2]>();
            (&mut *block.dots.cast::<[f32; ATTENTION_BLOCK]>().add(query), &mut *words)
        };
        // Tokens that are not attended to are below every score, so their weight is exactly +0.
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);
        let mut most = [f32::NEG_INFINITY; 8];
        for chunk in scores.as_chunks_mut::<8>().0 {
            for (most, score) in most.iter_mut().zip(chunk) {
                *score *= block.scale;
                *most = if *most > *score { *most } else { *score };
            }
        }
        let max = most.into_iter().fold(state.max, f32::max);
        for score in scores.iter_mut() {
            *score = round(exp(*score - max));
        }
        for (group, (words, weights)) in words.iter_mut().zip(scores.as_chunks::<GROUP>().0).enumerate() {
            words[..GROUP].copy_from_slice(weights);
            words[GROUP..].copy_from_slice(&chain_ends(seen.end.saturating_sub(group * GROUP)));
        }
        let mut sums = [0.0; 16];
        for chunk in scores.as_chunks::<16>().0 {
            sums.iter_mut().zip(chunk).for_each(|(sum, weight)| *sum += weight);
        }
        let sum = lanes::merge(std::array::from_fn(|i| sums[i] + sums[i + 8]));
        *factor = exp(state.max - max);
        *state = Softmax { max, sum: state.sum.mul_add(*factor, sum) };
    }
}

/// Rounds to bf16, for numbers that are not negative, and NaN: [`bf16::from_f32`] branches, which no vector does.
#[inline(always)]
fn round(x: f32) -> f32 {
    let bits = x.to_bits().min(0x7fc0_0000); // A NaN, of either sign, would overflow into a number.
    f32::from_bits((bits + (0x7fff + (bits >> 16 & 1))) & 0xffff_0000)
}
