//! Answers as events. The last events repeat all that was said, so a stream keeps its answer, within the budget of
//! answers.

use super::answer::{ResponseForm, status_of};
use super::events::{Arguments, More, Numbered, Of, OfItem, OfPart, Place, Text};
use super::items::{Item, Status};
use crate::output::{Delta, Finished, make_room};
use crate::wire::serialize::length;
use crate::wire::{PartsReader, StreamForm};
use baton_node::intake::Hold;
use baton_text::answer::Part;
use baton_types::RequestError;

/// What a byte of text takes: it is kept in a list that doubles, and is in four of the last events, which are written
/// to one that doubles too.
const TEXT_TIMES: u64 = 10;
/// What an item takes besides its text: itself, and its ids and names of fields in all of its events.
const ITEM_BYTES: u64 = 4 << 10;

/// Writes the events of one response.
pub(crate) struct ResponseStream {
    form: ResponseForm,
    reader: PartsReader,
    events: Numbered,
    /// The last may be open: it grows.
    items: Vec<Item>,
    is_open: bool,
    calls: u32,
    reasoning_tokens: u32,
    /// Memory of what is kept, and how much of it is used.
    hold: Hold,
    kept: u64,
}

impl ResponseStream {
    pub(super) fn new(form: ResponseForm, hold: Hold) -> Self {
        let reader = PartsReader::new(form.parts.as_ref());
        let (items, events) = (Vec::new(), Numbered::default());
        let (is_open, calls, reasoning_tokens, kept) = (false, 0, 0, 0);
        Self { form, reader, events, items, is_open, calls, reasoning_tokens, hold, kept }
    }

    fn keeps(&mut self, bytes: u64) -> Result<(), RequestError> {
        self.kept += bytes;
        make_room(&mut self.hold, self.kept)
    }

    fn part(&mut self, part: Part, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let is_more = self.is_open
            && matches!(
                (self.items.last(), &part),
                (Some(Item::Message { .. }), Part::Content(_)) | (Some(Item::Reasoning { .. }), Part::Reasoning(_))
            );
        if !is_more {
            self.close(Status::Completed, to)?;
            self.keeps(ITEM_BYTES)?;
        }
        match part {
            Part::Content(text) | Part::Reasoning(text) if is_more => self.more(&text, to),
            Part::Content(text) => self.open(Part::Content(String::new()), to).and_then(|()| self.more(&text, to)),
            Part::Reasoning(text) => self.open(Part::Reasoning(String::new()), to).and_then(|()| self.more(&text, to)),
            call @ Part::Call(_) => self.call(call, to),
        }
    }

    /// Opens an item without text.
    fn open(&mut self, empty: Part, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let output_index = self.items.len();
        let mut item = Item::of(empty, &self.form, output_index, self.calls);
        item.set_status(Status::InProgress);
        let part = item.content_mut().and_then(Vec::pop);
        self.events.write("response.output_item.added", OfItem { output_index, item: &item }, to)?;
        if let Some(part) = part {
            let place = Place { item_id: item.id(), output_index, content_index: Some(0) };
            self.events.write("response.content_part.added", OfPart { place, part: &part }, to)?;
            if let Some(content) = item.content_mut() {
                content.push(part);
            }
        }
        self.items.push(item);
        self.is_open = true;
        Ok(())
    }

    /// More of the open item.
    fn more(&mut self, delta: &str, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let output_index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return Ok(()) };
        if let Some(part) = item.content_mut().and_then(|content| content.first_mut()) {
            part.text_mut().push_str(delta);
        }
        let (kind, logprobs) = match item {
            Item::Reasoning { .. } => ("response.reasoning_text.delta", None),
            _ => ("response.output_text.delta", Some([])),
        };
        let place = Place { item_id: item.id(), output_index, content_index: Some(0) };
        self.events.write(kind, More { place, delta, logprobs }, to)
    }

    /// A call, which comes whole.
    fn call(&mut self, call: Part, to: &mut Vec<u8>) -> Result<(), RequestError> {
        let output_index = self.items.len();
        let mut item = Item::of(call, &self.form, output_index, self.calls);
        self.calls += 1;
        let Item::FunctionCall { arguments, status, .. } = &mut item else { return Ok(()) };
        let whole = std::mem::take(arguments);
        *status = Status::InProgress;
        self.events.write("response.output_item.added", OfItem { output_index, item: &item }, to)?;
        let Item::FunctionCall { id, arguments, status, name, .. } = &mut item else { return Ok(()) };
        let place = Place { item_id: id, output_index, content_index: None };
        let more = More { place, delta: &whole, logprobs: None };
        self.events.write("response.function_call_arguments.delta", more, to)?;
        let done = Arguments { place, name, arguments: &whole };
        self.events.write("response.function_call_arguments.done", done, to)?;
        (*arguments, *status) = (whole, Status::Completed);
        self.events.write("response.output_item.done", OfItem { output_index, item: &item }, to)?;
        self.items.push(item);
        Ok(())
    }

    /// Closes the open item, if there is one.
    fn close(&mut self, status: Status, to: &mut Vec<u8>) -> Result<(), RequestError> {
        if !std::mem::take(&mut self.is_open) {
            return Ok(());
        }
        let output_index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return Ok(()) };
        item.set_status(status);
        if let Item::Reasoning { id, content, .. } | Item::Message { id, content, .. } = &*item
            && let Some(part) = content.first()
        {
            let (kind, logprobs) = if item.is_reasoning() {
                ("response.reasoning_text.done", None)
            } else {
                ("response.output_text.done", Some([]))
            };
            let place = Place { item_id: id, output_index, content_index: Some(0) };
            self.events.write(kind, Text { place, text: part.text(), logprobs }, to)?;
            self.events.write("response.content_part.done", OfPart { place, part }, to)?;
        }
        self.events.write("response.output_item.done", OfItem { output_index, item }, to)
    }
}

impl StreamForm for ResponseStream {
    const KEEPALIVE: &'static [u8] = b": keepalive\n\n";

    fn samples(&self) -> u32 {
        1
    }

    fn opening(&mut self, _sample: u32, to: &mut Vec<u8>) -> Result<(), RequestError> {
        // For what the last event has besides its items.
        self.keeps(ITEM_BYTES)?;
        for kind in ["response.created", "response.in_progress"] {
            self.events.write(kind, Of { response: self.form.response(&[]) }, to)?;
        }
        Ok(())
    }

    fn delta(&mut self, delta: &Delta, to: &mut Vec<u8>) -> Result<(), RequestError> {
        self.keeps(TEXT_TIMES * length(&delta.text))?;
        let parts = self.reader.push(&delta.text);
        if self.reader.is_reasoning() {
            self.reasoning_tokens = self.reasoning_tokens.saturating_add(delta.token_ids.len() as u32);
        }
        parts.into_iter().try_for_each(|part| self.part(part, to))
    }

    fn finished(&mut self, finished: &Finished, to: &mut Vec<u8>) -> Result<(), RequestError> {
        self.reader.finish().into_iter().try_for_each(|part| self.part(part, to))?;
        let status = status_of(finished);
        self.close(status, to)?;
        let nothing = Default::default();
        let total = finished.total.as_ref().unwrap_or(&nothing);
        let response = self.form.finished(&self.items, finished, total, self.reasoning_tokens);
        let kind = if status == Status::Incomplete { "response.incomplete" } else { "response.completed" };
        self.events.write(kind, Of { response }, to)
    }

    fn error(&mut self, error: &RequestError, to: &mut Vec<u8>) {
        // A body of strings can always be serialized.
        let _ = self.events.write("response.failed", Of { response: self.form.failed(error) }, to);
    }
}
