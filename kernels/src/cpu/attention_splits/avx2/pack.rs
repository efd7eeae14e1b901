//! Queries, keys and values of a tile.

use super::{KEY_GROUP, PANEL, QUERY_GROUP, ROW_WORDS};
use crate::cpu::attention_splits::work::{BlockRows, chain_ends};
use crate::numerics::flushed::GROUP;
use std::arch::x86_64::*;

/// Elements of a row that are packed at once.
const ELEMENTS: usize = 16;

/// Tiles of a block up to which rows of values are read where they are: more gain from rows that follow one another.
const TILES_IN_PLACE: usize = 4;

/// Rounds to bf16, nearest even, without a branch.
#[inline(always)]
fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    f32::from_bits((if x.is_nan() { bits | 0x40_0000 } else { nearest }) & 0xffff_0000)
}

/// Rounds a query to bf16 and packs it, `[groups][QUERY_GROUP]`.
///
/// # Safety
/// `to` has room for the words of all groups.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn query(q: &[f32], to: *mut u32) {
    for (group, q) in q.chunks(GROUP).enumerate() {
        // SAFETY: the words of a group.
        let to = unsafe { std::slice::from_raw_parts_mut(to.add(group * QUERY_GROUP).cast::<f32>(), QUERY_GROUP) };
        to.fill(0.0);
        to.iter_mut().zip(q).for_each(|(to, x)| *to = round(*x));
        // Padding in q and keys is +0 alike, so that chains need nothing at their end.
        to[GROUP..].copy_from_slice(&chain_ends(GROUP));
    }
}

/// Packs keys with tokens in the lanes: `[panels of 16 tokens][groups of 32 elements][16 words of two elements][16 tokens]`.
///
/// # Safety
/// The processor has the instructions; rows are readable for `dim` bf16 each, and `to` has room.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn keys(rows: &BlockRows, dim: usize, to: *mut u32) {
    let groups = dim.div_ceil(GROUP);
    for (eight, rows) in rows.as_chunks::<8>().0.iter().enumerate() {
        let (panel, half) = (eight / 2, eight % 2);
        for d in (0..groups * GROUP).step_by(ELEMENTS) {
            let word = d % GROUP / 2;
            // SAFETY: the rows' elements, and words of the panel's group.
            unsafe {
                let to = to.add((panel * groups + d / GROUP) * KEY_GROUP + word * PANEL + half * 8);
                if d + ELEMENTS <= dim {
                    transpose(&rows.map(|row| row.add(d * 2)), to);
                } else {
                    let mut padded = [[0u16; ELEMENTS]; 8];
                    for (padded, row) in padded.iter_mut().zip(rows) {
                        let row = row.cast::<u16>().wrapping_add(d);
                        std::ptr::copy_nonoverlapping(row, padded.as_mut_ptr(), dim.saturating_sub(d));
                    }
                    transpose(&padded.each_ref().map(|row| row.as_ptr().cast()), to);
                }
            }
        }
    }
}

/// Transposes 8 rows of 8 words: word `i` of all rows goes to `to + i * PANEL`.
///
/// # Safety
/// The rows are readable, and `to` is writable and aligned to 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn transpose(rows: &[*const u8; 8], to: *mut u32) {
    for quad in 0..2 {
        let mut words = [_mm256_setzero_ps(); 4];
        for (i, words) in words.iter_mut().enumerate() {
            // SAFETY: the caller's promise. Loads take rows `i` and `i + 4` to the halves, so that no shuffle has to.
            unsafe {
                let low = _mm_loadu_ps(rows[i].add(quad * 16).cast());
                let high = _mm_loadu_ps(rows[i + 4].add(quad * 16).cast());
                *words = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(low), high);
            }
        }
        let [a, b, c, d] = words;
        let pair = |x, y| (_mm256_castps_pd(_mm256_unpacklo_ps(x, y)), _mm256_castps_pd(_mm256_unpackhi_ps(x, y)));
        let ((ab, ab_high), (cd, cd_high)) = (pair(a, b), pair(c, d));
        let columns = [
            _mm256_unpacklo_pd(ab, cd),
            _mm256_unpackhi_pd(ab, cd),
            _mm256_unpacklo_pd(ab_high, cd_high),
            _mm256_unpackhi_pd(ab_high, cd_high),
        ];
        for (i, column) in columns.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm256_store_ps(to.add((quad * 4 + i) * PANEL).cast(), _mm256_castpd_ps(column)) };
        }
    }
}

/// The addresses of the rows of a block: where they are stored, or of copies where many tiles use them or the last panel would read beyond
/// their end.
///
/// # Safety
/// The processor has the instructions; rows are readable for `dim` bf16 each, and `to` has room for addresses and copies, aligned to 64
/// bytes.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn values(rows: &BlockRows, dim: usize, tiles: usize, to: *mut u32) -> *const u32 {
    if dim.is_multiple_of(PANEL) && tiles <= TILES_IN_PLACE {
        return rows.as_ptr().cast();
    }
    let padded = dim.next_multiple_of(PANEL);
    for (token, row) in rows.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let copy = to.add(ROW_WORDS).cast::<u16>().add(token * padded);
            std::ptr::copy_nonoverlapping(row.cast::<u16>(), copy, dim);
            copy.add(dim).write_bytes(0, padded - dim);
            to.cast::<*const u16>().add(token).write(copy);
        }
    }
    to
}
