//! The exponential of the canonical numerics, composed of operations that every vector unit rounds alike.
//!
//! `exp(x) = 2^n * e^r` with `n = round(x / ln 2)` and `r = x - n ln 2` in two fused steps (Cody and Waite), `e^r` by its Taylor polynomial
//! of degree 7 (truncation under 2^-27 for `|r| <= ln 2 / 2`), and `2^n` applied as two exact powers so that results in the subnormal range
//! are rounded once.

/// Above this the result is infinite; keeps the exponent arithmetic in range.
pub(crate) const EXP_HI: f32 = 89.0;
/// Below this the result rounds to zero.
pub(crate) const EXP_LO: f32 = -104.0;
/// `1 / ln 2`.
pub(crate) const EXP_LOG2E: f32 = std::f32::consts::LOG2_E;
/// `1.5 * 2^23`: adding it leaves the nearest integer in the low bits of the significand.
pub(crate) const EXP_MAGIC: f32 = 12_582_912.0;
/// `ln 2` cut to 15 bits, so that `n * EXP_LN2_HI` is exact for every n in range.
pub(crate) const EXP_LN2_HI: f32 = f32::from_bits(0x3f31_7200);
/// `ln 2 - EXP_LN2_HI`, rounded.
pub(crate) const EXP_LN2_LO: f32 = f32::from_bits(0x35bf_be8e);
/// `1/7!, 1/6!, ..., 1/2!, 1, 1`, in the order of Horner's rule.
pub(crate) const EXP_POLY: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
/// `2 sqrt(2 / pi)`: of `x` in the exponent of [`gelu_tanh`].
pub(crate) const GELU_LINE: f32 = 1.595_769_2;
/// `2 sqrt(2 / pi) * 0.044715`: of `x^3` there.
pub(crate) const GELU_CUBE: f32 = 0.071_354_814;
/// Exponent bias of binary32.
pub(crate) const EXP_BIAS: i32 = 127;

/// `e^x`, at most 2 ulp off (subnormal results included), `exp(±0) = 1`, overflow to infinity, NaN to NaN.
#[inline(always)] // So that `mul_add` is one instruction wherever the caller's target has it.
pub fn exp(x: f32) -> f32 {
    // Written as comparisons, since minps and maxps return their second operand for a NaN.
    let x = if EXP_HI < x { EXP_HI } else { x };
    let x = if EXP_LO > x { EXP_LO } else { x };
    let shifted = x.mul_add(EXP_LOG2E, EXP_MAGIC);
    let n = shifted - EXP_MAGIC;
    let r = n.mul_add(-EXP_LN2_LO, n.mul_add(-EXP_LN2_HI, x));
    let mut p = EXP_POLY[0];
    for c in &EXP_POLY[1..] {
        p = p.mul_add(r, *c);
    }
    let n = (shifted.to_bits() as i32).wrapping_sub(EXP_MAGIC.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(EXP_BIAS) as u32) << 23)
}

/// `x / (1 + exp(-x))`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))` as `x / (1 + exp(-(x * (GELU_LINE + GELU_CUBE x^2))))`: `(1 + tanh(y)) / 2` is
/// `1 / (1 + exp(-2 y))`.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    x / (1.0 + exp(-(x * (x * x).mul_add(GELU_CUBE, GELU_LINE))))
}

/// `(up + 1) * gate / (1 + exp(-(alpha * gate)))`, with the gate bounded by `limit` from above and `up` from both sides (gpt-oss).
#[inline(always)]
pub fn clamped_swiglu(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    // Comparisons with NaN are false, so that NaN stays.
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit { limit } else { up };
    let up = if up < -limit { -limit } else { up };
    (up + 1.0) * (gate / (1.0 + exp(-(alpha * gate))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clamped_unit_is_its_definition() {
        let (alpha, limit) = (1.702f32, 7.0f32);
        for gate in (-400..=400).map(|step| step as f32 * 0.05) {
            for up in [-20.0f32, -7.0, -1.0, 0.0, 0.3, 6.9, 7.1] {
                let g = f64::from(gate.min(limit));
                let want = (f64::from(up.clamp(-limit, limit)) + 1.0) * g / (1.0 + (-f64::from(alpha) * g).exp());
                let error = (f64::from(clamped_swiglu(gate, up, alpha, limit)) - want).abs();
                assert!(error <= want.abs() * 3e-6 + 1e-12, "{gate}, {up}: {error:e}");
            }
        }
        assert!(clamped_swiglu(f32::NAN, 1.0, alpha, limit).is_nan());
        assert!(clamped_swiglu(1.0, f32::NAN, alpha, limit).is_nan());
    }

    #[test]
    fn gelu_is_close_to_its_definition() {
        let c = (2.0 / std::f64::consts::PI).sqrt();
        assert_eq!((GELU_LINE, GELU_CUBE), ((2.0 * c) as f32, (2.0 * c * 0.044715) as f32));
        for step in -3000..=3000 {
            let x = step as f32 * 0.01;
            let wide = f64::from(x);
            let want = wide / 2.0 * (1.0 + (c * (wide + 0.044715 * wide.powi(3))).tanh());
            let error = (f64::from(gelu_tanh(x)) - want).abs();
            assert!(error < 4e-6_f64.min(wide.abs() * 3e-6 + 1e-9), "{x}: {error:e}");
        }
        assert_eq!([f32::NEG_INFINITY, -1e20, 0.0, 1e20].map(gelu_tanh)[1..], [0.0, 0.0, 1e20]);
        assert!(gelu_tanh(f32::NAN).is_nan());
    }

    /// Distance in units in the last place of `want`, for finite values.
    fn ulps(got: f32, want: f64) -> f64 {
        let exponent = (want.log2().floor() as i32).max(-126) - 23;
        ((f64::from(got) - want) / 2f64.powi(exponent)).abs()
    }

    #[test]
    fn exp_is_within_two_ulp_everywhere() {
        let mut worst = (0.0, 0.0);
        // Every 4001st float of both signs from the smallest to the largest relevant argument.
        for bits in (0..=EXP_LO.abs().to_bits()).step_by(4001) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                if x > 88.722 {
                    continue;
                }
                let error = ulps(exp(x), f64::from(x).exp());
                if error > worst.0 {
                    worst = (error, x);
                }
            }
        }
        assert!(worst.0 <= 2.0, "{} ulp at {}", worst.0, worst.1);
        assert!(worst.0 > 0.4, "no error at all: the measure is broken");
    }

    #[test]
    fn exp_of_special_values() {
        for (x, want) in [
            (0.0, 1.0),
            (-0.0, 1.0),
            (f32::INFINITY, f32::INFINITY),
            (f32::NEG_INFINITY, 0.0),
            (200.0, f32::INFINITY),
            (-200.0, 0.0),
        ] {
            assert_eq!(exp(x), want, "exp({x})");
        }
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(silu(0.0), 0.0);
    }
}
