//! Bounds of scores and logits, `cap * tanh(x / cap)`, composed of operations that every vector unit rounds alike.
//!
//! `tanh(y) = 1 - 2 / (e^(2 y) + 1)`. Near zero it is a difference of numbers near one: its error is absolute, under `cap * 2e-7`, which is what
//! matters in a softmax.

use super::{exp, exp2};
use std::f32::consts::LOG2_E;

/// From here on the power of two is so large that the bound is reached.
const EXP2_HI: f32 = 126.0;

/// `cap * tanh(x / cap)` as `cap - 2 cap / (e^(x * (2 / cap)) + 1)`.
#[inline(always)] // As `exp`.
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    cap - (2.0 * cap) / (exp(x * (2.0 / cap)) + 1.0)
}

/// As [`soft_cap`], by the power of two of attention on tensor cores.
#[inline(always)]
pub fn soft_cap_by_exp2(x: f32, cap: f32) -> f32 {
    let power = x * ((2.0 / cap) * LOG2_E);
    // A comparison with NaN is false, so that NaN stays.
    let power = if power > EXP2_HI { EXP2_HI } else { power };
    cap - (2.0 * cap) / (exp2(power) + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_small_and_bounds_are_kept() {
        for cap in [1.0f32, 30.0, 50.0] {
            for f in [soft_cap, soft_cap_by_exp2] {
                for step in -4000..=4000 {
                    let x = step as f32 * 0.11;
                    let want = f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh();
                    let error = (f64::from(f(x, cap)) - want).abs();
                    assert!(error < f64::from(cap) * 3e-7, "{x} below {cap}: {error:e}");
                }
                let ends = [f32::INFINITY, 1e30, 0.0, -0.0, -1e30, f32::NEG_INFINITY].map(|x| f(x, cap));
                assert_eq!(ends, [cap, cap, 0.0, 0.0, -cap, -cap]);
                assert!(f(f32::NAN, cap).is_nan());
            }
        }
    }
}
