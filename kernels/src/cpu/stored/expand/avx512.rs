//! AVX-512 F, BW, DQ and VL.

use super::{Lanes, Order, all};
use crate::cpu::stored::Format;
use std::arch::x86_64::*;
use std::ops::Range;

/// All features of a panel.
struct Avx512;

/// # Safety
/// As [`all`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn expand(format: Format, panel: &[u8], blocks: Range<usize>, order: Order, to: *mut u32) {
    // SAFETY: the caller's promise, and the features of this function.
    unsafe { all::<Avx512>(format, panel, blocks, order, to) };
}

/// Intrinsics that touch no memory.
macro_rules! op {
    ($x:expr) => {
        // SAFETY: the promise of `expand`, from which alone these functions are called.
        unsafe { $x }
    };
}

impl Lanes for Avx512 {
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
    #[inline(always)]
    fn bits(x: __m512) -> __m512i {
        op!(_mm512_castps_si512(x))
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
    fn pair(high: __m512i, low: __m512i) -> __m512i {
        op!(_mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(low), high))
    }
}
