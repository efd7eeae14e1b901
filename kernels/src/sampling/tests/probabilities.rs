//! `exp` and log-probabilities against the standard library.

use super::{logits, sample_at};
use crate::sampling::exp::exp;
use crate::sampling::{log_sum_exp, token_logprobs};
use baton_types::SamplingParams;

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let points = (0..200_000).map(|i| i as f32 * -0.000_434_9).chain([-1e-30, -1e-8, -0.346_573_6, -86.999]);
    for x in points {
        let (ours, theirs) = (exp(x), f64::from(x).exp());
        let unit = f64::from(f32::from_bits(ours.to_bits() + 1) - ours);
        assert!((f64::from(ours) - theirs).abs() <= 2.0 * unit, "exp({x}) is {ours} and should be {theirs}");
    }
    assert_eq!(exp(0.0), 1.0);
    assert_eq!([-87.1, -1e9, f32::MIN, f32::NEG_INFINITY].map(exp), [0.0; 4]);
}

#[test]
fn log_probabilities_are_those_of_the_softmax() {
    for vocab in [1, 7, 1000] {
        let logits = logits(vocab, 3);
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((log_sum_exp(&logits) - sum.ln()).abs() < 1e-7);
        let all = token_logprobs(&logits, 0, vocab);
        assert!((all.top.iter().map(|(_, p)| f64::from(*p).exp()).sum::<f64>() - 1.0).abs() < 1e-6);
        assert!((f64::from(all.chosen) - (f64::from(logits[0]) - sum.ln())).abs() < 1e-6);
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
