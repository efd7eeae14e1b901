//! Frequencies of tokens: draws against exact probabilities, and against a brute-force sampler.

use super::{logits, sample_at};
use crate::sampling::{distribution, random};
use baton_types::{SamplingParams, TokenId};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Pearson's statistic of `counts` against probabilities.
fn chi_square(counts: &[usize], probabilities: &[f64]) -> f64 {
    let total: usize = counts.iter().sum();
    let term = |(&n, p): (&usize, &f64)| (n as f64 - total as f64 * p).powi(2) / (total as f64 * p);
    counts.iter().zip(probabilities).map(term).sum()
}

/// Value that Pearson's statistic with seven degrees of freedom exceeds once in ten thousand.
const CHI_SQUARE_7_MAX: f64 = 29.88;

#[test]
fn draws_follow_the_tempered_probabilities() {
    let logits = [1.0, -0.5, 2.0, 0.0, 1.5, -1.0, 0.3, 0.9f32];
    for (seed, temperature) in [(11, 0.5f32), (12, 1.0), (13, 2.0)] {
        let params = SamplingParams { temperature, seed, ..Default::default() };
        let mut counts = [0; 8];
        (0..20_000).for_each(|position| counts[sample_at(&params, &logits, position).token as usize] += 1);
        let weights = logits.map(|l| (f64::from(l) / f64::from(temperature)).exp());
        let probabilities = weights.map(|w| w / weights.iter().sum::<f64>());
        let statistic = chi_square(&counts, &probabilities);
        assert!(statistic < CHI_SQUARE_7_MAX, "{statistic} at temperature {temperature}: {counts:?}");
    }
}

#[test]
fn random_numbers_are_uniform_along_every_counter() {
    let streams: [fn(u32) -> f64; 3] = [
        |i| random::uniform(u64::from(i), 0, 0),
        |i| random::uniform(7, i, 0),
        |i| random::uniform(7, 0, u64::from(i)),
    ];
    for (which, stream) in streams.iter().enumerate() {
        let mut counts = [0; 8];
        (0..20_000).for_each(|i| counts[(stream(i) * 8.0) as usize] += 1);
        let statistic = chi_square(&counts, &[0.125; 8]);
        assert!(statistic < CHI_SQUARE_7_MAX, "{statistic} along counter {which}: {counts:?}");
    }
}

/// Sorts the whole vocabulary and normalizes at every stage.
fn brute_force(params: &SamplingParams, logits: &[f32], uniform: f64) -> TokenId {
    let normalize = |tokens: Vec<(TokenId, f64)>| -> Vec<(TokenId, f64)> {
        let sum: f64 = tokens.iter().map(|(_, p)| p).sum();
        tokens.into_iter().map(|(token, p)| (token, p / sum)).collect()
    };
    let scaled = |l: f32| (f64::from(l) / f64::from(params.temperature)).exp();
    let mut tokens = normalize(logits.iter().enumerate().map(|(i, &l)| (i as TokenId, scaled(l))).collect());
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let least = f64::from(params.min_p) * tokens[0].1;
    tokens.retain(|(_, p)| *p >= least);
    tokens = normalize(tokens);
    if params.top_k != 0 {
        tokens.truncate(params.top_k as usize);
        tokens = normalize(tokens);
    }
    if params.top_p < 1.0 {
        let mut before = 0.0;
        tokens.retain(|(_, p)| {
            let keep = before < f64::from(params.top_p);
            before += p;
            keep
        });
        tokens = normalize(tokens);
    }
    tokens.sort_by_key(|(token, _)| *token);
    let mut sum = 0.0;
    let drawn = tokens.iter().find(|(_, p)| {
        sum += p;
        sum > uniform
    });
    drawn.or(tokens.last()).unwrap().0
}

#[test]
fn draws_equal_those_of_a_brute_force_sampler() {
    let mut rng = StdRng::seed_from_u64(99);
    for case in 0..400 {
        let logits = logits([3, 50, 700, 5000][case % 4], case as u64);
        let params = SamplingParams {
            temperature: rng.random_range(0.2..2.0),
            top_p: if case % 3 == 0 { 1.0 } else { rng.random_range(0.05..1.0) },
            min_p: if case % 7 < 4 { 0.0 } else { rng.random_range(0.0001..0.3) },
            top_k: if case % 5 < 2 { 0 } else { rng.random_range(1..logits.len() as u32) },
            ..Default::default()
        };
        for _ in 0..4 {
            let uniform = rng.random();
            let (ours, theirs) =
                (distribution::draw(&params, &logits, uniform), brute_force(&params, &logits, uniform));
            assert_eq!(ours, theirs, "{params:?}, vocabulary {}, uniform {uniform}", logits.len());
        }
    }
}

#[test]
fn extreme_random_numbers_stay_inside_the_distribution() {
    let params = SamplingParams { temperature: 1.0, ..Default::default() };
    // The first and last tokens have weight zero.
    let logits = [-2000.0, 0.0, 0.0, -2000.0f32];
    let largest = 1.0 - f64::EPSILON / 2.0;
    assert_eq!(distribution::draw(&params, &logits, 0.0), 1);
    assert_eq!(distribution::draw(&params, &logits, largest), 2);
}
