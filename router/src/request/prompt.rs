//! Prompts as received, and their memory.

use baton_text::{Content, Ending, Message};
use baton_types::TokenId;
use serde_json::{Map, Value};
use std::sync::Arc;

/// The input that the model continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Messages, to be rendered by the model's chat template.
    Chat {
        /// Messages from the oldest to the newest.
        messages: Vec<Message>,
        /// Tools in OpenAI's form, a list.
        tools: Option<Value>,
        /// Passed to the template besides the messages.
        template_kwargs: Map<String, Value>,
        /// What comes after the messages.
        ending: Ending,
    },
    /// Text and token ids, in order.
    Segments(Vec<Segment>),
    /// Several prompts of one call, each a segment of its own.
    List(Vec<Segment>),
}

/// What counts of a chat besides the bytes of texts and names.
struct Count {
    /// A message, or a part of its content.
    message: usize,
    /// A JSON value in a list that has grown.
    value: usize,
    /// A member of a JSON object, besides its value.
    member: usize,
    /// A number, or a name such as `false`.
    scalar: usize,
}

/// Approximate memory. The parser has already bounded the depth of JSON.
const MEMORY: Count = Count { message: 256, value: 64, member: 128, scalar: 0 };
/// Text alone; that of a scalar with what separates it from the next.
const TEXT: Count = Count { message: 0, value: 0, member: 0, scalar: 6 };

impl Count {
    fn chat(&self, messages: &[Message], tools: Option<&Value>, template_kwargs: &Map<String, Value>) -> usize {
        let text = |content: &Content| match content {
            Content::Text(text) => text.len(),
            Content::Parts(parts) => parts.iter().map(|part| self.message + part.len()).sum(),
        };
        let message = |Message { role: _, content, extra }: &Message| {
            self.message + content.as_ref().map_or(0, text) + self.members(extra)
        };
        // A list of tools is kept in three forms.
        let tools = tools.map_or(0, |tools| if self.message > 0 { 3 } else { 1 } * self.value(tools));
        messages.iter().map(message).sum::<usize>() + tools + self.members(template_kwargs)
    }

    fn members(&self, members: &Map<String, Value>) -> usize {
        members.iter().map(|(name, value)| self.member + name.len() + self.value(value)).sum()
    }

    fn value(&self, value: &Value) -> usize {
        let more = match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => self.scalar,
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(|item| self.value(item)).sum(),
            Value::Object(members) => self.members(members),
        };
        self.value + more
    }
}

impl Prompt {
    /// How many prompts it is.
    pub(crate) fn count(&self) -> u32 {
        match self {
            Self::Chat { .. } | Self::Segments(_) => 1,
            Self::List(prompts) => prompts.len() as u32,
        }
    }

    /// Of each prompt that is one text, the text.
    pub(crate) fn texts(&self) -> Vec<Option<Arc<str>>> {
        let text = |segment: &Segment| match segment {
            Segment::Text(text) => Some(text.as_str().into()),
            Segment::Tokens(_) => None,
        };
        match self {
            Self::List(prompts) => prompts.iter().map(text).collect(),
            Self::Segments(segments) => match &segments[..] {
                [segment] => vec![text(segment)],
                _ => vec![None],
            },
            Self::Chat { .. } => vec![None],
        }
    }

    /// The part of [`Prompt::bytes`] for parsed JSON: tools, and what messages have besides their content.
    pub(crate) fn value_bytes(&self) -> u64 {
        let Self::Chat { messages, tools, .. } = self else { return 0 };
        let extras: usize = messages.iter().map(|message| MEMORY.members(&message.extra)).sum();
        // Tools are kept twice until the prompt is tokenized: for the template, and as schemas.
        2 * (extras + 3 * tools.as_ref().map_or(0, |tools| MEMORY.value(tools))) as u64
    }

    /// Approximate memory of the prompt, plus that of its intermediate forms during tokenization.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes: usize = match self {
            Self::Chat { messages, tools, template_kwargs, ending: _ } => {
                MEMORY.chat(messages, tools.as_ref(), template_kwargs)
            }
            Self::Segments(segments) | Self::List(segments) => segments
                .iter()
                .map(|segment| {
                    size_of::<Segment>()
                        + match segment {
                            Segment::Text(text) => text.len(),
                            Segment::Tokens(ids) => size_of_val(&ids[..]),
                        }
                })
                .sum(),
        };
        2 * bytes as u64
    }
}

/// Bytes of all text in a chat that reaches the template: contents, other fields of messages, tools, and arguments.
pub(crate) fn chat_text_bytes(
    messages: &[Message],
    tools: Option<&Value>,
    template_kwargs: &Map<String, Value>,
) -> usize {
    TEXT.chat(messages, tools, template_kwargs)
}

/// One piece of a plain prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// To be tokenized; text that spells a control token stays text.
    Text(String),
    /// Used as they are, without tokenization.
    Tokens(Vec<TokenId>),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat_of(messages: Vec<Message>, tools: Option<Value>, template_kwargs: Map<String, Value>) -> Prompt {
        Prompt::Chat { messages, tools, template_kwargs, ending: Ending::Answer }
    }

    #[test]
    fn a_prompt_counts_for_all_that_it_keeps() {
        const LONG: usize = 1 << 20;
        let long = || "x".repeat(LONG);
        let chat = |message: Message| chat_of(vec![message], None, Map::new());
        let with = |name: &str, value: Value| {
            let mut message = Message::text(baton_text::Role::User, "x");
            message.extra.insert(name.into(), value);
            chat(message)
        };
        let kwargs = [("a".to_owned(), serde_json::json!(long()))].into_iter().collect();
        for (what, prompt) in [
            ("text", chat(Message::text(baton_text::Role::User, long()))),
            ("name", with("name", serde_json::json!(long()))),
            ("the name of a field", with(&long(), Value::Null)),
            ("nested", with("tool_calls", serde_json::json!([{"function": {"arguments": [long()]}}]))),
            ("many", with("tool_calls", serde_json::json!(vec![0; LONG / 32]))),
            ("arguments of the template", chat_of(vec![], None, kwargs)),
            ("segments", Prompt::Segments(vec![Segment::Text(String::new()); LONG / size_of::<Segment>()])),
            ("tokens", Prompt::Segments(vec![Segment::Tokens(vec![0; LONG / 4])])),
        ] {
            let bytes = prompt.bytes();
            assert!((2 * LONG as u64..6 * LONG as u64).contains(&bytes), "{what}: {bytes}");
            if let Prompt::Chat { messages, tools, template_kwargs, .. } = &prompt {
                let text = chat_text_bytes(messages, tools.as_ref(), template_kwargs);
                let least = if what == "many" { LONG / 32 * TEXT.scalar } else { LONG };
                assert!((least..least + 100).contains(&text), "{what}: {text}");
            }
        }
        let tools = Some(serde_json::json!([long()]));
        let tools = chat_of(vec![], tools, Map::new());
        let three = 6 * LONG as u64;
        assert!((three..three + 1000).contains(&tools.bytes()) && tools.value_bytes() == tools.bytes());
    }
}
