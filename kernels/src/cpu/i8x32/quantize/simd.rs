//! Quantization in vectors. Magnitudes are compared as integers, which puts infinity and NaN last.

use super::{Record, scale};
use crate::cpu::i8x32::BLOCK;
use std::arch::x86_64::*;

/// # Safety
/// As [`super::quantize_row`], with AVX-512 VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")]
pub(super) unsafe fn row_avx512(x: &[f32], to: *mut Record, stride: usize) {
    let magnitude = _mm512_set1_epi32(i32::MAX);
    for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        // SAFETY: two vectors of 16 in a block.
        let x = unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] };
        let [a, b] = x.map(|x| _mm512_and_si512(_mm512_castps_si512(x), magnitude));
        let largest = _mm512_max_epu32(a, b);
        let amax =
            largest_of(_mm256_max_epu32(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64::<1>(largest)));
        let (d, inverse) = scale(amax);
        // A value that is not finite times 0 would be NaN: nothing is converted then.
        let mask = if amax < f32::INFINITY { u16::MAX } else { 0 };
        let inverse = _mm512_set1_ps(inverse);
        let [a, b] = x.map(|x| {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            _mm512_cvtepi32_epi8(_mm512_maskz_cvt_roundps_epi32::<NEAREST>(mask, _mm512_mul_ps(x, inverse)))
        });
        let q = _mm256_set_m128i(b, a);
        let sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
        // SAFETY: the caller's promise.
        unsafe { store(to.add(block * stride), q, sums, d) };
    }
}

/// # Safety
/// As [`super::quantize_row`], with AVX2.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn row_avx2(x: &[f32], to: *mut Record, stride: usize) {
    let magnitude = _mm256_set1_epi32(i32::MAX);
    for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        // SAFETY: four vectors of 8 in a block.
        let x: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.as_ptr().add(i * 8)) });
        let [a, b, c, e] = x.map(|x| _mm256_and_si256(_mm256_castps_si256(x), magnitude));
        let amax = largest_of(_mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, e)));
        let (d, inverse) = scale(amax);
        let mask = _mm256_set1_epi32(if amax < f32::INFINITY { -1 } else { 0 });
        let inverse = _mm256_set1_ps(inverse);
        let [a, b, c, e] = x.map(|x| {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            let rounded = _mm256_round_ps::<NEAREST>(_mm256_mul_ps(x, inverse));
            _mm256_and_si256(_mm256_cvtps_epi32(rounded), mask)
        });
        // Packing interleaves halves of vectors: groups of four come as 0 2 4 6 1 3 5 7.
        let q = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, e));
        let q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        let sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
        // SAFETY: the caller's promise.
        unsafe { store(to.add(block * stride), q, sums, d) };
    }
}

/// The largest of 8 magnitudes.
#[inline]
#[target_feature(enable = "avx2")]
fn largest_of(v: __m256i) -> f32 {
    let v = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_max_epu32(v, _mm_shuffle_epi32::<0b_01_00_11_10>(v));
    let v = _mm_max_epu32(v, _mm_shuffle_epi32::<0b_10_11_00_01>(v));
    f32::from_bits(_mm_cvtsi128_si32(v).cast_unsigned())
}

/// Writes a record of integers `q`, whose sums are those of `sums`: lanes 0 to 3 for the first half, 4 to 7 for the second.
///
/// # Safety
/// `to` is valid for a write.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store(to: *mut Record, q: __m256i, sums: __m256i, d: f32) {
    let pairs = _mm_hadd_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let halves = _mm_hadd_epi32(pairs, pairs); // First, second, first, second.
    let all = _mm_hadd_epi32(halves, halves);
    let minus = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_broadcastq_epi64(halves));
    let minus = _mm256_sllv_epi32(minus, _mm256_setr_epi32(0, 0, 3, 3, 5, 5, 7, 7));
    let scales = _mm_unpacklo_ps(_mm_set_ss(d), _mm_cvtepi32_ps(all));
    let tail = _mm256_blend_epi32::<0b11>(minus, _mm256_castsi128_si256(_mm_castps_si128(scales)));
    // SAFETY: a record is 32 bytes of integers, then d, sum and the corrections of 8, 32 and 128 in this order, as its definition asserts.
    unsafe {
        _mm256_store_si256(to.cast(), q);
        _mm256_store_si256(to.cast::<__m256i>().add(1), tail);
    }
}

const _: () = assert!(
    std::mem::offset_of!(Record, d) == 32
        && std::mem::offset_of!(Record, sum) == 36
        && std::mem::offset_of!(Record, minus_8) == 40
        && std::mem::offset_of!(Record, minus_32) == 48
        && std::mem::offset_of!(Record, minus_128) == 56
);
