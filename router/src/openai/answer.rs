//! Answers in one body. They borrow their content, and are serialized only when they are written.

use super::common::AnswerOptions;
use super::logprobs::{Echoed, Logprobs, PromptScores, TextOfToken};
use super::parts::{self, reason_name};
use super::shapes::{Body, Choice, ChoiceContent, Joined, UsageField};
use super::stream::Chunks;
use crate::output::{Choices, Delta, Finished, Total};
use crate::wire::serialize::length;
use crate::wire::{Ended, Form, Parts};
use baton_node::intake::Hold;
use baton_types::{PromptLogprob, TokenId};
use serde::Serialize;
use std::sync::Arc;

/// Which of the two response formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// Chat completions, at `/v1/chat/completions`.
    Chat,
    /// Completions of plain prompts, at `/v1/completions`.
    Completions,
}

/// What answers show of a prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptShown {
    /// How many tokens it has.
    pub(crate) tokens: usize,
    /// Them, for `return_token_ids`.
    pub(crate) ids: Arc<[TokenId]>,
    /// The first of them.
    pub(crate) first: Option<TokenId>,
    /// Its text, if answers begin with it.
    pub(crate) text: Arc<str>,
}

/// What all parts of one answer share.
#[derive(Clone)]
pub(crate) struct AnswerHead {
    pub(crate) endpoint: Endpoint,
    /// Id of the answer: `chatcmpl-…` or `cmpl-…`.
    pub(crate) id: String,
    /// Model as the card names it.
    pub(crate) model: String,
    /// Unix time, in seconds.
    pub(crate) created: u64,
    /// What the client asked for.
    pub(crate) options: AnswerOptions,
    /// At least one.
    pub(crate) prompts: Vec<PromptShown>,
    /// Number of choices of each prompt.
    pub(crate) samples: u32,
    /// Seed used, given or drawn.
    pub(crate) seed: u64,
    /// Bytes of tokens, for log-probabilities.
    pub(crate) token_text: TextOfToken,
    /// `None`: all of each answer is content.
    pub(crate) parts: Option<Parts>,
}

/// Upper bound on a choice's bytes besides the generated text: its names, timings and numerics classes.
const CHOICE_BYTES: u64 = 1 << 10;
/// The quotes around a text.
const QUOTES_BYTES: u64 = 2;
/// What a call takes, its id and names of fields included, for each byte of its text: the shortest has 28.
const PARTS_TIMES: u64 = 6;
/// Memory of one prompt token id in a streamed answer that returns the ids: the id, and its digits as they are written,
/// kept and sent.
const ID_COSTS: u64 = 25;
/// Digits of an offset that counts from the beginning of its choice.
const OFFSET_BYTES: u64 = 10;

impl AnswerHead {
    pub(super) fn body<'a>(&'a self, chunk: bool, choices: Vec<Choice<'a>>) -> Body<'a> {
        let object = match (self.endpoint, chunk) {
            (Endpoint::Chat, true) => "chat.completion.chunk",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Completions, _) => "text_completion",
        };
        Body { id: &self.id, object, created: self.created, model: &self.model, choices, ..Body::default() }
    }

    pub(super) fn choice<'a>(&self, index: u32, content: ChoiceContent<'a>) -> Choice<'a> {
        Choice {
            index,
            content,
            logprobs: None,
            finish_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
            ended: None,
        }
    }

    /// The answers that are shown, in the order of their indices.
    fn shown<'a>(&self, samples: &'a [(Delta, Finished)]) -> Vec<&'a (Delta, Finished)> {
        let Some(best) = self.options.best else { return samples.iter().collect() };
        samples.chunks(self.samples as usize).flat_map(|of_prompt| best.of(of_prompt)).collect()
    }

    /// Choices of each prompt that are shown.
    fn shown_of_prompt(&self) -> u32 {
        self.options.best.map_or(self.samples, |best| best.shown)
    }

    /// A choice, after what its prompt's first sample reported of the prompt.
    fn whole_choice<'a>(
        &'a self,
        index: u32,
        scored: &'a [PromptLogprob],
        (answer, finished): &'a (Delta, Finished),
    ) -> Choice<'a> {
        let prompt = &self.prompts[(index / self.shown_of_prompt()) as usize];
        let (content, has_calls) = match (self.endpoint, &self.parts) {
            (Endpoint::Chat, Some(parts)) => parts::whole(parts, &answer.text, &self.id, finished.sample),
            (Endpoint::Chat, None) => (ChoiceContent::all(&answer.text), false),
            (Endpoint::Completions, _) => (ChoiceContent::Text(Joined(&prompt.text, &answer.text)), false),
        };
        let is_completion = self.endpoint == Endpoint::Completions;
        Choice {
            logprobs: self.logprobs(answer, self.echoed(prompt, scored), 0),
            prompt_logprobs: self.scores(scored).filter(|_| is_completion),
            finish_reason: Some(reason_name(finished.reason, finished.reason_name(), has_calls)),
            token_ids: self.token_ids(answer),
            ..self.choice(index, content)
        }
    }

    pub(super) fn add_prompt_tokens<'a>(&'a self, body: &mut Body<'a>) {
        match self.endpoint {
            Endpoint::Chat => body.prompt_token_ids = Some(&self.prompt_of(0).ids),
            Endpoint::Completions => {
                let shown = self.shown_of_prompt();
                for choice in &mut body.choices {
                    choice.prompt_token_ids = Some(&self.prompts[(choice.index / shown) as usize].ids);
                }
            }
        }
    }

    /// The prompt of a choice.
    pub(super) fn prompt_of(&self, choice: u32) -> &PromptShown {
        &self.prompts[self.choices().prompt_of(choice)]
    }

    pub(super) fn token_ids<'a>(&self, delta: &'a Delta) -> Option<&'a [TokenId]> {
        self.options.return_token_ids.then_some(&delta.token_ids)
    }

    pub(super) fn logprobs<'a>(&'a self, delta: &'a Delta, echoed: Echoed<'a>, offset: usize) -> Option<Logprobs<'a>> {
        let (endpoint, token_text) = (self.endpoint, &self.token_text);
        let are_shown = self.options.best.is_none_or(|best| best.logprobs);
        let logprobs = Logprobs { endpoint, delta, echoed, token_text, offset };
        (are_shown && logprobs.count() > 0).then_some(logprobs)
    }

    /// What an answer to this prompt shows of it beside its own log-probabilities.
    pub(super) fn echoed<'a>(&self, prompt: &PromptShown, scored: &'a [PromptLogprob]) -> Echoed<'a> {
        match self.options.echo_logprobs {
            Some(top) => Echoed { first: prompt.first, scored, top: top as usize },
            None => Echoed::default(),
        }
    }

    /// What is shown of a prompt in its own field.
    fn scores<'a>(&'a self, scored: &'a [PromptLogprob]) -> Option<PromptScores<'a>> {
        let top = self.options.prompt_logprobs? as usize;
        Some(PromptScores { scored, top, token_text: &self.token_text })
    }

    /// Bytes of what answers show of these tokens of a prompt, over all choices that show it.
    pub(super) fn scored_bytes(&self, scored: &[PromptLogprob]) -> u64 {
        let nothing = Delta::default();
        let echoed = self
            .options
            .echo_logprobs
            .and_then(|top| self.logprobs(&nothing, Echoed { first: None, scored, top: top as usize }, 0));
        let echoed = echoed.map_or(0, |echoed| length(&echoed) + scored.len() as u64 * OFFSET_BYTES);
        let copies = if self.endpoint == Endpoint::Completions { u64::from(self.shown_of_prompt()) } else { 1 };
        copies * (echoed + self.scores(scored).map_or(0, |scores| length(&scores)))
    }
}

impl Form for AnswerHead {
    type Stream = Chunks;

    fn is_stream(&self) -> bool {
        self.options.stream
    }

    fn choices(&self) -> Choices {
        Choices { prompts: self.prompts.len() as u32, samples: self.samples }
    }

    fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens).sum()
    }

    /// Prompt token ids are kept and written once, before a client reads any of them.
    fn opening_bytes(&self) -> u64 {
        let ids = if self.options.return_token_ids { self.prompt_tokens() as u64 * ID_COSTS } else { 0 };
        // They are kept until the last choice has begun.
        ids + self.prompts.iter().map(|prompt| prompt.text.len() as u64).sum::<u64>()
    }

    /// The fields of a choice are beside the list of choices if there is one choice, and
    /// inside each choice if there are several.
    fn whole<'a>(&'a self, samples: &'a [(Delta, Finished)], total: &'a Total) -> impl Serialize + 'a {
        // The first sample of a prompt reports what is shown of the prompt.
        let scored = |prompt: usize| &samples[prompt * self.samples as usize].0.prompt[..];
        let shown = self.shown(samples);
        let of_prompt = self.shown_of_prompt() as usize;
        let choices = shown.iter().enumerate();
        let choices =
            choices.map(|(at, answer)| self.whole_choice(at as u32, scored(at / of_prompt), answer)).collect();
        let mut body = self.body(false, choices);
        body.prompt_logprobs = self.scores(scored(0)).filter(|_| self.endpoint == Endpoint::Chat);
        let samples = shown;
        if self.options.return_token_ids {
            self.add_prompt_tokens(&mut body);
        }
        body.usage = Some(UsageField::of(total));
        match &samples[..] {
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

    fn bytes_before(&self) -> u64 {
        let prompts: u64 = self.prompts.iter().map(|prompt| length(&prompt.ids)).sum();
        let names = (self.id.len() + self.model.len()) as u64;
        let texts: u64 = self.prompts.iter().map(|prompt| length(&prompt.text)).sum();
        let nothing = Delta::default();
        let firsts = self.prompts.iter().filter_map(|prompt| self.logprobs(&nothing, self.echoed(prompt, &[]), 0));
        let firsts: u64 = firsts.map(|first| length(&first)).sum();
        let of_prompts = u64::from(self.samples) * (prompts + texts + firsts);
        CHOICE_BYTES + names + u64::from(self.choices().count()) * CHOICE_BYTES + of_prompts
    }

    fn bytes_of(&self, delta: &Delta) -> u64 {
        if !delta.prompt.is_empty() {
            return self.scored_bytes(&delta.prompt);
        }
        let logprobs = self.logprobs(delta, Echoed::default(), 0);
        let offsets = logprobs.map_or(0, |_| delta.token_ids.len() as u64 * OFFSET_BYTES);
        let may_call = self.parts.as_ref().is_some_and(|parts| parts.parser.may_call());
        let times = if may_call { PARTS_TIMES } else { 1 };
        times * length(&delta.text).saturating_sub(QUOTES_BYTES)
            + logprobs.map_or(0, |logprobs| length(&logprobs))
            + offsets
            + self.token_ids(delta).map_or(0, |ids| length(&ids))
    }

    fn stream(self, _cached_tokens: Option<u32>, kept: Hold) -> Chunks {
        Chunks::new(self, kept)
    }
}
