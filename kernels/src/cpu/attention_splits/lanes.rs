//! Eight lanes to one.

use std::arch::x86_64::*;

/// The largest of 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn greatest(x: __m256) -> f32 {
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

/// Lane merge of [`crate::numerics::lanes::merge`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn merged(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
}
