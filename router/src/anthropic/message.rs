//! Answers in one body.

use super::stream::MessageStream;
use crate::output::{Choices, Delta, Finished, Total};
use crate::wire::serialize::length;
use crate::wire::{Ended, Form, Parts, PartsReader, Spent};
use baton_node::intake::Hold;
use baton_text::answer::{Call, Part};
use baton_types::FinishReason;
use serde::Serialize;
use serde_json::value::RawValue;

/// How an answer is written as a message.
#[derive(Clone)]
pub(crate) struct MessageForm {
    /// Id of the answer: `msg_…`.
    pub(crate) id: String,
    /// Model as the card names it.
    pub(crate) model: String,
    pub(crate) is_stream: bool,
    pub(crate) prompt_tokens: u32,
    /// Seed used, given or drawn.
    pub(crate) seed: u64,
    /// `None`: all of the answer is text.
    pub(crate) parts: Option<Parts>,
}

/// Upper bound on a message's bytes besides the generated text: names, numbers, timings, numerics classes, and a stop
/// string whose every byte is escaped.
const MESSAGE_BYTES: u64 = 4 << 10;
/// The quotes around a text.
const QUOTES_BYTES: u64 = 2;
/// What a block takes, its id and names of fields included, for each byte of its text: the shortest call has 28.
const BLOCK_TIMES: u64 = 6;
/// What ids of calls begin with.
const CALL_ID: &str = "toolu_";

/// A message, or what opens one.
#[derive(Serialize)]
pub(super) struct Body<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    pub(super) content: Vec<Block>,
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<&'a str>,
    pub(super) usage: Usage<'a>,
    #[serde(flatten)]
    pub(super) ended: Option<Ended<'a>>,
    seed: u64,
}

/// A block of content.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block {
    Text {
        text: String,
    },
    /// The signature proves nothing: messages that come back are not checked.
    Thinking {
        thinking: String,
        signature: &'static str,
    },
    ToolUse {
        id: String,
        name: String,
        input: Box<RawValue>,
    },
}

/// Tokens of the prompt, each counted once: cached, written to the cache, or neither.
#[derive(Serialize)]
pub(super) struct Usage<'a> {
    input_tokens: u32,
    cache_creation_input_tokens: Option<u32>,
    cache_read_input_tokens: Option<u32>,
    output_tokens: u32,
    #[serde(flatten)]
    spent: Option<Spent<'a>>,
}

impl<'a> Usage<'a> {
    pub(super) fn of(total: &'a Total) -> Self {
        let usage = &total.usage;
        let (read, written) = (usage.cached_tokens, usage.cache_write_tokens);
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(read).saturating_sub(written),
            cache_creation_input_tokens: Some(written),
            cache_read_input_tokens: Some(read),
            output_tokens: usage.completion_tokens,
            spent: Some(Spent::new(total)),
        }
    }

    /// Before the end: what was written to caches is not known, and what was cached may not be.
    pub(super) fn at_start(prompt_tokens: u32, cached_tokens: Option<u32>) -> Self {
        Self {
            input_tokens: prompt_tokens.saturating_sub(cached_tokens.unwrap_or(0)),
            cache_creation_input_tokens: None,
            cache_read_input_tokens: cached_tokens,
            output_tokens: 0,
            spent: None,
        }
    }
}

/// Why a message ended.
pub(super) fn stop_reason(finished: &Finished, has_calls: bool) -> &'static str {
    match finished.reason {
        FinishReason::Length => "max_tokens",
        FinishReason::Stop | FinishReason::Cancelled if finished.stop.is_some() => "stop_sequence",
        FinishReason::Stop | FinishReason::Cancelled if has_calls => "tool_use",
        FinishReason::Stop | FinishReason::Cancelled => "end_turn",
    }
}

impl MessageForm {
    /// A message without content.
    pub(super) fn body<'a>(&'a self, usage: Usage<'a>) -> Body<'a> {
        Body {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: &self.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage,
            ended: None,
            seed: self.seed,
        }
    }

    /// Id of a call, by its place among the calls of the answer.
    pub(super) fn call_id(&self, index: u32) -> String {
        self.parts.as_ref().map_or_else(String::new, |parts| parts.call_id(CALL_ID, &self.id, 0, index))
    }

    fn blocks(&self, text: &str) -> (Vec<Block>, bool) {
        let mut calls = 0;
        let block = |part: Part| match part {
            Part::Content(text) => Block::Text { text },
            Part::Reasoning(thinking) => Block::Thinking { thinking, signature: "" },
            Part::Call(Call { name, arguments }) => {
                calls += 1;
                // It was read as an object before.
                let input = RawValue::from_string(arguments).unwrap_or_else(|_| RawValue::NULL.to_owned());
                Block::ToolUse { id: self.call_id(calls - 1), name, input }
            }
        };
        let blocks = PartsReader::new(self.parts.as_ref()).whole(text).into_iter().map(block).collect();
        (blocks, calls > 0)
    }
}

impl Form for MessageForm {
    type Stream = MessageStream;

    fn is_stream(&self) -> bool {
        self.is_stream
    }

    fn choices(&self) -> Choices {
        Choices::of_one(1)
    }

    fn prompt_tokens(&self) -> usize {
        self.prompt_tokens as usize
    }

    fn bytes_before(&self) -> u64 {
        MESSAGE_BYTES + (self.id.len() + self.model.len()) as u64
    }

    fn bytes_of(&self, delta: &Delta) -> u64 {
        let times = if self.parts.as_ref().is_some_and(|parts| parts.parser.may_call()) { BLOCK_TIMES } else { 1 };
        times * length(&delta.text).saturating_sub(QUOTES_BYTES)
    }

    fn whole<'a>(&'a self, samples: &'a [(Delta, Finished)], total: &'a Total) -> impl Serialize + 'a {
        let mut body = self.body(Usage::of(total));
        if let Some((answer, finished)) = samples.first() {
            let (content, has_calls) = self.blocks(&answer.text);
            body.content = content;
            body.stop_reason = Some(stop_reason(finished, has_calls));
            body.stop_sequence = finished.stop.as_deref();
            body.ended = Some(Ended::new(finished));
        }
        body
    }

    fn stream(self, cached_tokens: Option<u32>, _kept: Hold) -> MessageStream {
        MessageStream::new(self, cached_tokens)
    }
}
