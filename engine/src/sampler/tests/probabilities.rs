//! `exp` and log-probabilities against the standard library.

use super::{logits, sample_at};
use crate::sampler::exp::exp;
use crate::sampler::{log_sum_exp, token_logprobs};
use baton_types::SamplingParams;

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let points = (0..200_000).map(|i| -f64::from(i) * 0.003_541_7).chain([-1e-300, -1e-17, -0.346_573_59, -707.999]);
    for x in points.filter(|&x| x > -708.0) {
        let off = exp(x).to_bits().abs_diff(x.exp().to_bits());
        assert!(off <= 2, "exp({x}) is {} and should be {}", exp(x), x.exp());
    }
    assert_eq!(exp(0.0), 1.0);
    assert_eq!([-708.1, -1e9, f64::MIN].map(exp), [0.0; 3]);
}

#[test]
fn log_probabilities_are_those_of_the_softmax() {
    for vocab in [1, 7, 1000] {
        let logits = logits(vocab, 3);
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((log_sum_exp(&logits) - sum.ln()).abs() < 1e-12);
        let all = token_logprobs(&logits, 0, vocab);
        assert!((all.top.iter().map(|(_, p)| f64::from(*p).exp()).sum::<f64>() - 1.0).abs() < 1e-6);
        assert_eq!(all.chosen, (f64::from(logits[0]) - sum.ln()) as f32);
        assert!(all.top.is_sorted_by(|a, b| a.1 >= b.1));
    }
    // Large logits neither overflow nor lose the small differences.
    let shifted = token_logprobs(&[30_000.0, 30_001.0], 1, 0);
    assert!((shifted.chosen - -0.313_261_7).abs() < 1e-6);
    assert_eq!(shifted.top, []);
}

#[test]
fn ties_are_reported_by_lowest_id_and_only_where_asked() {
    let logits = [0.0, 1.0, 1.0, 0.0];
    let top =
        |n| sample_at(&SamplingParams { logprobs: n, temperature: 1.5, ..Default::default() }, &logits, 0).logprobs;
    assert_eq!(top(None), None);
    assert_eq!(top(Some(0)).unwrap().top, []);
    let ids = |n| top(Some(n)).unwrap().top.iter().map(|t| t.0).collect::<Vec<_>>();
    assert_eq!(ids(1), [1]);
    assert_eq!(ids(3), [1, 2, 0]);
    assert_eq!(ids(20), [1, 2, 0, 3]);
}
