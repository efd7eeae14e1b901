//! Answers: one body, or chunks of a stream. Both borrow what they say, and become JSON only as it is written.

use super::common::AnswerOptions;
use super::logprobs::{Logprobs, TextOfToken};
use super::shapes::{Body, Choice, Ended, Said, UsageField};
use super::written::length;
use crate::output::{Delta, Finished, Total};
use baton_types::{FinishReason, TokenId};
use serde::Serialize;
use std::sync::Arc;

/// Which of the two shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// What all parts of one answer share.
#[derive(Clone)]
pub(crate) struct AnswerHead {
    /// Shape.
    pub(crate) endpoint: Endpoint,
    /// `chatcmpl-…` or `cmpl-…`.
    pub(crate) id: String,
    /// Model as the card names it.
    pub(crate) model: String,
    /// Unix time, in seconds.
    pub(crate) created: u64,
    /// What the client asked for.
    pub(crate) options: AnswerOptions,
    /// For `return_token_ids`.
    pub(crate) prompt_token_ids: Arc<[TokenId]>,
    /// How many tokens the prompt has.
    pub(crate) prompt_tokens: usize,
    /// How many choices.
    pub(crate) samples: u32,
    /// Seed used, given or drawn.
    pub(crate) seed: u64,
    /// Bytes of tokens, for log-probabilities.
    pub(crate) token_text: TextOfToken,
}

/// What a client has seen of one choice of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shown {
    /// Tokens generated.
    pub(crate) tokens: usize,
    /// Characters of text.
    pub(crate) chars: usize,
}

/// OpenAI's names.
pub(crate) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
    }
}

/// More than a choice takes besides what was generated: its names, its timings, the classes that it crossed.
const CHOICE_BYTES: u64 = 1 << 10;
/// Around a text.
const QUOTES_BYTES: u64 = 2;
/// Digits of an offset that counts from the beginning of its choice.
const OFFSET_BYTES: u64 = 10;

impl AnswerHead {
    fn body<'a>(&'a self, chunk: bool, choices: Vec<Choice<'a>>) -> Body<'a> {
        let object = match (self.endpoint, chunk) {
            (Endpoint::Chat, true) => "chat.completion.chunk",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Completions, _) => "text_completion",
        };
        Body { id: &self.id, object, created: self.created, model: &self.model, choices, ..Body::default() }
    }

    /// A chunk of a choice that has shown what `shown` says.
    fn chunk<'a>(&'a self, choice: Choice<'a>, shown: &Shown) -> Body<'a> {
        let usage = if self.options.continuous_usage {
            Some(UsageField::so_far(self.prompt_tokens, shown.tokens))
        } else {
            // Every chunk but the last carries the field, as OpenAI has it.
            self.options.include_usage.then_some(UsageField::None)
        };
        Body { usage, ..self.body(true, vec![choice]) }
    }

    fn choice<'a>(&self, index: u32, said: Said<'a>) -> Choice<'a> {
        Choice {
            index,
            said,
            logprobs: None,
            finish_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            ended: None,
        }
    }

    /// The chunk that opens a choice of a stream, where the shape has any.
    pub(crate) fn first_chunk(&self, sample: u32) -> Option<String> {
        let ids = self.options.return_token_ids;
        let said = match self.endpoint {
            Endpoint::Chat => Said::opening(),
            Endpoint::Completions if ids => Said::Text(""),
            Endpoint::Completions => return None,
        };
        let mut chunk = self.chunk(self.choice(sample, said), &Shown::default());
        if ids {
            self.add_prompt_tokens(&mut chunk);
        }
        Some(json(&chunk))
    }

    /// A chunk for a delta; `None` where the client would see nothing new. `shown` is what it has seen of the choice.
    pub(crate) fn delta_chunk(&self, delta: &Delta, shown: &mut Shown) -> Option<String> {
        shown.tokens += delta.token_ids.len();
        if delta.text.is_empty() && delta.logprobs.is_empty() && !self.options.return_token_ids {
            return None;
        }
        let said = match self.endpoint {
            Endpoint::Chat => Said::more(&delta.text),
            Endpoint::Completions => Said::Text(&delta.text),
        };
        let logprobs = self.logprobs(delta, shown.chars);
        shown.chars += logprobs.map_or(0, |logprobs| logprobs.chars());
        let choice = Choice { logprobs, token_ids: self.token_ids(delta), ..self.choice(delta.sample, said) };
        Some(json(&self.chunk(choice, shown)))
    }

    /// The chunks that close a choice: finish reason, and with the last one the usage where asked for.
    pub(crate) fn last_chunks(&self, finished: &Finished, shown: &Shown) -> Vec<String> {
        let said = match self.endpoint {
            Endpoint::Chat => Said::nothing(),
            Endpoint::Completions => Said::Text(""),
        };
        let finish_reason = Some(finish_reason(finished.reason));
        let choice = Choice { finish_reason, ..self.choice(finished.sample, said) };
        let end = Body { ended: Some(Ended::new(finished)), seed: Some(self.seed), ..self.chunk(choice, shown) };
        let mut chunks = vec![json(&end)];
        if let Some(total) = finished.total.as_ref().filter(|_| self.options.include_usage) {
            chunks.push(json(&Body { usage: Some(UsageField::of(total)), ..self.body(true, Vec::new()) }));
        }
        chunks
    }

    /// The whole answer in one body. What one choice has to itself stands beside it, and in it where there are several.
    pub(crate) fn whole<'a>(&'a self, samples: &'a [(Delta, Finished)], total: &'a Total) -> impl Serialize + 'a {
        let choices = samples.iter().map(|(answer, finished)| self.whole_choice(answer, finished)).collect();
        let mut body = self.body(false, choices);
        if self.options.return_token_ids {
            self.add_prompt_tokens(&mut body);
        }
        body.usage = Some(UsageField::of(total));
        match samples {
            [(_, finished)] => body.ended = Some(Ended::new(finished)),
            _ => {
                for (choice, (_, finished)) in body.choices.iter_mut().zip(samples) {
                    choice.ended = Some(Ended::new(finished));
                }
            }
        }
        body.seed = Some(self.seed);
        body
    }

    /// Bytes of a whole answer that are known before it: at least these, and no less than it will take besides [`AnswerHead::bytes_of`] its
    /// deltas.
    pub(crate) fn bytes_before(&self) -> u64 {
        let prompt = if self.options.return_token_ids { length(&self.prompt_token_ids) } else { 0 };
        let names = (self.id.len() + self.model.len()) as u64;
        CHOICE_BYTES + names + u64::from(self.samples) * (CHOICE_BYTES + prompt)
    }

    /// No fewer bytes than a delta adds to a whole answer.
    pub(crate) fn bytes_of(&self, delta: &Delta) -> u64 {
        let logprobs = self.logprobs(delta, 0);
        let offsets = logprobs.map_or(0, |_| delta.token_ids.len() as u64 * OFFSET_BYTES);
        length(&delta.text).saturating_sub(QUOTES_BYTES)
            + logprobs.map_or(0, |logprobs| length(&logprobs))
            + offsets
            + self.token_ids(delta).map_or(0, |ids| length(&ids))
    }

    fn whole_choice<'a>(&'a self, answer: &'a Delta, finished: &'a Finished) -> Choice<'a> {
        let said = match self.endpoint {
            Endpoint::Chat => Said::all(&answer.text),
            Endpoint::Completions => Said::Text(&answer.text),
        };
        Choice {
            logprobs: self.logprobs(answer, 0),
            finish_reason: Some(finish_reason(finished.reason)),
            token_ids: self.token_ids(answer),
            ..self.choice(finished.sample, said)
        }
    }

    fn add_prompt_tokens<'a>(&'a self, body: &mut Body<'a>) {
        let ids = Some(&*self.prompt_token_ids);
        match self.endpoint {
            Endpoint::Chat => body.prompt_token_ids = ids,
            Endpoint::Completions => body.choices.iter_mut().for_each(|choice| choice.prompt_token_ids = ids),
        }
    }

    fn token_ids<'a>(&self, delta: &'a Delta) -> Option<&'a [TokenId]> {
        self.options.return_token_ids.then_some(&delta.token_ids)
    }

    fn logprobs<'a>(&'a self, delta: &'a Delta, offset: usize) -> Option<Logprobs<'a>> {
        let (endpoint, token_text) = (self.endpoint, &self.token_text);
        (!delta.logprobs.is_empty()).then_some(Logprobs { endpoint, delta, token_text, offset })
    }
}

/// A chunk of a stream, which is short.
fn json(chunk: &Body<'_>) -> String {
    let json = serde_json::to_string(chunk);
    debug_assert!(json.is_ok(), "names are strings");
    json.unwrap_or_default()
}
