//! Queries, keys and values as words of two elements: k (high half) and k + 2 (low half), the order in which VDPBF16PS takes them, or for tiles the
//! neighbours k (low half) and k + 1.

use super::{PANEL, PANEL_GROUP, Sums};
use crate::cpu::attention_splits::work::{BlockRows, chain_ends};
use crate::cpu::simd::avx512::round_bits;
use crate::numerics::ATTENTION_BLOCK;
use crate::numerics::flushed::GROUP;
use std::arch::x86_64::*;

/// Halves of the 16 words of a group, in memory order: `(low, high)` is `(k + 2, k)` for even k ascending, then for odd k, where element
/// k is half `k * scale + offset` of the source.
const fn group_words(scale: u16, offset: u16) -> [u16; 32] {
    let mut out = [0; 32];
    let mut word = 0;
    while word < 16 {
        let k = 4 * (word as u16 % 8) + word as u16 / 8;
        out[2 * word] = (k + 2) * scale + offset;
        out[2 * word + 1] = k * scale + offset;
        word += 1;
    }
    out
}

/// Of 32 bf16.
const OF_BF16: [u16; 32] = group_words(1, 0);

/// Of the high halves of 32 f32 in two vectors; for tiles in their own order.
const OF_HIGH_HALVES: [[u16; 32]; 2] = {
    let mut own = [0; 32];
    let mut k = 0;
    while k < 32 {
        own[k] = k as u16 * 2 + 1;
        k += 1;
    }
    [group_words(2, 1), own]
};

/// Halves of 16 words: high of the second vector, low of the first one; first its lower 16 elements, then its upper ones.
const INTERLEAVED: [[u16; 32]; 2] = {
    let mut out = [[0; 32]; 2];
    let mut i = 0;
    while i < 32 {
        out[i / 16][2 * (i % 16)] = i as u16;
        out[i / 16][2 * (i % 16) + 1] = 32 + i as u16;
        i += 1;
    }
    out
};

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves(indices: &[u16; 32]) -> __m512i {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(indices.as_ptr().cast()) }
}

/// Words of a group whose elements are the high halves of 32 f32, see [`round`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn words<S: Sums>(first: __m512i, second: __m512i) -> __m512i {
    _mm512_permutex2var_epi16(first, halves(&OF_HIGH_HALVES[usize::from(S::TILES)]), second)
}

/// Rounds to bf16 in the high halves, nearest even, subnormals kept: VCVTNEPS2BF16 would flush what rounds up to the least normal number.
/// The low halves are anything. Not for negative numbers; a NaN becomes 0x7fc0.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn round(x: __m512) -> __m512i {
    // A NaN, of either sign, would overflow into a number.
    round_bits(_mm512_min_epu32(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fc0_0000)))
}

/// Rounds a query to bf16 and packs it, `[groups][Sums::QUERY_GROUP]`.
///
/// # Safety
/// The processor has the instructions; `to` has room for the words of all groups.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn query<S: Sums>(q: &[f32], to: *mut u32) {
    for (group, q) in q.chunks(GROUP).enumerate() {
        let mut rounded = [_mm512_setzero_si512(); 2];
        for (rounded, q) in rounded.iter_mut().zip(q.chunks(16)) {
            let mask = u16::MAX >> (16 - q.len());
            // SAFETY: the mask has the bits of `q`.
            let x = unsafe { _mm512_maskz_loadu_ps(mask, q.as_ptr()) };
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let bits = _mm512_mask_mov_epi32(_mm512_castps_si512(x), nan, _mm512_set1_epi32(0x7fc0_0000));
            *rounded = round_bits(bits);
        }
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(group * S::QUERY_GROUP);
            _mm512_storeu_si512(to.cast(), words::<S>(rounded[0], rounded[1]));
            // Padding in q and keys is +0 alike, so that chains need nothing at their end.
            if !S::TILES {
                to.add(16).cast::<[f32; 2]>().write_unaligned(chain_ends(GROUP));
            }
        }
    }
}

/// Elements of a group that rows of `dim` have, as a mask.
#[inline(always)]
fn elements(dim: usize, group: usize) -> u32 {
    u32::MAX >> (GROUP - (dim - group * GROUP).min(GROUP))
}

/// Loads group `group` of a row of `dim` elements, padded with zeros; `WHOLE`: nothing is padded.
///
/// # Safety
/// The row is readable for `dim` bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn load<const WHOLE: bool>(row: *const u8, dim: usize, group: usize) -> __m512i {
    // SAFETY: the mask ends with the row.
    unsafe {
        let row = row.cast::<i16>().add(group * GROUP);
        if WHOLE { _mm512_loadu_si512(row.cast()) } else { _mm512_maskz_loadu_epi16(elements(dim, group), row) }
    }
}

/// Words of a head's keys, packed by [`keys`] or [`key_places`].
pub(super) fn key_words<S: Sums>(padded: usize) -> usize {
    ATTENTION_BLOCK * padded / 2 + if S::FEW > 0 { PLACES } else { 0 }
}

/// Packs keys of some heads with tokens in the lanes: for each head, in [`key_words`], `[panels of 32 tokens][groups of 32 elements][16 words][32 tokens]`.
///
/// # Safety
/// The processor has the instructions; rows are readable for `heads * dim` bf16 each, and `out` has room; `WHOLE` says that `dim` is whole
/// groups.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn keys<S: Sums, const WHOLE: bool>(rows: &BlockRows, heads: usize, dim: usize, out: *mut u32) {
    let groups = dim.div_ceil(GROUP);
    let order = halves(&OF_BF16);
    for head in 0..heads {
        for (vector, rows) in rows.as_chunks::<16>().0.iter().enumerate() {
            let of_head = out.wrapping_add(head * key_words::<S>(groups * GROUP));
            for group in 0..groups {
                let mut words = [_mm512_setzero_si512(); 16];
                for (words, row) in words.iter_mut().zip(rows) {
                    // SAFETY: the caller's promise.
                    let row = unsafe { load::<WHOLE>(head_of(*row, head, dim), dim, group) };
                    *words = if S::TILES { row } else { _mm512_permutexvar_epi16(order, row) };
                }
                transpose(&mut words);
                // SAFETY: there is room for the words of every panel and group.
                unsafe {
                    let to = of_head.add((vector / 2 * groups + group) * PANEL_GROUP + vector % 2 * 16);
                    for (word, lanes) in words.iter().enumerate() {
                        _mm512_store_si512(to.add(word * PANEL).cast(), *lanes);
                    }
                }
            }
        }
    }
}

/// Where the keys of 16 tokens are: elements of the first, and bytes from one token to the next. Each row is readable for whole groups.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) first: *const u8,
    pub(super) stride: usize,
}

/// Tokens of a [`Place`].
const TOKENS: usize = 16;

/// Words of the places of a head's keys.
const PLACES: usize = ATTENTION_BLOCK / TOKENS * size_of::<Place>() / size_of::<u32>();

/// Says where the keys of some heads are: for each head, in [`key_words`], [`PLACES`], and behind these room for copies `[tokens][padded]`. Keys
/// are copied where they are at no equal distances or not whole groups.
///
/// # Safety
/// As [`keys`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn key_places<S: Sums, const WHOLE: bool>(rows: &BlockRows, heads: usize, dim: usize, out: *mut u32) {
    let words = dim.div_ceil(GROUP) * (GROUP / 2);
    for (i, rows) in rows.as_chunks::<TOKENS>().0.iter().enumerate() {
        let stride = rows[1].addr().wrapping_sub(rows[0].addr());
        let is_even =
            rows.iter().enumerate().all(|(token, row)| *row == rows[0].wrapping_add(token.wrapping_mul(stride)));
        for head in 0..heads {
            // SAFETY: the caller's promise; there is room for the places and the words of every head.
            unsafe {
                let of_head = out.add(head * key_words::<S>(2 * words));
                let copies = of_head.add(PLACES + i * TOKENS * words);
                if WHOLE && is_even {
                    of_head.cast::<Place>().add(i).write(Place { first: head_of(rows[0], head, dim), stride });
                    continue;
                }
                for (token, row) in rows.iter().enumerate() {
                    for group in 0..words / (GROUP / 2) {
                        let to = copies.add(token * words + group * (GROUP / 2));
                        _mm512_store_si512(to.cast(), load::<WHOLE>(head_of(*row, head, dim), dim, group));
                    }
                }
                of_head.cast::<Place>().add(i).write(Place { first: copies.cast_const().cast(), stride: words * 4 });
            }
        }
    }
}

/// Tokens ahead of those that are packed whose values are fetched: those of the next block of a pool.
const AHEAD: usize = 16;

/// Fetches so many bytes into the second-level cache.
#[inline(always)]
pub(super) fn fetch(row: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a hint for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(line).cast()) };
    }
}

/// Where the elements of a head are in a row.
#[inline(always)]
fn head_of(row: *const u8, head: usize, dim: usize) -> *const u8 {
    row.wrapping_add(head * dim * size_of::<u16>())
}

/// Transposes 16 x 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: &mut [__m512i; 16]) {
    let mut quarters = [_mm512_setzero_si512(); 16];
    for (rows, quarters) in rows.as_chunks::<4>().0.iter().zip(quarters.as_chunks_mut::<4>().0) {
        *quarters = words_as_rows(*rows);
    }
    for c in 0..4 {
        [rows[c], rows[4 + c], rows[8 + c], rows[12 + c]] =
            quarters_as_rows([quarters[c], quarters[4 + c], quarters[8 + c], quarters[12 + c]]);
    }
}

/// Transposes words within each quarter of 128 bits: word w of row i to word i of row w.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn words_as_rows([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// Transposes quarters of 128 bits: quarter q of row i to quarter i of row q.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn quarters_as_rows([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab, cd) = (_mm512_shuffle_i32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_i32x4::<0b01_00_01_00>(c, d));
    let (ab_high, cd_high) = (_mm512_shuffle_i32x4::<0b11_10_11_10>(a, b), _mm512_shuffle_i32x4::<0b11_10_11_10>(c, d));
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd),
        _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_high, cd_high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_high, cd_high),
    ]
}

/// Packs values of some heads, in the order of memory, with elements in the lanes:
/// `[heads][panels of 32 elements][groups of 32 tokens][16 words][32 elements]`.
///
/// # Safety
/// As [`keys`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn values<S: Sums, const WHOLE: bool>(rows: &BlockRows, heads: usize, dim: usize, out: *mut u32) {
    let (panels, groups) = (dim.div_ceil(PANEL), ATTENTION_BLOCK / GROUP);
    let order = [halves(&INTERLEAVED[0]), halves(&INTERLEAVED[1])];
    let all = rows;
    for (quad, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
        let (group, word) = (quad / 8, quad % 8);
        if S::TILES {
            for ahead in all.iter().skip(4 * quad + AHEAD).take(4) {
                fetch(*ahead, heads * dim * size_of::<u16>());
            }
        }
        // Word, and the tokens of its halves.
        let words = if S::TILES { [(2 * word, 0, 1), (2 * word + 1, 2, 3)] } else { [(word, 2, 0), (8 + word, 3, 1)] };
        for head in 0..heads {
            for panel in 0..panels {
                // SAFETY: the caller's promise; there is room for the words of every panel and group.
                unsafe {
                    let to = out.add(((head * panels + panel) * groups + group) * PANEL_GROUP);
                    for (word, low, high) in words {
                        let to = to.add(word * PANEL);
                        let low = load::<WHOLE>(head_of(rows[low], head, dim), dim, panel);
                        let high = load::<WHOLE>(head_of(rows[high], head, dim), dim, panel);
                        _mm512_store_si512(to.cast(), _mm512_permutex2var_epi16(low, order[0], high));
                        _mm512_store_si512(to.add(16).cast(), _mm512_permutex2var_epi16(low, order[1], high));
                    }
                }
            }
        }
    }
}

/// Whether all elements of all rows are finite.
///
/// # Safety
/// The processor has the instructions; rows are readable for `dim` bf16 each.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn finite(rows: &BlockRows, dim: usize) -> bool {
    let mut most = _mm512_setzero_si512();
    let magnitude = _mm512_set1_epi16(0x7fff);
    for row in rows {
        for group in 0..dim.div_ceil(GROUP) {
            // SAFETY: the caller's promise.
            let x = unsafe { load::<false>(*row, dim, group) };
            most = _mm512_max_epi16(most, _mm512_and_si512(x, magnitude));
        }
    }
    _mm512_cmpge_epi16_mask(most, _mm512_set1_epi16(0x7f80)) == 0
}
