//! AVX2, FMA and F16C.

use super::{Lanes, Order, all};
use crate::cpu::stored::Format;
use std::arch::x86_64::*;
use std::ops::Range;

/// Half the features of a panel.
struct Avx2;

/// # Safety
/// As [`all`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn expand(format: Format, panel: &[u8], blocks: Range<usize>, order: Order, to: *mut u32) {
    // SAFETY: the caller's promise, and the features of this function.
    unsafe { all::<Avx2>(format, panel, blocks, order, to) };
}

/// Intrinsics that touch no memory.
macro_rules! op {
    ($x:expr) => {
        // SAFETY: the promise of `expand`, from which alone these functions are called.
        unsafe { $x }
    };
}

impl Lanes for Avx2 {
    const WIDTH: usize = 8;
    type Int = __m256i;
    type Float = __m256;

    #[inline(always)]
    unsafe fn words(from: *const u8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())) }
    }
    #[inline(always)]
    unsafe fn halves(from: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store(x: __m256i, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast(), x) }
    }

    #[inline(always)]
    fn splat(x: u32) -> __m256i {
        op!(_mm256_set1_epi32(x as i32))
    }
    #[inline(always)]
    fn and(a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or(a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn add(a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn shift_left(x: __m256i, by: u32) -> __m256i {
        op!(_mm256_sll_epi32(x, _mm_cvtsi32_si128(by as i32)))
    }
    #[inline(always)]
    fn shift_right(x: __m256i, by: u32) -> __m256i {
        op!(_mm256_srl_epi32(x, _mm_cvtsi32_si128(by as i32)))
    }
    #[inline(always)]
    fn float(x: __m256i) -> __m256 {
        op!(_mm256_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn mul(a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn pair(high: __m256, low: __m256) -> __m256i {
        let (high, low) = (rounded(high), rounded(low));
        op!(_mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high))
    }
}

/// Rounded to bf16, in the upper halves.
#[inline(always)]
fn rounded(x: __m256) -> __m256i {
    op!({
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff))
    })
}
