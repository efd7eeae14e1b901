//! Tests of the sampler, by concern.

mod choice;
mod distribution;
mod exact;
mod frequencies;
mod penalties;
mod probabilities;
mod recorded;

use super::{History, Sampled, sample};
use baton_types::SamplingParams;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Logits that look like a model's: most of the mass on few tokens.
fn logits(vocab: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..vocab).map(|_| -10.0 * rng.random::<f32>().ln().abs().sqrt() + rng.random_range(0.0..3.0)).collect()
}

/// Pearson's statistic of `counts` against probabilities.
fn chi_square(counts: &[usize], probabilities: &[f64]) -> f64 {
    let total: usize = counts.iter().sum();
    let term = |(&n, p): (&usize, &f64)| (n as f64 - total as f64 * p).powi(2) / (total as f64 * p);
    counts.iter().zip(probabilities).map(term).sum()
}

/// Value that Pearson's statistic exceeds once in ten thousand, by degrees of freedom.
fn chi_square_max(freedom: usize) -> f64 {
    const MAX: [f64; 10] = [0.0, 15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88, 31.83, 33.72];
    MAX[freedom]
}

fn sample_at(params: &SamplingParams, logits: &[f32], position: u64) -> Sampled {
    sample(params, logits, &History::default(), position, 0).unwrap()
}
