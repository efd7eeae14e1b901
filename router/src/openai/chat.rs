//! `POST /v1/chat/completions`: the request.

use super::common::{COMMON, Common, take_common};
use super::fields::{Fields, Policy, Row, only_empty, only_false, only_null};
use crate::request::{MESSAGES_MAX, Prompt};
use baton_text::{Content, Message, Role};
use baton_types::{ErrorKind, RequestError};
use serde::Deserialize;
use serde_json::{Map, Value};

const CHAT: &[Row] = &[
    ("messages", Policy::Supported),
    ("max_completion_tokens", Policy::Supported),
    ("top_logprobs", Policy::Supported),
    ("chat_template_kwargs", Policy::Supported),
    ("tools", only_empty()),
    ("functions", only_empty()),
    ("tool_choice", Policy::Only { accepts: is_none_or_auto, values: r#""none" or "auto""# }),
    ("function_call", Policy::Only { accepts: is_none_or_auto, values: r#""none" or "auto""# }),
    // Without tools there is nothing to call in parallel.
    ("parallel_tool_calls", Policy::Ignored),
    ("modalities", Policy::Only { accepts: |v| v == &serde_json::json!(["text"]), values: r#"["text"]"# }),
    ("audio", only_null()),
    ("prediction", only_null()),
    ("web_search_options", only_null()),
    ("reasoning_effort", only_null()),
    ("verbosity", only_null()),
    ("chat_template", only_null()),
    ("documents", only_empty()),
    ("echo", only_false()),
    ("add_generation_prompt", Policy::Only { accepts: |v| v == &Value::Bool(true), values: "true" }),
    ("continue_final_message", only_false()),
];

fn is_none_or_auto(value: &Value) -> bool {
    matches!(value.as_str(), Some("none" | "auto"))
}

#[derive(Deserialize)]
struct RawMessage {
    role: String,
    content: Option<RawContent>,
    name: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawContent {
    Text(String),
    Parts(Vec<Value>),
}

/// The parsed request.
pub(crate) fn parse(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let table: Vec<Row> = CHAT.iter().chain(COMMON).copied().collect();
    let mut fields = Fields::parse(body, &table)?;
    let mut common = take_common(&mut fields)?;
    // The newer name wins, as it does with OpenAI.
    if let Some(max) = fields.take("max_completion_tokens")? {
        common.sampling.max_tokens = Some(max);
    }
    let top = fields.take::<u32>("top_logprobs")?;
    common.sampling.logprobs = match (fields.take::<bool>("logprobs")?.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(RequestError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
        }
    };
    let messages: Vec<Value> = fields.require("messages")?;
    if messages.is_empty() || messages.len() > MESSAGES_MAX {
        return Err(RequestError::invalid("messages", format!("messages takes 1 to {MESSAGES_MAX} messages")));
    }
    let messages = messages.into_iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<_, _>>()?;
    let template_kwargs = fields.take("chat_template_kwargs")?.unwrap_or_default();
    Ok((Prompt::Chat { messages, template_kwargs }, common))
}

fn message(index: usize, value: Value) -> Result<Message, RequestError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let shape =
        |_| RequestError::invalid(at(""), "a message is {role, content}, its content text or a list of text parts");
    let raw: RawMessage = serde_json::from_value(value).map_err(shape)?;
    if let Some((field, _)) = raw.rest.iter().find(|(_, v)| !v.is_null() && *v != &serde_json::json!([])) {
        return Err(unsupported(at(&format!(".{field}"))));
    }
    let role = Role::from_name(&raw.role)
        .ok_or_else(|| RequestError::invalid(at(".role"), "role must be system, developer, user, assistant or tool"))?;
    let content = match raw.content {
        Some(RawContent::Text(text)) => Content::Text(text),
        Some(RawContent::Parts(parts)) => {
            let part = |(i, part)| text_part(part).ok_or_else(|| unsupported(at(&format!(".content[{i}]"))));
            Content::Parts(parts.into_iter().enumerate().map(part).collect::<Result<_, _>>()?)
        }
        None => return Err(RequestError::invalid(at(".content"), "content is required")),
    };
    let extra = raw.name.map(|name| ("name".to_owned(), Value::String(name))).into_iter().collect();
    Ok(Message { role, content: Some(content), extra })
}

fn text_part(mut part: Value) -> Option<String> {
    if part.get("type")?.as_str()? != "text" {
        return None;
    }
    match part.get_mut("text")?.take() {
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn unsupported(param: String) -> RequestError {
    let message = format!("{param} is not supported: messages carry text only");
    RequestError::new(ErrorKind::Unsupported, message).param(param)
}
