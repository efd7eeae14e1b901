//! Samples the next token from logits. Pure: the same logits, parameters, history and position give the same token on every host.
//!
//! Order of the steps, each documented in its module: bias, repetition penalty over prompt and output, frequency and presence penalties over
//! the output (`history`), allowed tokens and barred ones (`constraints`, `words`), temperature, min-p, top-k, top-p, typical tokens (`typical`),
//! draw (`distribution`). Random numbers are counter-based (`random`), so replay, preemption
//! and migration need no sampler state besides the tokens. Log-probabilities (`logprobs`) describe the model: whole vocabulary, before
//! bias, penalties and temperature.
//!
//! Sums are of whole numbers (`shares`), and selections are by radix (`order`), so that every device repeats them. `docs/numerics.md` is the
//! specification.
//!
//! The sampler does not know where logits come from, and keeps no state of its own. It is the reference: devices sample with its bits, the CPU
//! [by vectors](crate::cpu).

mod constraints;
mod distribution;
pub(crate) mod exp;
mod history;
mod logprobs;
pub(crate) mod order;
pub(crate) mod random;
pub(crate) mod shares;
#[cfg(test)]
mod tests;
pub(crate) mod typical;
mod words;

pub(crate) use constraints::{AllowedWords, WORD, mask_word};
pub use constraints::{Constraints, TokenSet};
pub use history::History;
pub(crate) use logprobs::log_total;
pub use logprobs::{log_sum_exp, prompt_logprob, token_logprobs};
pub use words::Words;

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
    /// The sets of allowed tokens exclude every token.
    #[error("no token of the vocabulary is allowed: allowed_token_ids, bad words and the grammar exclude all of them")]
    NothingAllowed,
    /// The allowed tokens of a row did not arrive in time.
    #[error("the allowed tokens did not arrive by their deadline")]
    MaskLate,
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
    Draw { params, history, position, sample_index, constraints: Constraints::default() }.sample(logits)
}

/// Everything but the logits that decides a token.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub params: &'a SamplingParams,
    /// The previous tokens, for the penalties.
    pub history: &'a History,
    /// Number of tokens before the one that is sampled.
    pub position: u64,
    /// Which sample of its request.
    pub sample_index: u32,
    pub constraints: Constraints<'a>,
}

impl Draw<'_> {
    /// Samples from `logits`, `[vocab]`, as the model returned them.
    pub fn sample(&self, logits: &[f32]) -> Result<Sampled, SampleError> {
        let params = self.params;
        check_finite(logits)?;
        let mut adjusted = Cow::Borrowed(logits);
        if self.adjusts() {
            self.adjust(adjusted.to_mut(), constraints::mask)?;
        }
        let token = if params.is_greedy() {
            order::most_likely(&adjusted)
        } else {
            distribution::draw(params, &adjusted, self.uniform())
        };
        let logprobs = params.logprobs.map(|top| token_logprobs(logits, token, top as usize));
        Ok(Sampled { token, logprobs })
    }

    /// Whether [`Draw::adjust`] may change anything.
    pub(crate) fn adjusts(&self) -> bool {
        let Constraints { bias, allowed, barred } = self.constraints;
        !bias.is_empty() || allowed != [None, None] || !barred.is_empty() || History::is_needed(self.params)
    }

    /// Bias, penalties, then allowed and barred tokens. `mask` gives the logit `-inf` to tokens whose bits are not set.
    pub(crate) fn adjust(
        &self,
        logits: &mut [f32],
        mask: impl FnOnce(&mut [f32], AllowedWords<'_>),
    ) -> Result<(), SampleError> {
        self.constraints.add_bias(logits);
        self.history.penalize(self.params, logits);
        self.constraints.keep_allowed(logits, mask)
    }

    /// The random number of the draw.
    pub(crate) fn uniform(&self) -> f64 {
        random::uniform(self.params.seed, self.sample_index, self.position)
    }
}

/// Refuses logits that cannot be sampled from.
pub(crate) fn check_finite(logits: &[f32]) -> Result<(), SampleError> {
    if logits.is_empty() {
        return Err(SampleError::Empty);
    }
    match logits.iter().position(|l| !l.is_finite()) {
        Some(token) => Err(SampleError::NotFinite { token: token as TokenId, value: logits[token] }),
        None => Ok(()),
    }
}
