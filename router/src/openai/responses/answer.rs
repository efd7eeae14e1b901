//! Responses: of a whole answer, and those that events of streams carry.

use super::items::{Item, Status};
use super::stream::ResponseStream;
use crate::openai::logprobs::TextOfToken;
use crate::output::{Choices, Delta, Finished, Total};
use crate::request::ToolChoice;
use crate::wire::serialize::length;
use crate::wire::{Ended, Form, Parts, PartsReader, Spent};
use baton_node::intake::Hold;
use baton_types::{FinishReason, RequestError, TokenId};
use serde::Serialize;
use serde_json::{Value, json};

/// How an answer is written as a response.
#[derive(Clone)]
pub(crate) struct ResponseForm {
    /// Id of the answer: `resp_…`.
    pub(crate) id: String,
    /// Model as the card names it.
    pub(crate) model: String,
    /// Unix time, in seconds.
    pub(crate) created: u64,
    pub(crate) is_stream: bool,
    pub(crate) prompt_tokens: usize,
    /// What was asked for, and what is used where nothing was.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) tool_choice: ToolChoice,
    pub(crate) is_parallel: bool,
    /// Seed used, given or drawn.
    pub(crate) seed: u64,
    /// `None`: all of the answer is text.
    pub(crate) parts: Option<Parts>,
    /// Bytes of tokens, by which those of reasoning are counted.
    pub(crate) token_text: TextOfToken,
}

/// Upper bound on a response's bytes besides the generated text: names, numbers, timings and numerics classes.
const RESPONSE_BYTES: u64 = 4 << 10;
/// The quotes around a text.
const QUOTES_BYTES: u64 = 2;
/// What an item takes, its ids and names of fields included, for each byte of its text: the shortest call has 28.
const ITEM_TIMES: u64 = 8;

#[derive(Serialize)]
pub(super) struct Response<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: Status,
    background: bool,
    error: Option<Failure<'a>>,
    incomplete_details: Option<Incomplete>,
    /// What was asked for is not repeated where it may be long.
    instructions: (),
    max_output_tokens: Option<u32>,
    metadata: Empty,
    model: &'a str,
    output: &'a [Item],
    parallel_tool_calls: bool,
    previous_response_id: (),
    store: bool,
    temperature: f64,
    tool_choice: Value,
    tools: [(); 0],
    top_p: f64,
    truncation: &'static str,
    usage: Option<Usage<'a>>,
    #[serde(flatten)]
    ended: Option<Ended<'a>>,
    seed: u64,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
struct Failure<'a> {
    code: &'static str,
    message: &'a str,
}

impl<'a> Failure<'a> {
    fn of(error: &'a RequestError) -> Self {
        let (kind, code) = error.kind.openai();
        Self { code: code.unwrap_or(kind), message: &error.message }
    }
}

#[derive(Serialize)]
struct Incomplete {
    reason: &'static str,
}

#[derive(Serialize)]
struct Usage<'a> {
    input_tokens: u32,
    input_tokens_details: InputDetails,
    output_tokens: u32,
    output_tokens_details: OutputDetails,
    total_tokens: u32,
    #[serde(flatten)]
    spent: Spent<'a>,
}

#[derive(Serialize)]
struct InputDetails {
    cached_tokens: u32,
    cache_write_tokens: u32,
}

#[derive(Serialize)]
struct OutputDetails {
    reasoning_tokens: u32,
}

impl<'a> Usage<'a> {
    fn of(total: &'a Total, reasoning_tokens: u32) -> Self {
        let usage = &total.usage;
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails {
                cached_tokens: usage.cached_tokens,
                cache_write_tokens: usage.cache_write_tokens,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens },
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            spent: Spent::new(total),
        }
    }
}

/// How an answer ended.
pub(super) fn status_of(finished: &Finished) -> Status {
    if finished.reason == FinishReason::Length { Status::Incomplete } else { Status::Completed }
}

impl ResponseForm {
    /// A response that is not finished.
    pub(super) fn response<'a>(&'a self, output: &'a [Item]) -> Response<'a> {
        let tool_choice = match &self.tool_choice {
            ToolChoice::None => json!("none"),
            ToolChoice::Auto => json!("auto"),
            ToolChoice::Required => json!("required"),
            ToolChoice::Named(name) => json!({"type": "function", "name": name}),
        };
        Response {
            id: &self.id,
            object: "response",
            created_at: self.created,
            status: Status::InProgress,
            background: false,
            error: None,
            incomplete_details: None,
            instructions: (),
            max_output_tokens: self.max_tokens,
            metadata: Empty {},
            model: &self.model,
            output,
            parallel_tool_calls: self.is_parallel,
            previous_response_id: (),
            store: false,
            temperature: self.temperature.into(),
            tool_choice,
            tools: [],
            top_p: self.top_p.into(),
            truncation: "disabled",
            usage: None,
            ended: None,
            seed: self.seed,
        }
    }

    /// A response at its end.
    pub(super) fn finished<'a>(
        &'a self,
        output: &'a [Item],
        finished: &'a Finished,
        total: &'a Total,
        reasoning_tokens: u32,
    ) -> Response<'a> {
        let status = status_of(finished);
        let incomplete_details = (status == Status::Incomplete).then_some(Incomplete { reason: "max_output_tokens" });
        let usage = Some(Usage::of(total, reasoning_tokens));
        Response { status, incomplete_details, usage, ended: Some(Ended::new(finished)), ..self.response(output) }
    }

    /// A response that ends with an error.
    pub(super) fn failed<'a>(&'a self, error: &'a RequestError) -> Response<'a> {
        Response { status: Status::Failed, error: Some(Failure::of(error)), ..self.response(&[]) }
    }

    /// The items of a whole answer. The last one of an answer that was cut off is incomplete.
    fn items(&self, text: &str, finished: &Finished) -> Vec<Item> {
        let (mut items, mut calls) = (Vec::new(), 0);
        for part in PartsReader::new(self.parts.as_ref()).whole(text) {
            let item = Item::of(part, self, items.len(), calls);
            calls += u32::from(item.is_call());
            items.push(item);
        }
        if let Some(last) = items.last_mut().filter(|last| !last.is_call()) {
            last.set_status(status_of(finished));
        }
        items
    }

    /// How many tokens of an answer are reasoning, counted as in a stream: a token at a time.
    fn reasoning_tokens(&self, text: &str, tokens: &[TokenId]) -> u32 {
        let (mut reader, mut count) = (PartsReader::new(self.parts.as_ref()), 0);
        let (mut seen, mut read) = (0, 0);
        for token in tokens {
            seen += (self.token_text)(*token).map_or(0, |bytes| bytes.len());
            let end = text.floor_char_boundary(seen);
            reader.push(&text[read..end]);
            read = end;
            count += u32::from(reader.is_reasoning());
        }
        count
    }
}

/// A whole answer, which owns its items.
struct Whole<'a> {
    form: &'a ResponseForm,
    items: Vec<Item>,
    finished: &'a Finished,
    total: &'a Total,
    reasoning_tokens: u32,
}

impl Serialize for Whole<'_> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.form.finished(&self.items, self.finished, self.total, self.reasoning_tokens).serialize(to)
    }
}

impl Form for ResponseForm {
    type Stream = ResponseStream;

    fn is_stream(&self) -> bool {
        self.is_stream
    }

    fn choices(&self) -> Choices {
        Choices::of_one(1)
    }

    fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    fn bytes_before(&self) -> u64 {
        RESPONSE_BYTES + (self.id.len() + self.model.len()) as u64
    }

    fn bytes_of(&self, delta: &Delta) -> u64 {
        let times = if self.parts.as_ref().is_some_and(|parts| parts.parser.may_call()) { ITEM_TIMES } else { 1 };
        times * length(&delta.text).saturating_sub(QUOTES_BYTES)
    }

    fn whole<'a>(&'a self, samples: &'a [(Delta, Finished)], total: &'a Total) -> impl Serialize + 'a {
        samples.first().map(|(answer, finished)| {
            let items = self.items(&answer.text, finished);
            let reasons = items.first().is_some_and(Item::is_reasoning);
            let reasoning_tokens = if reasons { self.reasoning_tokens(&answer.text, &answer.token_ids) } else { 0 };
            Whole { form: self, items, finished, total, reasoning_tokens }
        })
    }

    fn stream(self, _cached_tokens: Option<u32>, kept: Hold) -> ResponseStream {
        ResponseStream::new(self, kept)
    }
}
