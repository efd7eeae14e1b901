//! Temperature, top-k, top-p and the draw.
//!
//! Weights are `exp((logit - best) / temperature)` in f32, never normalized: top-p is cut at a share of their sum, and a draw walks their
//! running sum. Sums are f64 and have a fixed order: ascending id over the whole vocabulary, descending likelihood over a selection.

use super::exp::{exp, sum, weights};
use super::order::{Descending, most_likely};
use baton_types::{SamplingParams, TokenId};

/// Draws a token with the uniform number `uniform` in `[0, 1)`. `logits` must be finite and not empty, the temperature positive.
pub(super) fn draw(params: &SamplingParams, logits: &[f32], uniform: f64) -> TokenId {
    let SamplingParams { temperature, top_p, top_k, .. } = *params;
    let best = logits[most_likely(logits) as usize];
    let weight = |token: TokenId| exp((logits[token as usize] - best) / temperature);
    let keeps_all = top_k == 0 || top_k as usize >= logits.len();
    if keeps_all && top_p >= 1.0 {
        return pick(&weights(logits, best, temperature), uniform) as TokenId;
    }
    let mut order = Descending::new(logits);
    let (kept, weights) = if keeps_all {
        let total = sum(&weights(logits, best, temperature));
        nucleus((0..).map_while(|rank| order.get(rank)), weight, total, top_p)
    } else {
        let top = order.top(top_k as usize);
        let total = top.iter().map(|&token| f64::from(weight(token))).sum();
        nucleus(top.into_iter(), weight, total, top_p)
    };
    kept[pick(&weights, uniform)]
}

/// The shortest run of `tokens` (most likely first) whose weight reaches `top_p` of `total`, at least one token
/// (Holtzman et al., arXiv:1904.09751), with the weights.
fn nucleus(
    tokens: impl Iterator<Item = TokenId>,
    weight: impl Fn(TokenId) -> f32,
    total: f64,
    top_p: f32,
) -> (Vec<TokenId>, Vec<f32>) {
    let enough = if top_p >= 1.0 { f64::INFINITY } else { f64::from(top_p) * total };
    let (mut kept, mut weights, mut sum) = (Vec::new(), Vec::new(), 0.0);
    for token in tokens {
        let w = weight(token);
        kept.push(token);
        weights.push(w);
        sum += f64::from(w);
        if sum >= enough {
            break;
        }
    }
    (kept, weights)
}

/// Index `i` with probability `weights[i] / sum(weights)`: the first whose running sum exceeds `uniform * sum`.
fn pick(weights: &[f32], uniform: f64) -> usize {
    let target = uniform * sum(weights);
    let mut running = 0.0;
    let chosen = weights.iter().position(|&w| {
        running += f64::from(w);
        running > target
    });
    // Rounding can raise the target to the sum itself; then the result is the last index with a positive weight.
    chosen.or_else(|| weights.iter().rposition(|&w| w > 0.0)).unwrap_or(0)
}
