//! Text of an answer to its parts, as it comes.

use super::harmony::HarmonyParser;
use super::marked::MarkedParser;
use super::{AnswerFormat, CallFormat, Part};
use std::sync::Arc;

/// Parses one answer, piece by piece. Text is held back only while it may be the beginning of a mark, and in a call.
#[derive(Clone, Debug)]
pub struct AnswerParser(Notation);

#[derive(Clone, Debug)]
enum Notation {
    Marked(MarkedParser),
    Harmony(HarmonyParser),
}

impl AnswerParser {
    /// For an answer to a prompt with these tools. `prompt` is the end of the prompt: a template may have opened the reasoning, or a
    /// message.
    pub fn new(format: AnswerFormat, tools: Arc<[String]>, prompt: &str) -> Self {
        Self(match format.calls {
            CallFormat::Harmony => Notation::Harmony(HarmonyParser::new(tools, prompt)),
            _ => Notation::Marked(MarkedParser::new(format, tools, prompt)),
        })
    }

    /// Whether it does nothing: all of the answer is content.
    pub fn is_plain(&self) -> bool {
        match &self.0 {
            Notation::Marked(parser) => parser.is_plain(),
            Notation::Harmony(_) => false,
        }
    }

    /// Whether a call may be among the parts.
    pub fn may_call(&self) -> bool {
        match &self.0 {
            Notation::Marked(parser) => parser.may_call(),
            Notation::Harmony(parser) => parser.may_call(),
        }
    }

    /// Whether the answer is in its reasoning.
    pub fn is_reasoning(&self) -> bool {
        match &self.0 {
            Notation::Marked(parser) => parser.is_reasoning(),
            Notation::Harmony(parser) => parser.is_reasoning(),
        }
    }

    /// Whether a call was among the parts.
    pub fn has_calls(&self) -> bool {
        match &self.0 {
            Notation::Marked(parser) => parser.has_calls(),
            Notation::Harmony(parser) => parser.has_calls(),
        }
    }

    /// The parts that this text completes.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        match &mut self.0 {
            Notation::Marked(parser) => parser.push(text),
            Notation::Harmony(parser) => parser.push(text),
        }
    }

    /// The parts that the end of the answer completes.
    pub fn finish(&mut self) -> Vec<Part> {
        match &mut self.0 {
            Notation::Marked(parser) => parser.finish(),
            Notation::Harmony(parser) => parser.finish(),
        }
    }
}
