//! Temperature, top-k, top-p and the draw.
//!
//! Weights are `exp((logit - max) / temperature)` in f64, never normalized: a nucleus is cut at a share of their sum, and a
//! draw walks their running sum. Both sums have one written order, ascending id over the whole vocabulary and descending
//! likelihood over a selection.

use super::exp::exp;
use super::order::{Descending, most_likely};
use baton_types::{SamplingParams, TokenId};

/// Draws a token with the uniform number `uniform` in `[0, 1)`. `logits` must be finite and not empty, the temperature positive.
pub(super) fn draw(params: &SamplingParams, logits: &[f32], uniform: f64) -> TokenId {
    let best = logits[most_likely(logits) as usize];
    let temperature = f64::from(params.temperature);
    let weight = |logit: f32| exp((f64::from(logit) - f64::from(best)) / temperature);
    let keeps_all = params.top_k == 0 || params.top_k as usize >= logits.len();
    if keeps_all && params.top_p >= 1.0 {
        let weights: Vec<f64> = logits.iter().map(|&logit| weight(logit)).collect();
        return pick(&weights, uniform) as TokenId;
    }
    let mut order = Descending::new(logits);
    let (kept, weights) = if keeps_all {
        let total: f64 = logits.iter().map(|&logit| weight(logit)).collect::<Vec<_>>().iter().sum();
        nucleus((0..).map_while(|rank| order.get(rank)), |token| weight(logits[token as usize]), total, params.top_p)
    } else {
        let top = order.top(params.top_k as usize);
        let total = top.iter().map(|&token| weight(logits[token as usize])).sum();
        nucleus(top.into_iter(), |token| weight(logits[token as usize]), total, params.top_p)
    };
    kept[pick(&weights, uniform)]
}

/// The shortest run of `tokens` (most likely first) whose weight reaches `top_p` of `total`, at least one token
/// (Holtzman et al., arXiv:1904.09751), with the weights.
fn nucleus(
    tokens: impl Iterator<Item = TokenId>,
    weight: impl Fn(TokenId) -> f64,
    total: f64,
    top_p: f32,
) -> (Vec<TokenId>, Vec<f64>) {
    let enough = if top_p >= 1.0 { f64::INFINITY } else { f64::from(top_p) * total };
    let (mut kept, mut weights, mut sum) = (Vec::new(), Vec::new(), 0.0);
    for token in tokens {
        let w = weight(token);
        kept.push(token);
        weights.push(w);
        sum += w;
        if sum >= enough {
            break;
        }
    }
    (kept, weights)
}

/// Index `i` with probability `weights[i] / sum(weights)`: the first whose running sum exceeds `uniform * sum`.
fn pick(weights: &[f64], uniform: f64) -> usize {
    let target = uniform * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let chosen = weights.iter().position(|w| {
        sum += w;
        sum > target
    });
    // Rounding can lift the target to the very sum; then it is the last index that has weight at all.
    chosen.or_else(|| weights.iter().rposition(|&w| w > 0.0)).unwrap_or(0)
}
