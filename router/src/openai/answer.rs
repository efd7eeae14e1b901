//! Answers: one body, or chunks of a stream.

use super::common::AnswerOptions;
use super::logprobs::{TextOfToken, chat_logprobs, completion_logprobs};
use crate::output::{Delta, Finished, Total};
use baton_types::{FinishReason, PhaseTimings, TokenId};
use serde_json::{Value, json};

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
    pub(crate) prompt_token_ids: Vec<TokenId>,
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

/// OpenAI's fields, and Baton's own: `cache_write_tokens` among the details, tokens that were computed again where there are some, and a
/// cost where there is a price.
fn usage_json(total: &Total) -> Value {
    let usage = &total.usage;
    let mut json = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
    });
    if usage.recomputed_tokens > 0 {
        json["recomputed_tokens"] = json!(usage.recomputed_tokens);
    }
    if let Some(cost) = &total.cost {
        (json["cost"], json["currency"]) = (json!(cost.amount), json!(cost.currency));
    }
    json
}

fn timings_json(timings: &PhaseTimings) -> Value {
    serde_json::to_value(timings).unwrap_or_default()
}

/// What is known at the end of a choice; the few that crossed numerics classes say so.
fn add_end(end: &mut Value, finished: &Finished) {
    end["timings"] = timings_json(&finished.timings);
    if !finished.crossed_classes.is_empty() {
        end["crossed_classes"] = json!(finished.crossed_classes);
    }
}

impl AnswerHead {
    fn frame(&self, chunk: bool, choices: Value) -> Value {
        let object = match (self.endpoint, chunk) {
            (Endpoint::Chat, true) => "chat.completion.chunk",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Completions, _) => "text_completion",
        };
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    /// A chunk of a choice that has shown what `shown` says.
    fn chunk(&self, choice: Value, shown: &Shown) -> Value {
        let mut frame = self.frame(true, json!([choice]));
        if self.options.continuous_usage {
            frame["usage"] = json!({
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": shown.tokens,
                "total_tokens": self.prompt_tokens + shown.tokens,
            });
        } else if self.options.include_usage {
            // Every chunk but the last carries the field, as OpenAI has it.
            frame["usage"] = Value::Null;
        }
        frame
    }

    /// The chunks that open a stream, one a choice where the shape has any.
    pub(crate) fn first_chunks(&self) -> Vec<Value> {
        (0..self.samples).filter_map(|sample| self.first_chunk(sample)).collect()
    }

    fn first_chunk(&self, sample: u32) -> Option<Value> {
        let mut chunk = match self.endpoint {
            Endpoint::Chat => {
                let delta = json!({"role": "assistant", "content": ""});
                let choice = json!({"index": sample, "delta": delta, "logprobs": null, "finish_reason": null});
                self.chunk(choice, &Shown::default())
            }
            Endpoint::Completions if self.options.return_token_ids => {
                let choice = json!({"index": sample, "text": "", "logprobs": null, "finish_reason": null});
                self.chunk(choice, &Shown::default())
            }
            Endpoint::Completions => return None,
        };
        if self.options.return_token_ids {
            self.add_prompt_tokens(&mut chunk);
        }
        Some(chunk)
    }

    /// A chunk for a delta; `None` where the client would see nothing new. `shown` is what it has seen of the choice.
    pub(crate) fn delta_chunk(&self, delta: &Delta, shown: &mut Shown) -> Option<Value> {
        shown.tokens += delta.token_ids.len();
        if delta.text.is_empty() && delta.logprobs.is_empty() && !self.options.return_token_ids {
            return None;
        }
        let mut choice = match self.endpoint {
            Endpoint::Chat => json!({
                "index": delta.sample, "delta": {"content": delta.text}, "logprobs": self.logprobs(delta, &mut shown.chars), "finish_reason": null,
            }),
            Endpoint::Completions => json!({
                "index": delta.sample, "text": delta.text, "logprobs": self.logprobs(delta, &mut shown.chars), "finish_reason": null,
            }),
        };
        if self.options.return_token_ids {
            choice["token_ids"] = json!(delta.token_ids);
        }
        Some(self.chunk(choice, shown))
    }

    /// The chunks that close a choice: finish reason, and with the last one the usage where asked for.
    pub(crate) fn last_chunks(&self, finished: &Finished, shown: &Shown) -> Vec<Value> {
        let (index, reason) = (finished.sample, finish_reason(finished.reason));
        let choice = match self.endpoint {
            Endpoint::Chat => json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": reason}),
            Endpoint::Completions => json!({"index": index, "text": "", "logprobs": null, "finish_reason": reason}),
        };
        let mut end = self.chunk(choice, shown);
        add_end(&mut end, finished);
        end["seed"] = json!(self.seed);
        let mut chunks = vec![end];
        if let Some(total) = finished.total.as_ref().filter(|_| self.options.include_usage) {
            let mut usage = self.frame(true, json!([]));
            usage["usage"] = usage_json(total);
            chunks.push(usage);
        }
        chunks
    }

    /// The whole answer in one body. What one choice has to itself stands beside it, and in it where there are several.
    pub(crate) fn whole(&self, samples: &[(Delta, Finished)], total: &Total) -> Value {
        let choices = samples.iter().map(|(answer, finished)| self.choice(answer, finished)).collect();
        let mut body = self.frame(false, choices);
        if self.options.return_token_ids {
            self.add_prompt_tokens(&mut body);
        }
        body["usage"] = usage_json(total);
        match samples {
            [(_, finished)] => add_end(&mut body, finished),
            _ => samples.iter().enumerate().for_each(|(i, (_, finished))| add_end(&mut body["choices"][i], finished)),
        }
        body["seed"] = json!(self.seed);
        body
    }

    fn choice(&self, answer: &Delta, finished: &Finished) -> Value {
        let (index, reason) = (finished.sample, finish_reason(finished.reason));
        let logprobs = self.logprobs(answer, &mut 0);
        let mut choice = match self.endpoint {
            Endpoint::Chat => json!({
                "index": index, "message": {"role": "assistant", "content": answer.text, "refusal": null},
                "logprobs": logprobs, "finish_reason": reason,
            }),
            Endpoint::Completions => {
                json!({"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": reason})
            }
        };
        if self.options.return_token_ids {
            choice["token_ids"] = json!(answer.token_ids);
        }
        choice
    }

    fn add_prompt_tokens(&self, body: &mut Value) {
        match self.endpoint {
            Endpoint::Chat => body["prompt_token_ids"] = json!(self.prompt_token_ids),
            Endpoint::Completions => {
                let choices = body["choices"].as_array_mut().into_iter().flatten();
                choices.for_each(|choice| choice["prompt_token_ids"] = json!(self.prompt_token_ids));
            }
        }
    }

    fn logprobs(&self, delta: &Delta, offset: &mut usize) -> Value {
        if delta.logprobs.is_empty() {
            return Value::Null;
        }
        match self.endpoint {
            Endpoint::Chat => chat_logprobs(delta, &self.token_text),
            Endpoint::Completions => completion_logprobs(delta, &self.token_text, offset),
        }
    }
}
