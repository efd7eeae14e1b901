//! The power of two in attention of tensor cores: few operations, each of which a GPU rounds alike.

use super::{EXP_BIAS, EXP_MAGIC};

/// Coefficients of `r` to `r^5` in `2^r` for `|r| <= 1/2`: those of least relative error (9.2e-8) beside a constant of exactly 1.
pub(crate) const EXP2_POLY: [f32; 5] = [
    f32::from_bits(0x3f31_7215),
    f32::from_bits(0x3e75_fcde),
    f32::from_bits(0x3d63_5ba9),
    f32::from_bits(0x3c1e_7544),
    f32::from_bits(0x3aad_dd0a),
];

/// From here down the result is zero.
pub(crate) const EXP2_LO: f32 = -127.0;

/// `2^x` for `x <= 127`, with a relative error under 2e-7; `exp2(±0) = 1`, zero from -127 down, NaN to NaN.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // A comparison with NaN is false, so that NaN stays.
    let x = if x < EXP2_LO { EXP2_LO } else { x };
    let shifted = x + EXP_MAGIC;
    let r = x - (shifted - EXP_MAGIC);
    let [a, b, c, d, e] = EXP2_POLY;
    let p = [d, c, b, a, 1.0].into_iter().fold(e, |p, next| p.mul_add(r, next));
    let n = (shifted.to_bits() as i32).wrapping_sub(EXP_MAGIC.to_bits() as i32);
    p * f32::from_bits((n.wrapping_add(EXP_BIAS) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_small_everywhere() {
        let mut worst = (0.0, 0.0);
        for bits in (0..=126f32.to_bits()).step_by(4001) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let want = f64::from(x).exp2();
                let error = ((f64::from(exp2(x)) - want) / want).abs();
                if error > worst.0 {
                    worst = (error, x);
                }
            }
        }
        assert!(worst.0 < 2e-7, "{:e} at {}", worst.0, worst.1);
        assert!(worst.0 > 5e-8, "no error at all: the measure is broken");
    }

    #[test]
    fn whole_and_special_values() {
        for n in -126..=127 {
            assert_eq!(exp2(n as f32), 2f32.powi(n), "{n}");
        }
        for (x, want) in [(-0.0, 1.0), (-127.0, 0.0), (-126.6, 0.0), (-1e30, 0.0), (f32::NEG_INFINITY, 0.0)] {
            assert_eq!(exp2(x).to_bits(), f32::to_bits(want), "exp2({x})");
        }
        assert!(exp2(f32::NAN).is_nan() && exp2(f32::from_bits(0x7fff_ffff)).is_nan());
    }
}
