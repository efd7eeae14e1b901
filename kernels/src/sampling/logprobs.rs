//! Log-probabilities of the model's own distribution.

use super::exp::{sum, weights};
use super::order::Descending;
use baton_types::{TokenId, TokenLogprobs};

/// `ln(sum(exp(logits)))`, shifted by the largest logit and summed in f64 in id order.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(best) + sum(&weights(logits, best, 1.0)).ln()
}

/// Log-probability of `chosen` and of the `top` most likely tokens, best first.
pub fn token_logprobs(logits: &[f32], chosen: TokenId, top: usize) -> TokenLogprobs {
    let total = log_sum_exp(logits);
    let logprob = |token: TokenId| (f64::from(logits[token as usize]) - total) as f32;
    let best = if top == 0 { Vec::new() } else { Descending::new(logits).top(top) };
    TokenLogprobs { chosen: logprob(chosen), top: best.into_iter().map(|token| (token, logprob(token))).collect() }
}
