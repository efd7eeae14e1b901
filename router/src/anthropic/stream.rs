//! Answers as events: `message_start`, the blocks, each with its start, its deltas and its stop, `message_delta` and
//! `message_stop`.

use super::error::error_body;
use super::message::{MessageForm, Usage, stop_reason};
use crate::output::{Delta, Finished};
use crate::wire::{Ended, PartsReader, StreamForm, named_event};
use baton_text::answer::{Call, Part};
use baton_types::RequestError;
use serde::Serialize;
use serde_json::{Value, json};

/// Writes the events of one message.
pub(crate) struct MessageStream {
    form: MessageForm,
    cached_tokens: Option<u32>,
    reader: PartsReader,
    /// The block that is open.
    open: Option<Text>,
    /// Index of the open block, or of the next.
    index: u32,
    calls: u32,
}

/// Blocks that grow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Text {
    Text,
    Thinking,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum BlockDelta<'a> {
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

#[derive(Serialize)]
struct DeltaEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    index: u32,
    delta: BlockDelta<'a>,
}

#[derive(Serialize)]
struct EndEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    delta: End<'a>,
    usage: Usage<'a>,
    #[serde(flatten)]
    ended: Ended<'a>,
}

#[derive(Serialize)]
struct End<'a> {
    stop_reason: &'static str,
    stop_sequence: Option<&'a str>,
}

impl MessageStream {
    pub(super) fn new(form: MessageForm, cached_tokens: Option<u32>) -> Self {
        let reader = PartsReader::new(form.parts.as_ref());
        Self { form, cached_tokens, reader, open: None, index: 0, calls: 0 }
    }

    fn part(&mut self, part: Part, to: &mut Vec<u8>) -> Result<(), RequestError> {
        match part {
            Part::Content(text) => {
                self.opens(Text::Text, to)?;
                self.block_delta(BlockDelta::Text { text: &text }, to)
            }
            Part::Reasoning(thinking) => {
                self.opens(Text::Thinking, to)?;
                self.block_delta(BlockDelta::Thinking { thinking: &thinking }, to)
            }
            Part::Call(Call { name, arguments }) => {
                self.closes(to)?;
                let id = self.form.call_id(self.calls);
                self.calls += 1;
                self.start(&json!({"type": "tool_use", "id": id, "name": name, "input": {}}), to)?;
                self.block_delta(BlockDelta::InputJson { partial_json: &arguments }, to)?;
                self.stop(to)
            }
        }
    }

    /// Opens a block of this kind, unless it is the open one.
    fn opens(&mut self, kind: Text, to: &mut Vec<u8>) -> Result<(), RequestError> {
        if self.open == Some(kind) {
            return Ok(());
        }
        self.closes(to)?;
        self.open = Some(kind);
        let block = match kind {
            Text::Text => json!({"type": "text", "text": ""}),
            Text::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
        };
        self.start(&block, to)
    }

    /// Closes the open block, if there is one. Some clients keep thinking only with its signature.
    fn closes(&mut self, to: &mut Vec<u8>) -> Result<(), RequestError> {
        match self.open.take() {
            None => return Ok(()),
            Some(Text::Text) => {}
            Some(Text::Thinking) => self.block_delta(BlockDelta::Signature { signature: "" }, to)?,
        }
        self.stop(to)
    }

    fn start(&self, block: &Value, to: &mut Vec<u8>) -> Result<(), RequestError> {
        const NAME: &str = "content_block_start";
        named_event(NAME, &json!({"type": NAME, "index": self.index, "content_block": block}), to)
    }

    fn block_delta(&self, delta: BlockDelta<'_>, to: &mut Vec<u8>) -> Result<(), RequestError> {
        const NAME: &str = "content_block_delta";
        named_event(NAME, &DeltaEvent { kind: NAME, index: self.index, delta }, to)
    }

    fn stop(&mut self, to: &mut Vec<u8>) -> Result<(), RequestError> {
        const NAME: &str = "content_block_stop";
        let index = self.index;
        self.index += 1;
        named_event(NAME, &json!({"type": NAME, "index": index}), to)
    }
}

impl StreamForm for MessageStream {
    const KEEPALIVE: &'static [u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";

    fn samples(&self) -> u32 {
        1
    }

    fn opening(&mut self, _sample: u32, to: &mut Vec<u8>) -> Result<(), RequestError> {
        #[derive(Serialize)]
        struct Start<T> {
            #[serde(rename = "type")]
            kind: &'static str,
            message: T,
        }
        const NAME: &str = "message_start";
        let message = self.form.body(Usage::at_start(self.form.prompt_tokens, self.cached_tokens));
        named_event(NAME, &Start { kind: NAME, message }, to)
    }

    fn delta(&mut self, delta: &Delta, to: &mut Vec<u8>) -> Result<(), RequestError> {
        self.reader.push(&delta.text).into_iter().try_for_each(|part| self.part(part, to))
    }

    fn finished(&mut self, finished: &Finished, to: &mut Vec<u8>) -> Result<(), RequestError> {
        const NAME: &str = "message_delta";
        self.reader.finish().into_iter().try_for_each(|part| self.part(part, to))?;
        self.closes(to)?;
        let nothing = Default::default();
        let total = finished.total.as_ref().unwrap_or(&nothing);
        let delta = End { stop_reason: stop_reason(finished, self.calls > 0), stop_sequence: finished.stop.as_deref() };
        let end = EndEvent { kind: NAME, delta, usage: Usage::of(total), ended: Ended::new(finished) };
        named_event(NAME, &end, to)?;
        named_event("message_stop", &json!({"type": "message_stop"}), to)
    }

    fn error(&mut self, error: &RequestError, to: &mut Vec<u8>) {
        // A body of strings can always be serialized.
        let _ = named_event("error", &error_body(error), to);
    }
}
