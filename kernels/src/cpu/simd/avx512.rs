//! Rounding to bf16, the canonical exponential and the activation on 512-bit vectors.
//!
//! The exponential is rounded as [`crate::numerics::exp()`], with the power of two applied by VSCALEFPS. That rounds once, as the last of the two
//! products does that the definition takes; the other one is exact.

use crate::numerics::{EXP_HI, EXP_LN2_HI, EXP_LN2_LO, EXP_LO, EXP_LOG2E, EXP_MAGIC, EXP_POLY};
use std::arch::x86_64::*;

/// Rounds the bits of numbers to bf16 in the high halves, nearest even, subnormals kept. The low halves are anything, and so is what was NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn round_bits(bits: __m512i) -> __m512i {
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)))
}

/// `p` and `n` of `e^x = p * 2^n`, for x within the range of the exponential, or NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn exp_parts(x: __m512) -> (__m512, __m512) {
    let magic = _mm512_set1_ps(EXP_MAGIC);
    let n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(EXP_LOG2E), magic), magic);
    let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EXP_LN2_HI), x);
    let r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EXP_LN2_LO), r);
    let mut p = _mm512_set1_ps(EXP_POLY[0]);
    for c in &EXP_POLY[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    (p, n)
}

/// [`crate::numerics::exp()`]
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: __m512) -> __m512 {
    // Both take their second operand if it is NaN.
    let x = _mm512_max_ps(_mm512_set1_ps(EXP_LO), _mm512_min_ps(_mm512_set1_ps(EXP_HI), x));
    let (p, n) = exp_parts(x);
    _mm512_scalef_ps(p, n)
}

/// `out = silu(gate) * up`
///
/// # Panics
/// If the lengths differ.
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    for first in (0..out.len()).step_by(16) {
        let mask = u16::MAX >> (16 - (out.len() - first).min(16));
        // SAFETY: the mask ends with the slices.
        unsafe {
            let x = _mm512_maskz_loadu_ps(mask, gate.as_ptr().add(first));
            let up = _mm512_maskz_loadu_ps(mask, up.as_ptr().add(first));
            let one = _mm512_set1_ps(1.0);
            // The sign is flipped by a product with -1, which is exact.
            let silu = _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_mul_ps(x, _mm512_set1_ps(-1.0)))));
            _mm512_mask_storeu_ps(out.as_mut_ptr().add(first), mask, _mm512_mul_ps(silu, up));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::SimdLevel;
    use crate::numerics;
    use baton_skips::{Need, skipped};

    #[test]
    fn activation_has_the_bits_of_the_scalar_one() {
        if !SimdLevel::Avx512.available() {
            return skipped(Need::Avx512, "activation by AVX-512", "the processor has no AVX-512");
        }
        // Every 8191st bit pattern: both signs, subnormals, infinities, NaN.
        let all = (0..=u32::MAX).step_by(8191).map(f32::from_bits);
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 88.8, -88.8, 87.4, -87.4, 103.9, 104.5, f32::NAN];
        let gate: Vec<f32> = all.chain(special).collect();
        let up: Vec<f32> = (0..gate.len()).map(|i| i as f32 * 0.25 - 3.0).collect();
        for len in [gate.len(), 1, 15, 17] {
            let mut out = vec![0.0; len];
            // SAFETY: available, see above.
            unsafe { silu_mul(&gate[..len], &up[..len], &mut out) };
            for ((gate, up), out) in gate.iter().zip(&up).zip(out) {
                let want = numerics::silu(*gate) * up;
                assert!(out.to_bits() == want.to_bits() || out.is_nan() && want.is_nan(), "{gate} {up}: {out}, {want}");
            }
        }
    }
}
