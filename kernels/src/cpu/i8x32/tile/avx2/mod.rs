//! Tiles of VPMADDUBSW, unsigned weights times signed activations, into i16, which saturates: so many products are added before they are widened
//! as never reach it. Of pairs with weights to 15, all 8 words: `8 * 2 * 15 * 127 = 30480`; to 31, 4 words: 31496; to 63, 2 words: 32004. Q8_0
//! is taken as magnitude times signed activation, `2 * 128 * 127 = 32512`, and needs no correction of the offset.
//!
//! A panel is two halves of 8 features, one after the other: the second finds its half of every line in the first-level cache. From
//! [`nibbles::ROWS_MIN`] rows on, four rows take a panel of four bits at once.

mod nibbles;

use super::{Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0, Stored, Tile, TileSums};
use crate::cpu::i8x32::quantize::{ROWS_MAX, Record};
use crate::cpu::stored::{Format, Kind};
use std::arch::x86_64::*;

/// 8 f16 at `at`, widened.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: the caller has F16C and 16 bytes at `at`.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// As for AVX-512, of features `8 * half..`.
#[inline(always)]
unsafe fn scales<F: Stored>(group: *const u8, sub: usize, half: usize) -> [__m256; 2] {
    // SAFETY: the caller has AVX2 and a group of this format at `group`.
    unsafe {
        let d = halves(group.add(half * 16));
        let m = || halves(group.add(32 + half * 16));
        let bytes = |at: usize| _mm_loadl_epi64(group.add(64 + sub * 32 + at + half * 8).cast());
        let unsigned = |at: usize| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes(at)));
        let signed = |at: usize| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(at)));
        match F::FORMAT {
            Format::Q4_0 | Format::Q8_0 => [d, d],
            Format::Q4_1 => [d, m()],
            Format::Q4K | Format::Q5K => [_mm256_mul_ps(d, unsigned(0)), _mm256_mul_ps(m(), unsigned(16))],
            Format::Q6K => [_mm256_mul_ps(d, signed(0)), _mm256_mul_ps(d, signed(16))],
        }
    }
}

/// The 8 vectors of words of half a block; Q8_0 signed.
#[inline(always)]
unsafe fn words<F: Stored>(block: *const u8, half: usize) -> [__m256i; 8] {
    // SAFETY: the caller has AVX2 and a block of this format at `block`.
    unsafe {
        let load = |v: usize| _mm256_loadu_si256(block.add(v * 64 + half * 32).cast());
        if let Format::Q8_0 = F::FORMAT {
            let sign = _mm256_set1_epi8(-128);
            return std::array::from_fn(|j| _mm256_xor_si256(load(j), sign));
        }
        let low = _mm256_set1_epi8(15);
        let words: [__m256i; 8] = std::array::from_fn(|j| {
            let v = load(j % 4);
            _mm256_and_si256(if j < 4 { v } else { _mm256_srli_epi16::<4>(v) }, low)
        });
        let or =
            |word: __m256i, h: __m256i, mask: i8| _mm256_or_si256(word, _mm256_and_si256(h, _mm256_set1_epi8(mask)));
        match F::FORMAT {
            Format::Q5K => {
                let h = load(4);
                [
                    or(words[0], _mm256_slli_epi16::<4>(h), 16),
                    or(words[1], _mm256_slli_epi16::<3>(h), 16),
                    or(words[2], _mm256_slli_epi16::<2>(h), 16),
                    or(words[3], _mm256_slli_epi16::<1>(h), 16),
                    or(words[4], h, 16),
                    or(words[5], _mm256_srli_epi16::<1>(h), 16),
                    or(words[6], _mm256_srli_epi16::<2>(h), 16),
                    or(words[7], _mm256_srli_epi16::<3>(h), 16),
                ]
            }
            Format::Q6K => std::array::from_fn(|j| {
                let h = load(4 + j / 4);
                let h = match j % 4 {
                    0 => _mm256_slli_epi16::<4>(h),
                    1 => _mm256_slli_epi16::<2>(h),
                    2 => h,
                    _ => _mm256_srli_epi16::<2>(h),
                };
                or(words[j], h, 48)
            }),
            _ => words,
        }
    }
}

/// Exact sums of the first and of the second 4 words.
#[inline(always)]
unsafe fn dots<F: Stored>(x: *const Record, words: &[__m256i; 8]) -> [__m256i; 2] {
    // SAFETY: the caller has AVX2 and a record at `x`.
    unsafe {
        let q = (&raw const (*x).q).cast::<i32>();
        let ones = _mm256_set1_epi16(1);
        let pairs = |j: usize| {
            let x = _mm256_set1_epi32(q.add(j).read());
            if let Format::Q8_0 = F::FORMAT {
                _mm256_maddubs_epi16(_mm256_abs_epi8(words[j]), _mm256_sign_epi8(x, words[j]))
            } else {
                _mm256_maddubs_epi16(words[j], x)
            }
        };
        let wide = |pairs: __m256i| _mm256_madd_epi16(pairs, ones);
        let two = |j: usize| _mm256_add_epi16(pairs(j), pairs(j + 1));
        let four = |j: usize| _mm256_add_epi16(two(j), two(j + 2));
        match F::FORMAT {
            Format::Q4_0 | Format::Q4_1 | Format::Q4K => {
                [wide(_mm256_add_epi16(four(0), four(4))), _mm256_setzero_si256()]
            }
            Format::Q5K => [wide(four(0)), wide(four(4))],
            Format::Q6K => {
                let half = |j: usize| _mm256_add_epi32(wide(two(j)), wide(two(j + 2)));
                [half(0), half(4)]
            }
            Format::Q8_0 => {
                let two = |j: usize| _mm256_add_epi32(wide(pairs(j)), wide(pairs(j + 1)));
                let four = |j: usize| _mm256_add_epi32(two(j), two(j + 2));
                [four(0), four(4)]
            }
        }
    }
}

/// Adds a block, of these exact sums of the first and of the second half of its products, to the sums of one row.
#[inline(always)]
unsafe fn add<F: Stored>(x: *const Record, [first, second]: [__m256i; 2], scales: [__m256; 2], acc: __m256) -> __m256 {
    // SAFETY: the caller has AVX2 with FMA and a record at `x`.
    unsafe {
        let all = || {
            let all = _mm256_add_epi32(first, second);
            let all = match F::FORMAT {
                Format::Q4_0 => _mm256_add_epi32(all, _mm256_set1_epi32((*x).minus_8[0] + (*x).minus_8[1])),
                _ => all,
            };
            _mm256_cvtepi32_ps(all)
        };
        let term = match F::FORMAT.kind() {
            Kind::One => _mm256_mul_ps(scales[0], all()),
            Kind::Min => _mm256_fmadd_ps(scales[0], all(), _mm256_mul_ps(scales[1], _mm256_set1_ps((*x).sum))),
            Kind::Two => {
                let first = _mm256_add_epi32(first, _mm256_set1_epi32((*x).minus_32[0]));
                let second = _mm256_add_epi32(second, _mm256_set1_epi32((*x).minus_32[1]));
                let first = _mm256_mul_ps(scales[0], _mm256_cvtepi32_ps(first));
                _mm256_fmadd_ps(scales[1], _mm256_cvtepi32_ps(second), first)
            }
        };
        _mm256_fmadd_ps(_mm256_set1_ps((*x).d), term, acc)
    }
}

/// `R` rows of a tile of `rows`, from `first` on.
///
/// # Safety
/// As [`tile`], and `first + R <= rows`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn part<F: Stored, const R: usize>(tile: &Tile<'_>, rows: usize, first: usize, sums: &mut TileSums) {
    for half in 0..2 {
        let mut acc = [_mm256_setzero_ps(); R];
        // SAFETY: the caller's promise.
        unsafe {
            let mut x = tile.x.as_ptr().add(tile.blocks.start * rows + first);
            for block in tile.blocks.clone() {
                let place = tile.place::<F>(block);
                if half == 0 {
                    tile.prefetch::<F>(&place);
                }
                let (scales, words) = (scales::<F>(place.group, place.sub, half), words::<F>(place.block, half));
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = add::<F>(x.add(r), dots::<F>(x.add(r), &words), scales, *acc);
                }
                x = x.add(rows);
            }
        }
        for (sums, acc) in sums[first..].iter_mut().zip(acc) {
            // SAFETY: 8 of 16 f32.
            unsafe { _mm256_storeu_ps(sums.0.as_mut_ptr().add(half * 8), acc) };
        }
    }
}

/// One tile of `rows` rows.
///
/// # Safety
/// The processor has the instructions; x holds `rows` records and w the bytes of every block of the tile; `rows` is at most 16.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<F: Stored>(tile: &Tile<'_>, rows: usize, sums: &mut TileSums) {
    let mut first = match F::FORMAT {
        // SAFETY: the caller's promise.
        Format::Q4_0 | Format::Q4_1 | Format::Q4K if rows >= nibbles::ROWS_MIN => unsafe {
            nibbles::tile::<F>(tile, rows, sums)
        },
        _ => 0,
    };
    while first < rows {
        // SAFETY: the caller's promise.
        unsafe {
            match rows - first {
                4.. => part::<F, 4>(tile, rows, first, sums),
                3 => part::<F, 3>(tile, rows, first, sums),
                2 => part::<F, 2>(tile, rows, first, sums),
                _ => part::<F, 1>(tile, rows, first, sums),
            }
        }
        first += 4;
    }
    debug_assert!(rows <= ROWS_MAX);
}

/// A tile for any number of rows.
type Run = unsafe fn(&Tile<'_>, usize, &mut TileSums);

/// Tiles of each format.
pub(super) static TILES: [Run; 6] = [tile::<Q4_0>, tile::<Q4_1>, tile::<Q8_0>, tile::<Q4K>, tile::<Q5K>, tile::<Q6K>];
