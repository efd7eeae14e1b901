//! Tests of the sampler, by concern.

mod choice;
mod distribution;
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

fn sample_at(params: &SamplingParams, logits: &[f32], position: u64) -> Sampled {
    sample(params, logits, &History::default(), position, 0).unwrap()
}
