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
        let extra = self.extra_for(forms);
        let extra = json::entries(&extra, text).filter(|(name, _)| name != "role" && name != "content");
        Value::from_pairs(set.into_iter().chain(extra))
    }

    /// The other fields, as the template expects them.
    fn extra_for(&self, forms: Forms) -> Map<String, serde_json::Value> {
        let mut extra = self.extra.clone();
        if forms.thinking
            && let Some(reasoning) = extra.get("reasoning_content").cloned()
        {
            extra.entry("thinking").or_insert(reasoning);
        }
        if forms.argument_texts {
            let calls = extra.get_mut("tool_calls").and_then(|calls| calls.as_array_mut());
            for call in calls.into_iter().flatten() {
                if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|of| of.is_object()) {
                    *arguments = json::python(arguments).into();
                }
            }
        }
        extra
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
    /// It reads reasoning as `thinking`.
    pub(super) thinking: bool,
    /// It takes arguments of calls as JSON texts, and not as objects.
    pub(super) argument_texts: bool,
}

/// Whether a template takes arguments of calls as texts only: tries both on it.
pub(super) fn takes_argument_texts(render: impl Fn(Vec<Value>) -> Option<String>) -> bool {
    const NAME: &str = "probe7f3a";
    let understood = |arguments: serde_json::Value| {
        let call = serde_json::json!([{"id": "call12345", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
        let calling = Message {
            role: Role::Assistant,
            content: Some(Content::Text(String::new())),
            extra: [("tool_calls".to_owned(), call)].into_iter().collect(),
        };
        let messages = [Message::text(Role::User, "u"), calling];
        let messages = messages.map(|message| message.to_template(Forms::default(), &str::to_owned));
        render(messages.to_vec())
            .is_some_and(|output| output.contains(NAME) && !output.contains(&format!("\\\"{NAME}")))
    };
    let object = serde_json::json!({NAME: 1});
    !understood(object.clone()) && understood(object.to_string().into())
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
