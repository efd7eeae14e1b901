//! Attention sinks: a score of each query head that joins the softmax without a value (Xiao et al., "Efficient Streaming Language Models with
//! Attention Sinks", arXiv:2309.17453; learned, as in gpt-oss). It joins once, behind all tokens, so that its place depends on nothing.

use super::{exp, exp2};
use std::f32::consts::LOG2_E;

/// What a sink makes of a softmax state: the factor of the weighted values, and the sum of the weights.
#[inline(always)] // As `exp`.
pub fn join_sink(max: f32, sum: f32, sink: f32) -> [f32; 2] {
    let top = max.max(sink);
    let a = exp(max - top);
    [a, sum.mul_add(a, exp(sink - top))]
}

/// As [`join_sink`], by the power of two of attention on tensor cores. `max` is that of products, whose scores have this factor in the exponent.
#[inline(always)]
pub fn join_sink_by_exp2(max: f32, factor: f32, sum: f32, sink: f32) -> [f32; 2] {
    let (max, sink) = (max * factor, sink * LOG2_E);
    let top = if max.is_nan() || max > sink { max } else { sink };
    let a = exp2(max - top);
    [a, sum.mul_add(a, exp2(sink - top))]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state of one token of this score, whose value is 1.
    fn mean(score: f32, sink: f32) -> [f32; 2] {
        let by_exp = join_sink(score, 1.0, sink);
        let by_exp2 = join_sink_by_exp2(score / 0.3, 0.3 * LOG2_E, 1.0, sink);
        [by_exp, by_exp2].map(|[o, sum]| o / sum)
    }

    #[test]
    fn a_sink_takes_its_share_of_the_softmax() {
        for score in [-30.0f32, -1.0, 0.0, 2.5, 40.0] {
            for sink in [-50.0f32, -2.0, 0.0, 2.5, 3.0, 60.0] {
                let want = 1.0 / (1.0 + f64::from(sink - score).exp());
                for got in mean(score, sink) {
                    assert!((f64::from(got) - want).abs() < 1e-6, "{score} beside {sink}: {got}");
                }
            }
        }
        assert_eq!(mean(5.0, f32::NEG_INFINITY), [1.0; 2], "no sink");
        assert!(mean(f32::NAN, f32::NAN).iter().all(|x| x.is_nan()));
        assert!(join_sink(f32::NEG_INFINITY, f32::NAN, 1.0)[1].is_nan(), "what was not finite stays so");
        assert!(join_sink_by_exp2(f32::NAN, 1.0, 1.0, 1.0).iter().all(|x| x.is_nan()));
    }
}
