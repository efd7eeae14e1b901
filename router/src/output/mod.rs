//! What a request yields on every front: deltas and an end of each sample, or an error.

mod budget;
mod complete;
mod events;
mod first_tokens;
#[cfg(test)]
mod tests;

pub(crate) use budget::{make_room, no_room};
pub(crate) use complete::Gathered;
pub use events::Events;
pub(crate) use first_tokens::{EVENT_BYTES, Opened, Opening};

use crate::prices::Cost;
use baton_types::{FinishReason, PhaseTimings, PromptLogprob, RequestError, TokenId, TokenLogprobs, Usage};
use budget::{ALLOCATION_BYTES, DOUBLES};

/// Some tokens and the text that they complete. Text lags tokens while a character or a stop string is incomplete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Which of the samples.
    pub sample: u32,
    /// Text that these tokens complete; may be empty.
    pub text: String,
    pub token_ids: Vec<TokenId>,
    /// One for each token, where asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// With the first delta of each sample: tokens of the prompt whose KV was cached.
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of the next tokens of its prompt, from the second on. Such a delta has nothing else, and comes before all others of
    /// the samples of this prompt.
    pub prompt: Vec<PromptLogprob>,
}

/// Most tokens of a prompt in one delta.
pub(crate) const PROMPT_PART_TOKENS_MAX: usize = 64;

/// Memory of the log-probabilities of a token of a prompt, with this many alternatives.
pub(crate) const fn prompt_logprob_bytes(top: usize) -> u64 {
    (DOUBLES * size_of::<PromptLogprob>() + ALLOCATION_BYTES + top * size_of::<(TokenId, f32)>()) as u64
}

impl Delta {
    /// Upper bound of its memory, on its own or as a part of a whole answer.
    pub(crate) fn bytes(&self) -> u64 {
        let prompt = self.prompt.iter().map(|token| prompt_logprob_bytes(token.logprobs.top.capacity())).sum::<u64>();
        let top = |logprobs: &TokenLogprobs| ALLOCATION_BYTES + logprobs.top.capacity() * size_of::<(TokenId, f32)>();
        let lists = self.text.len() + size_of_val(&self.token_ids[..]) + size_of_val(&self.logprobs[..]);
        prompt + (DOUBLES * lists + self.logprobs.iter().map(top).sum::<usize>()) as u64
    }
}

/// The cached share of a prompt in percent, rounded down: 0 to 100.
pub(crate) fn cache_hit_percent(cached_tokens: u32, prompt_tokens: usize) -> u64 {
    (100 * u64::from(cached_tokens) / (prompt_tokens as u64).max(1)).min(100)
}

/// The successful end of a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Which of the samples.
    pub sample: u32,
    pub reason: FinishReason,
    /// The stop string that ended it.
    pub stop: Option<String>,
    /// Time spent in each phase.
    pub timings: PhaseTimings,
    /// Numerics classes that generated the answer, in order, where it is more than one.
    pub crossed_classes: Vec<String>,
    /// With the last sample that ends.
    pub total: Option<Total>,
}

impl Finished {
    /// The finish reason's name in OpenAI's API and OpenTelemetry's conventions.
    pub(crate) const fn reason_name(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// All samples of a request together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Total {
    /// Tokens counted over all samples.
    pub usage: Usage,
    /// What it costs, where its model has a price.
    pub cost: Option<Cost>,
}

/// How the answers of a request are counted: all samples of its first prompt, then those of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choices {
    pub(crate) prompts: u32,
    /// Of each prompt, at least 1.
    pub(crate) samples: u32,
}

impl Choices {
    /// Answers of a request with one prompt.
    pub(crate) const fn of_one(samples: u32) -> Self {
        Self { prompts: 1, samples }
    }

    /// How many there are.
    pub(crate) const fn count(self) -> u32 {
        self.prompts * self.samples
    }

    /// The prompt of an answer.
    pub(crate) const fn prompt_of(self, answer: u32) -> usize {
        (answer / self.samples) as usize
    }
}

/// Usage of several prompts together.
pub(crate) fn usage_of_prompts(prompts: impl Iterator<Item = Usage>) -> Usage {
    prompts.fold(Usage::default(), |a, b| Usage {
        prompt_tokens: a.prompt_tokens.saturating_add(b.prompt_tokens),
        completion_tokens: a.completion_tokens.saturating_add(b.completion_tokens),
        cached_tokens: a.cached_tokens.saturating_add(b.cached_tokens),
        cache_write_tokens: a.cache_write_tokens.saturating_add(b.cache_write_tokens),
        recomputed_tokens: a.recomputed_tokens.saturating_add(b.recomputed_tokens),
    })
}

/// Usage of several samples of one prompt together. The prompt counts once: prompt tokens that any sample computed count as computed
/// for the request.
pub(crate) fn usage_of_all(started: impl Iterator<Item = Usage>) -> Option<Usage> {
    started.reduce(|a, b| Usage {
        prompt_tokens: a.prompt_tokens,
        completion_tokens: a.completion_tokens.saturating_add(b.completion_tokens),
        cached_tokens: a.cached_tokens.min(b.cached_tokens),
        cache_write_tokens: a.cache_write_tokens.max(b.cache_write_tokens),
        recomputed_tokens: a.recomputed_tokens.saturating_add(b.recomputed_tokens),
    })
}

/// One event. The last is an error, or the [`Event::Finished`] that has the total.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// More of the answer.
    Delta(Delta),
    /// The end of a sample.
    Finished(Finished),
}

/// What a front receives.
pub type EventResult = Result<Event, RequestError>;
