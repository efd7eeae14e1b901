//! Events of streams. All of them have a number in the stream.

use super::answer::Response;
use super::items::{Content, Item};
use crate::wire::named_event;
use baton_types::RequestError;
use serde::Serialize;

/// Writes events, and numbers them.
#[derive(Default)]
pub(super) struct Numbered(u64);

#[derive(Serialize)]
struct Event<'a, T> {
    #[serde(rename = "type")]
    kind: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    body: T,
}

impl Numbered {
    pub(super) fn write(&mut self, kind: &str, body: impl Serialize, to: &mut Vec<u8>) -> Result<(), RequestError> {
        named_event(kind, &Event { kind, sequence_number: self.0, body }, to)?;
        self.0 += 1;
        Ok(())
    }
}

#[derive(Serialize)]
pub(super) struct Of<'a> {
    pub(super) response: Response<'a>,
}

#[derive(Serialize)]
pub(super) struct OfItem<'a> {
    pub(super) output_index: usize,
    pub(super) item: &'a Item,
}

/// Where a part is: all items have at most one.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Place<'a> {
    pub(super) item_id: &'a str,
    pub(super) output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_index: Option<u32>,
}

#[derive(Serialize)]
pub(super) struct OfPart<'a> {
    #[serde(flatten)]
    pub(super) place: Place<'a>,
    pub(super) part: &'a Content,
}

#[derive(Serialize)]
pub(super) struct More<'a> {
    #[serde(flatten)]
    pub(super) place: Place<'a>,
    pub(super) delta: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logprobs: Option<[(); 0]>,
}

#[derive(Serialize)]
pub(super) struct Text<'a> {
    #[serde(flatten)]
    pub(super) place: Place<'a>,
    pub(super) text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logprobs: Option<[(); 0]>,
}

#[derive(Serialize)]
pub(super) struct Arguments<'a> {
    #[serde(flatten)]
    pub(super) place: Place<'a>,
    pub(super) name: &'a str,
    pub(super) arguments: &'a str,
}
