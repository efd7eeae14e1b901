//! Samples the next token from logits. Pure: the same logits, parameters, history and position give the same token on every host.
//!
//! Order of the steps, each documented in its module: repetition penalty over prompt and output, frequency and presence penalties over the
//! output (`history`), temperature, top-k, top-p, draw (`distribution`). Random numbers are counter-based (`random`), so replay, preemption
//! and migration need no sampler state besides the tokens. Log-probabilities (`logprobs`) describe the model: whole vocabulary, before
//! penalties and temperature.
//!
//! The sampler does not know where logits come from, and keeps no state of its own.

mod distribution;
mod exp;
mod history;
mod logprobs;
mod order;
mod random;
#[cfg(test)]
mod tests;

pub use history::History;
pub use logprobs::{log_sum_exp, token_logprobs};

use baton_types::{SamplingParams, TokenId, TokenLogprobs};
use std::borrow::Cow;

#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: TokenId,
    /// Present where [`SamplingParams::logprobs`] requests them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Logits that cannot be sampled from.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The model is broken, or its numbers overflowed. The sequence must fail: any token would be meaningless.
    #[error("the logit of token {token} is {value}: the model or its KV is damaged")]
    NotFinite {
        /// The first token with such a logit.
        token: TokenId,
        value: f32,
    },
    /// The vocabulary is empty.
    #[error("no logits to sample from")]
    Empty,
}

/// Samples the token at `position` (= number of tokens before it) of sample `sample_index` of a request. `logits`: `[vocab]`, as the model
/// returned them. `history`: the previous tokens, for the penalties.
pub fn sample(
    params: &SamplingParams,
    logits: &[f32],
    history: &History,
    position: u64,
    sample_index: u32,
) -> Result<Sampled, SampleError> {
    check_finite(logits)?;
    let adjusted = history.adjust(params, logits);
    let token = if params.is_greedy() {
        order::most_likely(&adjusted)
    } else {
        let uniform = random::uniform(params.seed, sample_index, position);
        distribution::draw(params, &adjusted, uniform)
    };
    let logprobs = params.logprobs.map(|top| token_logprobs(logits, token, top as usize));
    Ok(Sampled { token, logprobs })
}

fn check_finite(logits: &[f32]) -> Result<(), SampleError> {
    if logits.is_empty() {
        return Err(SampleError::Empty);
    }
    match logits.iter().position(|l| !l.is_finite()) {
        Some(token) => Err(SampleError::NotFinite { token: token as TokenId, value: logits[token] }),
        None => Ok(()),
    }
}

/// Logits after penalties; borrowed where no penalty applies.
type Adjusted<'a> = Cow<'a, [f32]>;
