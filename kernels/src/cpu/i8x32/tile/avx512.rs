//! Tiles of VPDPBUSD: unsigned weights times signed activations, 4 k at once, into i32.
//!
//! The 8 vectors of a block's weights are unpacked once and stay in registers for all rows of the tile; activations are broadcast from
//! memory by the instruction itself. A row has two chains of 4, whose starts are the corrections of the offset, and then 3 roundings.

use super::{Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0, Run, Stored, Sums, Tile, TileSums};
use crate::cpu::i8x32::quantize::{ROWS_MAX, Record};
use crate::cpu::stored::{Format, Kind};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

/// 16 f16 at `at`, widened.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller has AVX-512F and 32 bytes at `at`.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// The two scales of a block, or its scale and minimum (a format with one scale has it twice), of 16 features.
#[inline(always)]
pub(super) unsafe fn scales<F: Stored>(group: *const u8, sub: usize) -> [__m512; 2] {
    // SAFETY: the caller has AVX-512F and a group of this format at `group`.
    unsafe {
        let d = halves(group);
        let bytes = |at: usize| _mm_loadu_si128(group.add(64 + sub * 32 + at).cast());
        match F::FORMAT {
            Format::Q4_0 | Format::Q8_0 => [d, d],
            Format::Q4_1 => [d, halves(group.add(32))],
            Format::Q4K | Format::Q5K => [
                _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(0)))),
                _mm512_mul_ps(halves(group.add(32)), _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(16)))),
            ],
            Format::Q6K => [
                _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(0)))),
                _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(16)))),
            ],
        }
    }
}

/// The 8 vectors of words of a block.
#[inline(always)]
pub(super) unsafe fn words<F: Stored>(block: *const u8) -> [__m512i; 8] {
    // SAFETY: the caller has AVX-512F and a block of this format at `block`.
    unsafe {
        let load = |v: usize| _mm512_loadu_si512(block.add(v * 64).cast());
        if let Format::Q8_0 = F::FORMAT {
            return [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        }
        let low = _mm512_set1_epi8(15);
        let first = |v: __m512i| _mm512_and_si512(v, low);
        let second = |v: __m512i| _mm512_and_si512(_mm512_srli_epi16::<4>(v), low);
        let v = [load(0), load(1), load(2), load(3)];
        let words = [
            first(v[0]),
            first(v[1]),
            first(v[2]),
            first(v[3]),
            second(v[0]),
            second(v[1]),
            second(v[2]),
            second(v[3]),
        ];
        /// `a | (b & c)`
        const OR_AND: i32 = 0xf8;
        match F::FORMAT {
            Format::Q5K => {
                let (h, bit) = (load(4), _mm512_set1_epi8(16));
                let or = |word: __m512i, h: __m512i| _mm512_ternarylogic_epi32::<OR_AND>(word, h, bit);
                [
                    or(words[0], _mm512_slli_epi16::<4>(h)),
                    or(words[1], _mm512_slli_epi16::<3>(h)),
                    or(words[2], _mm512_slli_epi16::<2>(h)),
                    or(words[3], _mm512_slli_epi16::<1>(h)),
                    or(words[4], h),
                    or(words[5], _mm512_srli_epi16::<1>(h)),
                    or(words[6], _mm512_srli_epi16::<2>(h)),
                    or(words[7], _mm512_srli_epi16::<3>(h)),
                ]
            }
            Format::Q6K => {
                let (h, bits) = ([load(4), load(5)], _mm512_set1_epi8(48));
                let or = |word: __m512i, h: __m512i| _mm512_ternarylogic_epi32::<OR_AND>(word, h, bits);
                [
                    or(words[0], _mm512_slli_epi16::<4>(h[0])),
                    or(words[1], _mm512_slli_epi16::<2>(h[0])),
                    or(words[2], h[0]),
                    or(words[3], _mm512_srli_epi16::<2>(h[0])),
                    or(words[4], _mm512_slli_epi16::<4>(h[1])),
                    or(words[5], _mm512_slli_epi16::<2>(h[1])),
                    or(words[6], h[1]),
                    or(words[7], _mm512_srli_epi16::<2>(h[1])),
                ]
            }
            _ => words,
        }
    }
}

/// Adds a block to the sums of the row whose record is `$r` records after `$x`.
///
/// In `asm!`, because a compiler that sees all rows at once orders them by weight instead and spills most sums.
macro_rules! row {
    ($F:ident, $r:literal, $x:expr, $w:expr, $s:expr, $acc:expr) => {{
        // Scratch registers; their types make them zmm.
        let _a: __m512i;
        let _b: __m512i;
        let _t: __m512;
        match $F::FORMAT.kind() {
            Kind::Min => asm!(
                "vpxord {a}, {a}, {a}",
                "vpxord {b}, {b}, {b}",
                "vmulps {t}, {s1}, dword ptr [{x} + 64 * {r} + 36]{{1to16}}",
                dots!(),
                "vpaddd {a}, {a}, {b}",
                "vcvtdq2ps {a}, {a}",
                "vfmadd213ps {a}, {s0}, {t}",
                "vfmadd231ps {acc}, {a}, dword ptr [{x} + 64 * {r} + 32]{{1to16}}",
                a = out(zmm_reg) _a, b = out(zmm_reg) _b, t = out(zmm_reg) _t, x = in(reg) $x, r = const $r,
                w0 = in(zmm_reg) $w[0], w1 = in(zmm_reg) $w[1], w2 = in(zmm_reg) $w[2], w3 = in(zmm_reg) $w[3],
                w4 = in(zmm_reg) $w[4], w5 = in(zmm_reg) $w[5], w6 = in(zmm_reg) $w[6], w7 = in(zmm_reg) $w[7],
                s0 = in(zmm_reg) $s[0], s1 = in(zmm_reg) $s[1], acc = inout(zmm_reg) $acc,
                options(pure, readonly, nostack, preserves_flags),
            ),
            Kind::One => asm!(
                "vpbroadcastd {a}, dword ptr [{x} + 64 * {r} + {minus}]",
                "vpbroadcastd {b}, dword ptr [{x} + 64 * {r} + {minus} + 4]",
                dots!(),
                "vpaddd {a}, {a}, {b}",
                "vcvtdq2ps {a}, {a}",
                "vmulps {a}, {a}, {s0}",
                "vfmadd231ps {acc}, {a}, dword ptr [{x} + 64 * {r} + 32]{{1to16}}",
                a = out(zmm_reg) _a, b = out(zmm_reg) _b, x = in(reg) $x, r = const $r, minus = const minus($F::FORMAT),
                w0 = in(zmm_reg) $w[0], w1 = in(zmm_reg) $w[1], w2 = in(zmm_reg) $w[2], w3 = in(zmm_reg) $w[3],
                w4 = in(zmm_reg) $w[4], w5 = in(zmm_reg) $w[5], w6 = in(zmm_reg) $w[6], w7 = in(zmm_reg) $w[7],
                s0 = in(zmm_reg) $s[0], acc = inout(zmm_reg) $acc,
                options(pure, readonly, nostack, preserves_flags),
            ),
            Kind::Two => asm!(
                "vpbroadcastd {a}, dword ptr [{x} + 64 * {r} + {minus}]",
                "vpbroadcastd {b}, dword ptr [{x} + 64 * {r} + {minus} + 4]",
                dots!(),
                "vcvtdq2ps {a}, {a}",
                "vcvtdq2ps {b}, {b}",
                "vmulps {a}, {a}, {s0}",
                "vfmadd213ps {b}, {s1}, {a}",
                "vfmadd231ps {acc}, {b}, dword ptr [{x} + 64 * {r} + 32]{{1to16}}",
                a = out(zmm_reg) _a, b = out(zmm_reg) _b, x = in(reg) $x, r = const $r, minus = const minus($F::FORMAT),
                w0 = in(zmm_reg) $w[0], w1 = in(zmm_reg) $w[1], w2 = in(zmm_reg) $w[2], w3 = in(zmm_reg) $w[3],
                w4 = in(zmm_reg) $w[4], w5 = in(zmm_reg) $w[5], w6 = in(zmm_reg) $w[6], w7 = in(zmm_reg) $w[7],
                s0 = in(zmm_reg) $s[0], s1 = in(zmm_reg) $s[1], acc = inout(zmm_reg) $acc,
                options(pure, readonly, nostack, preserves_flags),
            ),
        }
    }};
}

/// The dots of the first and of the second 16 k.
macro_rules! dots {
    () => {
        "vpdpbusd {a}, {w0}, dword ptr [{x} + 64 * {r}]{{1to16}}
        vpdpbusd {b}, {w4}, dword ptr [{x} + 64 * {r} + 16]{{1to16}}
        vpdpbusd {a}, {w1}, dword ptr [{x} + 64 * {r} + 4]{{1to16}}
        vpdpbusd {b}, {w5}, dword ptr [{x} + 64 * {r} + 20]{{1to16}}
        vpdpbusd {a}, {w2}, dword ptr [{x} + 64 * {r} + 8]{{1to16}}
        vpdpbusd {b}, {w6}, dword ptr [{x} + 64 * {r} + 24]{{1to16}}
        vpdpbusd {a}, {w3}, dword ptr [{x} + 64 * {r} + 12]{{1to16}}
        vpdpbusd {b}, {w7}, dword ptr [{x} + 64 * {r} + 28]{{1to16}}"
    };
}

/// Where a record has the corrections of a format's offset.
const fn minus(format: Format) -> usize {
    match format {
        Format::Q4_0 => offset_of!(Record, minus_8),
        Format::Q6K => offset_of!(Record, minus_32),
        _ => offset_of!(Record, minus_128),
    }
}

const _: () = assert!(offset_of!(Record, d) == 32 && offset_of!(Record, sum) == 36 && size_of::<Record>() == 64);

/// One tile of `R` rows.
///
/// # Safety
/// The processor has the instructions; x holds `R` records and w the bytes of every block of the tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<F: Stored, const R: usize>(tile: &Tile<'_>, sums: &mut TileSums) {
    let mut acc = [_mm512_setzero_ps(); ROWS_MAX];
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = tile.x.as_ptr().add(tile.blocks.start * R);
        for block in tile.blocks.clone() {
            let place = tile.place::<F>(block);
            tile.prefetch::<F>(&place);
            let (scales, words) = (scales::<F>(place.group, place.sub), words::<F>(place.block));
            macro_rules! rows {
                ($($r:literal)*) => {$(
                    if $r < R {
                        row!(F, $r, x, words, scales, acc[$r]);
                    }
                )*};
            }
            rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
            x = x.add(R);
        }
    }
    for (sums, acc) in sums.iter_mut().zip(acc).take(R) {
        // SAFETY: 16 f32, aligned to 64.
        unsafe { _mm512_store_ps((&raw mut *sums).cast::<Sums>().cast(), acc) };
    }
}

macro_rules! heights {
    ($($format:ident)*) => {
        [$([
            tile::<$format, 1>, tile::<$format, 2>, tile::<$format, 3>, tile::<$format, 4>, tile::<$format, 5>, tile::<$format, 6>,
            tile::<$format, 7>, tile::<$format, 8>, tile::<$format, 9>, tile::<$format, 10>, tile::<$format, 11>, tile::<$format, 12>,
            tile::<$format, 13>, tile::<$format, 14>, tile::<$format, 15>, tile::<$format, 16>,
        ]),*]
    };
}

/// Tiles of each format, for 1 to 16 rows.
pub(super) static TILES: [[Run; ROWS_MAX]; 6] = heights!(Q4_0 Q4_1 Q8_0 Q4K Q5K Q6K);
