//! Items of the output.

use super::answer::ResponseForm;
use crate::openai::parts::CALL_ID;
use baton_text::answer::{Call, Part};
use serde::Serialize;

/// Digits of an item's id.
const ID_DIGITS: usize = 24;

/// How far something got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Item {
    Reasoning {
        id: String,
        status: Status,
        /// None is ever made.
        summary: [(); 0],
        content: Vec<Content>,
    },
    Message {
        id: String,
        status: Status,
        role: &'static str,
        content: Vec<Content>,
    },
    FunctionCall {
        id: String,
        status: Status,
        call_id: String,
        name: String,
        /// The text of a JSON object.
        arguments: String,
    },
}

/// A part of an item.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Content {
    OutputText { text: String, annotations: [(); 0], logprobs: [(); 0] },
    ReasoningText { text: String },
}

impl Content {
    pub(super) fn output(text: String) -> Self {
        Self::OutputText { text, annotations: [], logprobs: [] }
    }

    pub(super) fn text(&self) -> &str {
        match self {
            Self::OutputText { text, .. } | Self::ReasoningText { text } => text,
        }
    }

    pub(super) fn text_mut(&mut self) -> &mut String {
        match self {
            Self::OutputText { text, .. } | Self::ReasoningText { text } => text,
        }
    }
}

impl Item {
    /// The item of a part, the `index`th of the output, after this many calls.
    pub(super) fn of(part: Part, form: &ResponseForm, index: usize, calls: u32) -> Self {
        let id = |prefix: &str| {
            let digest = blake3::hash(format!("{} item {index}", form.id).as_bytes()).to_hex();
            format!("{prefix}{}", &digest[..ID_DIGITS])
        };
        let status = Status::Completed;
        match part {
            Part::Reasoning(text) => {
                Self::Reasoning { id: id("rs_"), status, summary: [], content: vec![Content::ReasoningText { text }] }
            }
            Part::Content(text) => {
                Self::Message { id: id("msg_"), status, role: "assistant", content: vec![Content::output(text)] }
            }
            Part::Call(Call { name, arguments }) => {
                let call_id =
                    form.parts.as_ref().map_or_else(String::new, |parts| parts.call_id(CALL_ID, &form.id, 0, calls));
                Self::FunctionCall { id: id("fc_"), status, call_id, name, arguments }
            }
        }
    }

    pub(super) fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. } | Self::Message { id, .. } | Self::FunctionCall { id, .. } => id,
        }
    }

    pub(super) fn set_status(&mut self, to: Status) {
        match self {
            Self::Reasoning { status, .. } | Self::Message { status, .. } | Self::FunctionCall { status, .. } => {
                *status = to;
            }
        }
    }

    pub(super) fn is_call(&self) -> bool {
        matches!(self, Self::FunctionCall { .. })
    }

    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self, Self::Reasoning { .. })
    }

    /// Its parts; a call has none.
    pub(super) fn content_mut(&mut self) -> Option<&mut Vec<Content>> {
        match self {
            Self::Reasoning { content, .. } | Self::Message { content, .. } => Some(content),
            Self::FunctionCall { .. } => None,
        }
    }
}
