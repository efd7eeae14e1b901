//! Answers: one body, or chunks of a stream.

use super::common::AnswerOptions;
use super::logprobs::{TextOfToken, chat_logprobs, completion_logprobs};
use crate::output::{Delta, Finished};
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
    /// Seed used, given or drawn.
    pub(crate) seed: u64,
    /// Bytes of tokens, for log-probabilities.
    pub(crate) token_text: TextOfToken,
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
fn usage_json(finished: &Finished) -> Value {
    let usage = &finished.usage;
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
    if let Some(cost) = &finished.cost {
        (json["cost"], json["currency"]) = (json!(cost.amount), json!(cost.currency));
    }
    json
}

fn timings_json(timings: &PhaseTimings) -> Value {
    serde_json::to_value(timings).unwrap_or_default()
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

    fn chunk(&self, choice: Value) -> Value {
        let mut frame = self.frame(true, json!([choice]));
        if self.options.include_usage {
            // Every chunk but the last carries the field, as OpenAI has it.
            frame["usage"] = Value::Null;
        }
        frame
    }

    /// The chunk that opens a stream, where the shape has one.
    pub(crate) fn first_chunk(&self) -> Option<Value> {
        let mut chunk = match self.endpoint {
            Endpoint::Chat => self.chunk(json!({
                "index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
            })),
            Endpoint::Completions if self.options.return_token_ids => {
                self.chunk(json!({"index": 0, "text": "", "logprobs": null, "finish_reason": null}))
            }
            Endpoint::Completions => return None,
        };
        if self.options.return_token_ids {
            self.add_prompt_tokens(&mut chunk);
        }
        Some(chunk)
    }

    /// A chunk for a delta; `None` where the client would see nothing new. `offset` counts the characters of text shown before.
    pub(crate) fn delta_chunk(&self, delta: &Delta, offset: &mut usize) -> Option<Value> {
        if delta.text.is_empty() && delta.logprobs.is_empty() && !self.options.return_token_ids {
            return None;
        }
        let mut choice = match self.endpoint {
            Endpoint::Chat => json!({
                "index": 0, "delta": {"content": delta.text}, "logprobs": self.logprobs(delta, offset), "finish_reason": null,
            }),
            Endpoint::Completions => json!({
                "index": 0, "text": delta.text, "logprobs": self.logprobs(delta, offset), "finish_reason": null,
            }),
        };
        if self.options.return_token_ids {
            choice["token_ids"] = json!(delta.token_ids);
        }
        Some(self.chunk(choice))
    }

    /// The chunks that close a stream: finish reason, then usage where asked for.
    pub(crate) fn last_chunks(&self, finished: &Finished) -> Vec<Value> {
        let reason = finish_reason(finished.reason);
        let mut end = self.chunk(match self.endpoint {
            Endpoint::Chat => json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": reason}),
            Endpoint::Completions => json!({"index": 0, "text": "", "logprobs": null, "finish_reason": reason}),
        });
        self.add_end(&mut end, finished);
        let mut chunks = vec![end];
        if self.options.include_usage {
            let mut usage = self.frame(true, json!([]));
            usage["usage"] = usage_json(finished);
            chunks.push(usage);
        }
        chunks
    }

    /// The whole answer in one body.
    pub(crate) fn whole(&self, answer: &Delta, finished: &Finished) -> Value {
        let reason = finish_reason(finished.reason);
        let logprobs = self.logprobs(answer, &mut 0);
        let mut choice = match self.endpoint {
            Endpoint::Chat => json!({
                "index": 0, "message": {"role": "assistant", "content": answer.text, "refusal": null},
                "logprobs": logprobs, "finish_reason": reason,
            }),
            Endpoint::Completions => {
                json!({"index": 0, "text": answer.text, "logprobs": logprobs, "finish_reason": reason})
            }
        };
        if self.options.return_token_ids {
            choice["token_ids"] = json!(answer.token_ids);
        }
        let mut body = self.frame(false, json!([choice]));
        if self.options.return_token_ids {
            self.add_prompt_tokens(&mut body);
        }
        body["usage"] = usage_json(finished);
        self.add_end(&mut body, finished);
        body
    }

    /// What is known at the end; the few answers that crossed numerics classes say so.
    fn add_end(&self, end: &mut Value, finished: &Finished) {
        end["timings"] = timings_json(&finished.timings);
        if !finished.crossed_classes.is_empty() {
            end["crossed_classes"] = json!(finished.crossed_classes);
        }
        end["seed"] = json!(self.seed);
    }

    fn add_prompt_tokens(&self, body: &mut Value) {
        match self.endpoint {
            Endpoint::Chat => body["prompt_token_ids"] = json!(self.prompt_token_ids),
            Endpoint::Completions => body["choices"][0]["prompt_token_ids"] = json!(self.prompt_token_ids),
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
