//! Temperature, min-p, top-k, top-p, typical tokens and the draw.
//!
//! Shares ([`super::shares`]) are never normalized: top-p is cut at a part of their sum, and a draw walks their running sum by ascending
//! id. Min-p, top-k and top-p each give a smallest key that is kept; the last two by a radix selection. Typical tokens ([`super::typical`]) are
//! chosen among those kept. Nothing here depends on an order of adding.

use super::order::{keys, least_of_largest, most_likely};
use super::shares::{least_share, part, shares};
use super::typical;
use baton_types::{SamplingParams, TokenId};

/// Draws a token with the uniform number `uniform`, a multiple of 2^-53 in `[0, 1)`. `logits` must have a finite largest one, the
/// temperature must be positive.
pub(super) fn draw(params: &SamplingParams, logits: &[f32], uniform: f64) -> TokenId {
    let SamplingParams { temperature, top_p, top_k, min_p, typical_p, .. } = *params;
    let best = logits[most_likely(logits) as usize];
    let mut shares = shares(logits, best, temperature);
    let top_k = Some(top_k as usize).filter(|k| (1..logits.len()).contains(k));
    let keys = if top_k.is_some() || top_p < 1.0 || min_p > 0.0 { keys(logits) } else { Vec::new() };
    let mut least = top_k.map_or(0, |k| least_of_largest(&keys, |_| 1, k as u64));
    if min_p > 0.0 {
        // Everything from the least likely token on whose share reaches this.
        let enough = least_share(min_p);
        let kept = keys.iter().zip(&shares).filter(|(_, share)| **share >= enough).map(|(key, _)| *key);
        least = least.max(kept.min().unwrap_or(0));
    }
    if top_p < 1.0 {
        let share = |token: usize| if keys[token] >= least { shares[token] } else { 0 };
        let sum: u64 = (0..keys.len()).map(share).sum();
        // The shortest run of tokens, most likely first, whose shares reach this, at least one token (Holtzman et al., arXiv:1904.09751).
        least = least_of_largest(&keys, share, part(top_p, sum));
    }
    shares.iter_mut().zip(&keys).filter(|(_, key)| **key < least).for_each(|(share, _)| *share = 0);
    if typical_p < 1.0 {
        typical::keep(typical_p, |token| typical::depth(logits[token], best, temperature), &mut shares);
    }
    pick(shares.into_iter(), uniform)
}

/// Token `i` with probability `shares[i] / sum`: the first whose running sum exceeds `floor(uniform * sum)`.
fn pick(shares: impl Iterator<Item = u64> + Clone, uniform: f64) -> TokenId {
    let sum: u64 = shares.clone().sum();
    // 2^53: `uniform` is a multiple of its inverse, so the product is exact.
    let target = (u128::from((uniform * 9_007_199_254_740_992.0) as u64) * u128::from(sum)) >> 53;
    let mut running = 0;
    let chosen = shares.into_iter().position(|share| {
        running += u128::from(share);
        running > target
    });
    chosen
        .unwrap_or_else(|| unreachable!("the target is below the sum, which is at least that of the most likely token"))
        as TokenId
}
