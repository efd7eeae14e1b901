//! Chat messages, in the formats that templates expect.

use minijinja::Value;
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::json;

/// The author of a message. A closed set, since templates build control tokens from it.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions of the operator.
    System,
    /// The same under its newer name; templates that do not support it receive `system`.
    Developer,
    User,
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that templates compare with.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    /// The role of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool]
            .into_iter()
            .find(|r| r.as_str() == name)
    }
}

/// Content of a message.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Text(String),
    /// Text parts. Templates that do not support parts receive one text, with each part on its own line.
    Parts(Vec<String>),
}

impl Content {
    /// All of it as one text, each part on its own line.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Parts(parts) => parts.join("\n"),
        }
    }
}

/// One message of a conversation.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub role: Role,
    /// Its content; none for an assistant message that only calls tools.
    pub content: Option<Content>,
    /// Other fields, passed to the template unchanged: `name`, `tool_calls`, `tool_call_id`, `reasoning_content`.
    pub extra: Map<String, serde_json::Value>,
}

impl Message {
    /// A message of one text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self { role, content: Some(Content::Text(text.into())), extra: Map::new() }
    }

    pub(super) fn to_template(&self, forms: Forms, text: &dyn Fn(&str) -> String) -> Value {
        let role = match self.role {
            Role::Developer if !forms.developer => Role::System,
            role => role,
        };
        let content = match (&self.content, forms.content) {
            (None, _) => Value::from(()),
            (Some(Content::Text(one)), ContentForm::Parts) => parts(&[text(one)]),
            (Some(Content::Text(one)), _) => Value::from(text(one)),
            (Some(all @ Content::Parts(_)), ContentForm::Text) => Value::from(text(&all.text())),
            (Some(Content::Parts(all)), _) => parts(&all.iter().map(|part| text(part)).collect::<Vec<_>>()),
        };
        let set = [("role", Value::from(role.as_str())), ("content", content)];
        let set = set.map(|(name, value)| (name.to_owned(), value));
        let extra = json::entries(&self.extra, text).filter(|(name, _)| name != "role" && name != "content");
        Value::from_pairs(set.into_iter().chain(extra))
    }
}

fn parts(texts: &[String]) -> Value {
    texts.iter().map(|text| Value::from_pairs([("type", "text"), ("text", text.as_str())])).collect()
}

/// Features that a template supports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Forms {
    pub(super) developer: bool,
    pub(super) content: ContentForm,
}

/// The forms of content that a template accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ContentForm {
    #[default]
    Text,
    Parts,
    Both,
}

impl ContentForm {
    /// Tries both forms on the template: a form is supported if the text appears in the output, and not as a printed
    /// structure.
    pub(super) fn probe(render: impl Fn(Value) -> Option<String>) -> Self {
        const WORD: &str = "probe7f3a";
        let understood = |content: Value| {
            let message = Value::from_pairs([("role", Value::from("user")), ("content", content)]);
            let output = render(message).unwrap_or_default();
            output.contains(WORD) && !output.contains("'text'") && !output.contains("\"text\"")
        };
        match (understood(Value::from(WORD)), understood(parts(&[WORD.to_owned()]))) {
            (_, false) => Self::Text,
            (true, true) => Self::Both,
            (false, true) => Self::Parts,
        }
    }
}
