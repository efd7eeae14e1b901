//! Weights of four bits times many rows: four rows at a time take all 16 features of a panel, so that each word of activations is read once for
//! both halves. Nibbles are unpacked once for all rows of the tile, in the first-level cache.

use super::{add, scales, words};
use crate::cpu::i8x32::PANEL;
use crate::cpu::i8x32::quantize::Record;
use crate::cpu::i8x32::tile::{Stored, Sums, Tile, TileSums};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Rows that are computed side by side.
const ROWS: usize = 4;

/// Fewer rows are faster without a copy of the weights: four took 1.1 times as long with it, eight 0.94.
pub(super) const ROWS_MIN: usize = 8;

/// Blocks that are unpacked at once: 10 KiB.
const CHUNK: usize = 16;

/// A block of a panel.
#[repr(C, align(64))]
struct Unpacked {
    /// 8 words of each feature, a byte for each weight.
    words: [[__m256i; 2]; 8],
    /// Of each half: the scales of [`scales`].
    scales: [[__m256; 2]; 2],
}

/// The first rows of a tile, as many as are multiples of [`ROWS`]; returns how many.
///
/// # Safety
/// As [`super::tile`]; the weights have four bits.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn tile<F: Stored>(tile: &Tile<'_>, rows: usize, sums: &mut TileSums) -> usize {
    let fours = rows / ROWS * ROWS;
    let mut chunk = [const { MaybeUninit::<Unpacked>::uninit() }; CHUNK];
    sums[..fours].iter_mut().for_each(|sums| sums.0 = [0.0; PANEL]);
    for from in tile.blocks.clone().step_by(CHUNK) {
        let blocks = from..(from + CHUNK).min(tile.blocks.end);
        // SAFETY: the caller's promise.
        blocks.clone().zip(&mut chunk).for_each(|(block, to)| unsafe { unpack::<F>(tile, block, to) });
        for first in (0..fours).step_by(ROWS) {
            for (block, weights) in blocks.clone().zip(&chunk) {
                // SAFETY: the block was unpacked; x has a record of each row and block.
                unsafe {
                    let x = tile.x.as_ptr().add(block * rows + first);
                    four::<F>(x, weights.assume_init_ref(), &mut sums[first..first + ROWS]);
                }
            }
        }
    }
    fours
}

/// # Safety
/// As [`tile`], for a block of it.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<F: Stored>(tile: &Tile<'_>, block: usize, to: &mut MaybeUninit<Unpacked>) {
    // SAFETY: the caller's promise.
    unsafe {
        let place = tile.place::<F>(block);
        tile.prefetch::<F>(&place);
        let to = to.as_mut_ptr();
        for half in 0..2 {
            for (j, word) in words::<F>(place.block, half).into_iter().enumerate() {
                (&raw mut (*to).words[j][half]).write(word);
            }
            (&raw mut (*to).scales[half]).write(scales::<F>(place.group, place.sub, half));
        }
    }
}

/// Adds a block to the sums of four rows.
///
/// # Safety
/// The processor has the instructions; `x` has four records and `sums` four rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four<F: Stored>(x: *const Record, weights: &Unpacked, sums: &mut [Sums]) {
    // SAFETY: the caller's promise.
    unsafe {
        let dots = dots(x, &weights.words);
        for (r, (dots, sums)) in dots.into_iter().zip(sums).enumerate() {
            for (half, dot) in dots.into_iter().enumerate() {
                let sums = sums.0.as_mut_ptr().add(half * 8);
                let wide = _mm256_madd_epi16(dot, _mm256_set1_epi16(1));
                let acc = _mm256_load_ps(sums);
                let acc = add::<F>(x.add(r), [wide, _mm256_setzero_si256()], weights.scales[half], acc);
                _mm256_store_ps(sums, acc);
            }
        }
    }
}

/// The first word of a row's activations times both halves of a panel.
macro_rules! first_word {
    ($row:literal, $sum0:literal $sum1:literal) => {
        concat!(
            "vpbroadcastd ymm10, dword ptr [{x} + 64*",
            $row,
            "]\n",
            "vpmaddubsw ymm",
            $sum0,
            ", ymm8, ymm10\n",
            "vpmaddubsw ymm",
            $sum1,
            ", ymm9, ymm10\n",
        )
    };
}

/// A later word, added to the products of those before it.
macro_rules! word {
    ($at:literal, $row:literal, $x:literal $products0:literal $products1:literal, $sum0:literal $sum1:literal) => {
        concat!(
            "vpbroadcastd ymm",
            $x,
            ", dword ptr [{x} + 64*",
            $row,
            " + 4*",
            $at,
            "]\n",
            "vpmaddubsw ymm",
            $products0,
            ", ymm8, ymm",
            $x,
            "\n",
            "vpmaddubsw ymm",
            $products1,
            ", ymm9, ymm",
            $x,
            "\n",
            "vpaddw ymm",
            $sum0,
            ", ymm",
            $sum0,
            ", ymm",
            $products0,
            "\n",
            "vpaddw ymm",
            $sum1,
            ", ymm",
            $sum1,
            ", ymm",
            $products1,
            "\n",
        )
    };
}

/// A word of all four rows.
macro_rules! words_of_rows {
    ($($at:literal)*) => {
        concat!($(
            "vmovdqa ymm8, [{w} + 64*", $at, "]\n",
            "vmovdqa ymm9, [{w} + 64*", $at, " + 32]\n",
            word!($at, 0, 10 12 13, 0 1),
            word!($at, 1, 11 14 15, 2 3),
            word!($at, 2, 10 12 13, 4 5),
            word!($at, 3, 11 14 15, 6 7),
        )*)
    };
}

/// Sums of pairs of products in i16, of four rows and both halves. 8 words of weights to 15 do not saturate them.
///
/// # Safety
/// The processor has AVX2; `x` has four records, in which the integers come first.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dots(x: *const Record, words: &[[__m256i; 2]; 8]) -> [[__m256i; 2]; ROWS] {
    let (a0, a1, b0, b1): (__m256i, __m256i, __m256i, __m256i);
    let (c0, c1, d0, d1): (__m256i, __m256i, __m256i, __m256i);
    // SAFETY: reads the words, which are aligned, and the integers of four records.
    unsafe {
        asm!(
            "vmovdqa ymm8, [{w}]",
            "vmovdqa ymm9, [{w} + 32]",
            first_word!(0, 0 1),
            first_word!(1, 2 3),
            first_word!(2, 4 5),
            first_word!(3, 6 7),
            words_of_rows!(1 2 3 4 5 6 7),
            x = in(reg) x,
            w = in(reg) words,
            out("ymm0") a0, out("ymm1") a1, out("ymm2") b0, out("ymm3") b1, out("ymm4") c0, out("ymm5") c1, out("ymm6") d0, out("ymm7") d1,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    [[a0, a1], [b0, b1], [c0, c1], [d0, d1]]
}
