//! Shares: weights as whole numbers. Sums of whole numbers are exact, so that every order of adding gives them, on every device.

use super::exp::exp;

/// Binary places of a share: a token 2^40 times less likely than the best counts as impossible. Sums of 2^24 tokens fit 64 bits.
const PLACES: i32 = 40;

/// One, as a share: that of the most likely token.
pub(super) const ONE: u64 = 1 << PLACES;

/// `floor(exp((logit - best) / temperature) * 2^40)` of every logit, where `best` is the largest.
pub(super) fn shares(logits: &[f32], best: f32, temperature: f32) -> Vec<u64> {
    logits.iter().map(|&logit| (exp((logit - best) / temperature) * ONE as f32) as u64).collect()
}
