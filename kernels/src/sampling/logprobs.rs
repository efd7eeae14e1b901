//! Log-probabilities of the model's own distribution.

use super::order::{key, top};
use super::shares::{ONE, shares};
use super::{SampleError, check_finite};
use baton_types::{PromptLogprob, TokenId, TokenLogprobs};

/// `ln(sum(exp(logits)))`, shifted by the largest logit and summed in shares.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    log_total(best, shares(logits, best, 1.0).into_iter().sum())
}

/// `ln(sum(exp(logits)))` of the sum of their shares at temperature 1.
pub(crate) fn log_total(best: f32, sum: u64) -> f64 {
    f64::from(best) + (sum as f64 / ONE as f64).ln()
}

/// Log-probability of `chosen` and of the `n` most likely tokens, best first.
pub fn token_logprobs(logits: &[f32], chosen: TokenId, n: usize) -> TokenLogprobs {
    let total = log_sum_exp(logits);
    let logprob = |token: TokenId| (f64::from(logits[token as usize]) - total) as f32;
    TokenLogprobs {
        chosen: logprob(chosen),
        top: top(logits, n).into_iter().map(|token| (token, logprob(token))).collect(),
    }
}

/// Log-probabilities of a token of a prompt and of the `n` most likely ones, from the logits of the row before it, `[vocab]`. They are the
/// bits that generation reports for a token after the same tokens.
///
/// # Errors
/// If a logit is not finite.
///
/// # Panics
/// If the token is outside of the vocabulary.
pub fn prompt_logprob(logits: &[f32], token: TokenId, n: usize) -> Result<PromptLogprob, SampleError> {
    check_finite(logits)?;
    let own = key(logits[token as usize], token);
    let better = logits.iter().enumerate().filter(|(other, logit)| key(**logit, *other as TokenId) > own).count();
    Ok(PromptLogprob { token, rank: better as u32 + 1, logprobs: token_logprobs(logits, token, n) })
}
