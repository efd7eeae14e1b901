//! AVX-512 F, BW, DQ and VL, and AVX512_BF16.

use super::{Lanes, Order, all};
use crate::cpu::stored::Format;
use std::arch::x86_64::*;
use std::ops::Range;

/// All features of a panel; `BF16`: with AVX512_BF16, which rounds two vectors at once.
struct Avx512<const BF16: bool>;

/// # Safety
/// As [`all`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn expand(format: Format, panel: &[u8], blocks: Range<usize>, order: Order, to: *mut u32) {
    // SAFETY: the caller's promise, and the features of this function.
    unsafe { all::<Avx512<false>>(format, panel, blocks, order, to) };
}

/// # Safety
/// As [`all`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn expand_bf16(format: Format, panel: &[u8], blocks: Range<usize>, order: Order, to: *mut u32) {
    // SAFETY: the caller's promise, and the features of this function.
    unsafe { all::<Avx512<true>>(format, panel, blocks, order, to) };
}

/// Intrinsics that touch no memory.
macro_rules! op {
    ($x:expr) => {
        // SAFETY: the promise of `expand`, from which alone these functions are called.
        unsafe { $x }
    };
}

impl<const BF16: bool> Lanes for Avx512<BF16> {
    const WIDTH: usize = 16;
    type Int = __m512i;
    type Float = __m512;

    #[inline(always)]
    unsafe fn words(from: *const u8) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn halves(from: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store(x: __m512i, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), x) }
    }

    #[inline(always)]
    fn splat(x: u32) -> __m512i {
        op!(_mm512_set1_epi32(x as i32))
    }
    #[inline(always)]
    fn and(a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn add(a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn shift_left(x: __m512i, by: u32) -> __m512i {
        op!(_mm512_sll_epi32(x, _mm_cvtsi32_si128(by as i32)))
    }
    #[inline(always)]
    fn shift_right(x: __m512i, by: u32) -> __m512i {
        op!(_mm512_srl_epi32(x, _mm_cvtsi32_si128(by as i32)))
    }
    #[inline(always)]
    fn float(x: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(x))
    }
    /// From a table: VPERMPS takes the low four bits of each word.
    #[inline(always)]
    fn nibble(x: __m512i, at: u32, offset: u32) -> __m512 {
        op!({
            let words = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            let table = _mm512_cvtepi32_ps(_mm512_sub_epi32(words, _mm512_set1_epi32(offset as i32)));
            _mm512_permutexvar_ps(_mm512_srl_epi32(x, _mm_cvtsi32_si128(4 * at as i32)), table)
        })
    }
    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn pair(high: __m512, low: __m512) -> __m512i {
        if BF16 {
            // Halves of words: those of `low` are the first sixteen, then come those of `high`.
            return op!({
                let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                let words = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
                let of_high = _mm512_slli_epi32::<16>(_mm512_add_epi32(words, _mm512_set1_epi32(16)));
                _mm512_permutexvar_epi16(_mm512_or_si512(words, of_high), both)
            });
        }
        let (high, low) = (rounded(high), rounded(low));
        op!(_mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(low), high))
    }
}

/// Rounded to bf16, in the upper halves.
#[inline(always)]
fn rounded(x: __m512) -> __m512i {
    op!({
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff))
    })
}
