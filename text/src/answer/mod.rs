//! The parts of a chat's answer: reasoning, content, and calls of tools, in the notation of the model's own template.
//!
//! What looks like a call and is none stays content: a name that no tool has, arguments that are no JSON object, a call that the
//! end of the answer cut off. So every [`Call`] can be read.

mod calls;
mod harmony;
mod marked;
mod parser;

pub use calls::{CallFormat, NotationPart};
pub use parser::AnswerParser;

/// A part of an answer, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// What the model thought before it answered.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A call of a tool.
    Call(Call),
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// One of the request's tools.
    pub name: String,
    /// A JSON object, as the model wrote it.
    pub arguments: String,
}

/// Notations of a model's answers, by its chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerFormat {
    /// How it calls tools.
    pub calls: CallFormat,
    /// Whether its template shows it tools in this notation. If not, they are described to it in a message.
    pub shows_tools: bool,
    /// Whether it puts its reasoning between `<think>` and `</think>`.
    pub reasons: bool,
}

impl AnswerFormat {
    /// Spellings of what tells its parts apart, which may be control tokens; those of calls if the answer may have some.
    pub fn marks(self, has_tools: bool) -> impl Iterator<Item = &'static str> {
        let has_calls = has_tools || self.calls == CallFormat::Harmony;
        let calls = self.calls.marks().iter().copied().filter(move |_| has_calls);
        let reasoning = [marked::THINKS, marked::THOUGHT].into_iter().filter(move |_| self.reasons);
        calls.chain(reasoning)
    }

    /// What opens an answer that is content and nothing else, in a prompt that leaves it open; empty where nothing does.
    pub fn opens_content(self) -> &'static str {
        match self.calls {
            CallFormat::Harmony => harmony::FINAL,
            _ => "",
        }
    }

    /// The notations that a template shows the model.
    pub(crate) fn of_template(source: &str) -> Self {
        let (shown, shows_tools) = (CallFormat::of_template(source), source.contains("tools"));
        Self {
            calls: shown.unwrap_or(CallFormat::Hermes),
            shows_tools: shows_tools && shown.is_some(),
            reasons: source.contains(marked::THOUGHT),
        }
    }
}
