//! Gates of recurrent layers and of attention's output, composed of operations that every vector unit rounds alike.

use super::exp;

/// `1/3, 1/5, ..., 1/15` from the last: the series of `artanh(s) / s - 1` in `s^2`. For `s <= 1/3` what is left out is under 2^-29 of the sum.
const ARTANH: [f32; 7] = [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0];

/// `ln(1 + x)` for `0 <= x <= 1`, as `2 artanh(x / (2 + x))`; NaN to NaN.
#[inline(always)] // So that `mul_add` is one instruction wherever the caller's target has it.
pub fn log1p(x: f32) -> f32 {
    let s = x / (2.0 + x);
    let z = s * s;
    let mut p = ARTANH[0];
    for c in &ARTANH[1..] {
        p = p.mul_add(z, *c);
    }
    let twice = s + s;
    twice.mul_add(p * z, twice)
}

/// `ln(1 + exp(x))`, as `max(x, 0) + log1p(exp(-|x|))`.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    // A comparison with NaN is false; the other term is NaN then.
    let positive = if x > 0.0 { x } else { 0.0 };
    positive + log1p(exp(-x.abs()))
}

/// What a state is multiplied by: `exp(-(rate * softplus(a + bias)))`.
#[inline(always)]
pub fn decay(a: f32, rate: f32, bias: f32) -> f32 {
    exp(-(rate * softplus(a + bias)))
}

/// `1 / (1 + exp(-x))`
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + exp(-gate))`
#[inline(always)]
pub fn gated(x: f32, gate: f32) -> f32 {
    x / (1.0 + exp(-gate))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest relative error over floats from 2^-40 to `most`, of both signs if the function is of both.
    fn worst(most: f32, signs: &[f32], of: impl Fn(f32) -> (f32, f64)) -> f64 {
        let bits = (f32::to_bits(2f32.powi(-40))..=most.to_bits()).step_by(4001).map(f32::from_bits);
        let all = bits.flat_map(|x| signs.iter().map(move |sign| sign * x));
        all.map(|x| {
            let (got, want) = of(x);
            ((f64::from(got) - want) / want).abs()
        })
        .fold(0.0, f64::max)
    }

    #[test]
    fn errors_are_small_everywhere() {
        let log = worst(1.0, &[1.0], |x| (log1p(x), f64::from(x).ln_1p()));
        assert!((1e-8..2.5e-7).contains(&log), "log1p: {log:e}");
        let plus = worst(80.0, &[1.0, -1.0], |x| (softplus(x), f64::from(x).exp().ln_1p()));
        assert!((1e-8..4e-7).contains(&plus), "softplus: {plus:e}");
        let unit = worst(80.0, &[1.0, -1.0], |x| (sigmoid(x), 1.0 / (1.0 + (-f64::from(x)).exp())));
        assert!((1e-8..4e-7).contains(&unit), "sigmoid: {unit:e}");
    }

    #[test]
    fn special_values() {
        assert_eq!([0.0, 1.0].map(log1p), [0.0, std::f32::consts::LN_2]);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, 100.0].map(softplus), [f32::INFINITY, 0.0, 100.0]);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY].map(|a| decay(a, 0.5, 0.0)), [0.0, 1.0]);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, 0.0].map(sigmoid), [1.0, 0.0, 0.5]);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, 0.0].map(|gate| gated(3.0, gate)), [3.0, 0.0, 1.5]);
        assert!(softplus(f32::NAN).is_nan() && decay(f32::NAN, 1.0, 0.0).is_nan() && gated(1.0, f32::NAN).is_nan());
    }
}
