//! Parts of a chat's answer: reasoning, content and calls of tools.

use super::shapes::{ChoiceContent, Function, ToolCall};
use crate::wire::{Parts, PartsReader};
use baton_text::answer::{Call, Part};
use baton_types::FinishReason;
use std::borrow::Cow;

/// What ids of calls begin with.
pub(crate) const CALL_ID: &str = "call_";

/// A call as OpenAI's API has it.
pub(super) fn tool_call(parts: &Parts, call: Call, answer: &str, sample: u32, index: u32) -> ToolCall {
    let id = parts.call_id(CALL_ID, answer, sample, index);
    let Call { name, arguments } = call;
    ToolCall { index: None, id, kind: "function", function: Function { name, arguments } }
}

/// The whole answer of a choice, and whether it calls tools.
pub(super) fn whole<'a>(parts: &Parts, text: &str, answer: &str, sample: u32) -> (ChoiceContent<'a>, bool) {
    let (mut content, mut reasoning, mut calls) = (None::<String>, None::<String>, Vec::new());
    for part in PartsReader::new(Some(parts)).whole(text) {
        match part {
            Part::Content(text) => content.get_or_insert_default().push_str(&text),
            Part::Reasoning(text) => reasoning.get_or_insert_default().push_str(&text),
            Part::Call(call) => calls.push(tool_call(parts, call, answer, sample, calls.len() as u32)),
        }
    }
    // As in OpenAI's API, an answer without words is an empty text, unless it calls.
    let content = content.or_else(|| calls.is_empty().then(String::new));
    let has_calls = !calls.is_empty();
    (ChoiceContent::parts(content.map(Cow::Owned), reasoning, calls), has_calls)
}

/// The finish reason of a choice that calls tools or does not.
pub(super) fn reason_name(reason: FinishReason, name: &'static str, has_calls: bool) -> &'static str {
    if has_calls && reason == FinishReason::Stop { "tool_calls" } else { name }
}
