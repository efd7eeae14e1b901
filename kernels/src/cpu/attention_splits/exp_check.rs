//! Tests of an `exp` of vectors.

use crate::numerics::{EXP_LO, exp};
use half::bf16;

/// Compares an exp of vectors with the scalar one, over values that are not above 0 and NaN. Below `least` it has to be zero, where bf16 nearest to
/// the scalar one is subnormal.
pub(super) fn check_exp<const LANES: usize>(least: f32, exp_of: impl Fn(&[f32; LANES], &mut [f32; LANES])) {
    let mut x: Vec<f32> = (0..=(-110.0f32).to_bits() - (-0.0f32).to_bits())
        .step_by(997)
        .map(|bits| f32::from_bits((-0.0f32).to_bits() + bits))
        .collect();
    x.extend([0.0, -0.0, EXP_LO, f32::NEG_INFINITY, f32::MIN, f32::NAN, -f32::NAN, f32::from_bits(0x7f81_0000)]);
    for x in x.chunks(LANES) {
        let (mut padded, mut got) = ([0.0f32; LANES], [0.0f32; LANES]);
        padded[..x.len()].copy_from_slice(x);
        exp_of(&padded, &mut got);
        for (x, got) in padded.iter().zip(got) {
            let mut want = exp(*x);
            if *x < least {
                assert!(bf16::from_f32(want) < bf16::MIN_POSITIVE, "exp({x})");
                want = 0.0;
            }
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "exp({x}): {got}, {want}");
        }
    }
}
