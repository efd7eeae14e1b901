//! Parts of a chat's answer: reasoning, content and calls of tools.

use super::shapes::{ChoiceContent, Function, ToolCall};
use baton_text::answer::{AnswerParser, Call, CallFormat, Part};
use baton_types::FinishReason;
use std::borrow::Cow;

/// How the parts of the answers of one request are told apart.
#[derive(Clone)]
pub(crate) struct Parts {
    /// For an answer of which nothing came yet.
    pub(crate) parser: AnswerParser,
    pub(crate) format: CallFormat,
}

/// Digits of a call's id.
const ID_DIGITS: usize = 24;
/// Mistral's templates accept no other length.
const MISTRAL_ID_DIGITS: usize = 9;

impl Parts {
    /// A call as OpenAI's API has it. Its id follows from the answer's, the choice and its place there.
    pub(super) fn call(&self, call: Call, answer: &str, sample: u32, index: u32) -> ToolCall {
        let digest = blake3::hash(format!("{answer} {sample} {index}").as_bytes()).to_hex();
        let id = match self.format {
            CallFormat::Mistral => digest[..MISTRAL_ID_DIGITS].to_owned(),
            CallFormat::Hermes | CallFormat::Llama => format!("call_{}", &digest[..ID_DIGITS]),
        };
        let Call { name, arguments } = call;
        ToolCall { index: None, id, kind: "function", function: Function { name, arguments } }
    }

    /// The whole answer of a choice, and whether it calls tools.
    pub(super) fn whole<'a>(&self, text: &str, answer: &str, sample: u32) -> (ChoiceContent<'a>, bool) {
        let mut parser = self.parser.clone();
        let (mut content, mut reasoning, mut calls) = (None::<String>, None::<String>, Vec::new());
        for part in parser.push(text).into_iter().chain(parser.finish()) {
            match part {
                Part::Content(text) => content.get_or_insert_default().push_str(&text),
                Part::Reasoning(text) => reasoning.get_or_insert_default().push_str(&text),
                Part::Call(call) => calls.push(self.call(call, answer, sample, calls.len() as u32)),
            }
        }
        // As in OpenAI's API, an answer without words is an empty text, unless it calls.
        let content = content.or_else(|| calls.is_empty().then(String::new));
        let has_calls = !calls.is_empty();
        (ChoiceContent::parts(content.map(Cow::Owned), reasoning, calls), has_calls)
    }
}

/// The finish reason of a choice that calls tools or does not.
pub(super) fn reason_name(reason: FinishReason, name: &'static str, has_calls: bool) -> &'static str {
    if has_calls && reason == FinishReason::Stop { "tool_calls" } else { name }
}
