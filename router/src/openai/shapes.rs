//! The JSON structure of answers. They borrow everything that is long.

use super::logprobs::{Logprobs, PromptScores};
use crate::output::Total;
use crate::wire::{Ended, Spent};
use baton_types::TokenId;
use serde::{Serialize, Serializer};
use std::borrow::Cow;

/// A whole answer, or a chunk of a stream.
#[derive(Default, Serialize)]
pub(super) struct Body<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<PromptScores<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<UsageField<'a>>,
    #[serde(flatten)]
    pub(super) ended: Option<Ended<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seed: Option<u64>,
}

/// One choice, or its new part.
#[derive(Serialize)]
pub(super) struct Choice<'a> {
    pub(super) index: u32,
    #[serde(flatten)]
    pub(super) content: ChoiceContent<'a>,
    pub(super) logprobs: Option<Logprobs<'a>>,
    pub(super) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<PromptScores<'a>>,
    #[serde(flatten)]
    pub(super) ended: Option<Ended<'a>>,
}

/// Content of a choice: `message`, `delta` or `text`.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ChoiceContent<'a> {
    /// The whole answer of a chat.
    Message {
        role: &'static str,
        /// Null if the answer is calls alone.
        content: Option<Cow<'a, str>>,
        /// Always null: no answer is a refusal.
        refusal: (),
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<String>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall>,
    },
    /// A part of a chat's answer.
    Delta {
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<&'static str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        content: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tool_calls: Option<[&'a ToolCall; 1]>,
    },
    /// A completion, or a part of it.
    Text(Joined<'a>),
}

/// Two texts as one: an echoed prompt, and what follows.
pub(super) struct Joined<'a>(pub(super) &'a str, pub(super) &'a str);

impl<'a> From<&'a str> for Joined<'a> {
    fn from(text: &'a str) -> Self {
        Self("", text)
    }
}

impl Serialize for Joined<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self("", text) => to.serialize_str(text),
            Self(first, second) => to.collect_str(&format_args!("{first}{second}")),
        }
    }
}

/// A call of a tool.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct ToolCall {
    /// Only in chunks: which call of its choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) index: Option<u32>,
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) function: Function,
}

/// What is called.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Function {
    pub(super) name: String,
    /// The text of a JSON object.
    pub(super) arguments: String,
}

const ROLE: &str = "assistant";

impl<'a> ChoiceContent<'a> {
    /// A chat's whole answer.
    pub(super) fn all(content: &'a str) -> Self {
        Self::parts(Some(Cow::Borrowed(content)), None, Vec::new())
    }

    /// A chat's whole answer, in parts.
    pub(super) fn parts(
        content: Option<Cow<'a, str>>,
        reasoning_content: Option<String>,
        tool_calls: Vec<ToolCall>,
    ) -> Self {
        Self::Message { role: ROLE, content, refusal: (), reasoning_content, tool_calls }
    }

    /// The first chunk of a chat.
    pub(super) fn opening() -> Self {
        Self::Delta { role: Some(ROLE), content: Some(""), reasoning_content: None, tool_calls: None }
    }

    pub(super) fn more(content: &'a str) -> Self {
        Self::Delta { role: None, content: Some(content), reasoning_content: None, tool_calls: None }
    }

    pub(super) fn reasoning(text: &'a str) -> Self {
        Self::Delta { role: None, content: None, reasoning_content: Some(text), tool_calls: None }
    }

    pub(super) fn call(call: &'a ToolCall) -> Self {
        Self::Delta { role: None, content: None, reasoning_content: None, tool_calls: Some([call]) }
    }

    /// A completion, or a part of it.
    pub(super) fn text(text: &'a str) -> Self {
        Self::Text(text.into())
    }

    /// A chunk without role and content.
    pub(super) fn nothing() -> Self {
        Self::Delta { role: None, content: None, reasoning_content: None, tool_calls: None }
    }
}

/// `usage`, if it is present.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum UsageField<'a> {
    /// Null: not known yet.
    None,
    /// The count so far, of one choice.
    SoFar { prompt_tokens: usize, completion_tokens: usize, total_tokens: usize },
    /// The whole count, at the end.
    Of(Usage<'a>),
}

/// OpenAI's fields and Baton's own, `cache_write_tokens` in the details among them.
#[derive(Serialize)]
pub(super) struct Usage<'a> {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: Details,
    #[serde(flatten)]
    spent: Spent<'a>,
}

#[derive(Serialize)]
struct Details {
    cached_tokens: u32,
    cache_write_tokens: u32,
}

impl<'a> UsageField<'a> {
    pub(super) fn so_far(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self::SoFar { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }

    /// Usage of a whole answer.
    pub(super) fn of(total: &'a Total) -> Self {
        let usage = &total.usage;
        Self::Of(Usage {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: Details {
                cached_tokens: usage.cached_tokens,
                cache_write_tokens: usage.cache_write_tokens,
            },
            spent: Spent::new(total),
        })
    }
}
