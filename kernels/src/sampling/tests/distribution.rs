//! Draws against a brute-force sampler, and the random numbers behind them.

use super::{chi_square, chi_square_max, exact, logits};
use crate::sampling::{distribution, random};
use baton_types::{SamplingParams, TokenId};
use rand::{Rng, SeedableRng, rngs::StdRng};

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
        assert!(statistic < chi_square_max(7), "{statistic} along counter {which}: {counts:?}");
    }
}

/// A draw from the exact probabilities.
fn brute_force(params: &SamplingParams, logits: &[f32], uniform: f64) -> TokenId {
    let probabilities = exact::filtered(params, logits.iter().map(|logit| f64::from(*logit)).collect());
    let mut sum = 0.0;
    let drawn = probabilities.iter().position(|p| {
        sum += p;
        sum > uniform
    });
    drawn.or(probabilities.iter().rposition(|p| *p > 0.0)).unwrap() as TokenId
}

#[test]
fn draws_equal_those_of_a_brute_force_sampler() {
    let mut rng = StdRng::seed_from_u64(99);
    for case in 0..400 {
        let logits = logits([3, 50, 700, 5000][case % 4], case as u64);
        let params = SamplingParams {
            temperature: rng.random_range(0.2..2.0),
            top_p: if case % 3 == 0 { 1.0 } else { rng.random_range(0.05..1.0) },
            typical_p: if case % 11 < 6 { 1.0 } else { rng.random_range(0.05..1.0) },
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
