//! `POST /v1/chat/completions`: the request.

use super::common::{COMMON, Common, SHARED, take_common};
use super::tools::{NESTED, take_tools, tool_calls};
use crate::request::{MESSAGES_MAX, Prompt, Spelling, Tools};
use crate::wire::fields::{Fields, Policy, Row, only_empty, only_false, only_null, only_one};
use crate::wire::{Unknown, json};
use baton_text::{Content, Ending, Message, Role};
use baton_types::{ErrorKind, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// Most parts of one message's content.
const PARTS_MAX: usize = MESSAGES_MAX;

pub(crate) const CHAT: &[Row] = &[
    ("messages", Policy::Supported),
    ("max_completion_tokens", Policy::Supported),
    ("top_logprobs", Policy::Supported),
    ("chat_template_kwargs", Policy::Supported),
    ("tools", Policy::Supported),
    ("tool_choice", Policy::Supported),
    ("parallel_tool_calls", Policy::Supported),
    ("functions", only_empty()),
    ("function_call", Policy::Only { accepts: is_none_or_auto, values: r#""none" or "auto""# }),
    ("modalities", Policy::Only { accepts: |v| v == &serde_json::json!(["text"]), values: r#"["text"]"# }),
    ("audio", only_null()),
    ("prediction", only_null()),
    ("web_search_options", only_null()),
    (EFFORT, Policy::Supported),
    ("verbosity", only_null()),
    ("chat_template", only_null()),
    ("documents", only_empty()),
    ("echo", only_false()),
    ("add_generation_prompt", Policy::Supported),
    ("continue_final_message", Policy::Supported),
    ("best_of", only_one()),
];

/// The field that is an argument of the chat template, where the template reads it.
pub(crate) const EFFORT: &str = "reasoning_effort";
/// Its values in OpenAI's API.
pub(crate) const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

fn is_none_or_auto(value: &Value) -> bool {
    matches!(value.as_str(), Some("none" | "auto"))
}

pub(crate) fn parse(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let table: Vec<Row> = CHAT.iter().chain(COMMON).chain(SHARED).copied().collect();
    let mut fields = Fields::parse(body, &table)?;
    let mut common = take_common(&mut fields)?;
    common.parameters.tools = take_tools(&mut fields, &NESTED)?;
    common.parameters.check_one_form()?;
    // The newer name wins, as in OpenAI's API.
    if let Some(max) = fields.take("max_completion_tokens")? {
        common.parameters.sampling.max_tokens = Some(max);
        let spelling = Spelling { checked: "max_tokens", given: "max_completion_tokens" };
        common.parameters.spellings.push(spelling);
    }
    let top = fields.take::<u32>("top_logprobs")?;
    common.parameters.sampling.logprobs = match (fields.take::<bool>("logprobs")?.unwrap_or(false), top) {
        (true, top) => {
            common.parameters.spellings.push(Spelling { checked: "logprobs", given: "top_logprobs" });
            Some(top.unwrap_or(0))
        }
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(RequestError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
        }
    };
    let count = || RequestError::invalid("messages", format!("messages takes 1 to {MESSAGES_MAX} messages"));
    let list = fields.take_raw("messages").ok_or_else(|| RequestError::invalid("messages", "messages is required"))?;
    let shape = |_| RequestError::invalid("messages", "messages must be a list of messages");
    let messages = json::items(list.get(), MESSAGES_MAX).map_err(shape)?.filter(|m| !m.is_empty()).ok_or_else(count)?;
    let messages = messages.into_iter().enumerate().map(|(i, m)| message(i, m, &mut common.unknown));
    let messages = messages.collect::<Result<_, _>>()?;
    let kwargs = fields.take_raw("chat_template_kwargs").map(|kwargs| json::kwargs(kwargs.get())).transpose();
    let mut template_kwargs = kwargs.map_err(|e| RequestError::invalid("chat_template_kwargs", e))?.unwrap_or_default();
    if let Some(effort) = take_effort(&mut fields)? {
        template_kwargs.entry(EFFORT).or_insert(effort.into());
        common.has_effort = true;
    }
    let tools = common.parameters.tools.as_ref().map(Tools::for_template);
    let ending = take_ending(&mut fields)?;
    Ok((Prompt::Chat { messages, tools, template_kwargs, ending }, common))
}

fn take_effort(fields: &mut Fields<'_>) -> Result<Option<&'static str>, RequestError> {
    let Some(effort) = fields.take_raw(EFFORT) else { return Ok(None) };
    let known = |effort: String| EFFORTS.into_iter().find(|known| *known == effort);
    let wrong = || RequestError::invalid(EFFORT, format!("{EFFORT} must be one of {}", EFFORTS.join(", ")));
    json::text(effort).and_then(known).map(Some).ok_or_else(wrong)
}

fn take_ending(fields: &mut Fields<'_>) -> Result<Ending, RequestError> {
    ending(fields.take("add_generation_prompt")?, fields.take("continue_final_message")?.unwrap_or(false))
}

/// How a chat's prompt ends. An answer that continues the last message does not begin anew.
pub(crate) fn ending(begins: Option<bool>, continues: bool) -> Result<Ending, RequestError> {
    match (begins, continues) {
        (Some(true), true) => {
            let message = "continue_final_message excludes add_generation_prompt: leave that out, or set it to false";
            Err(RequestError::invalid("continue_final_message", message))
        }
        (_, true) => Ok(Ending::Continued),
        (Some(false), false) => Ok(Ending::Messages),
        (Some(true) | None, false) => Ok(Ending::Answer),
    }
}

/// Fields of messages that would have another prompt or answer.
const REFUSED: [&str; 6] = ["audio", "function_call", "images", "partial", "prefix", "videos"];

fn message(index: usize, value: &RawValue, unknown: &mut Unknown) -> Result<Message, RequestError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let shape =
        || RequestError::invalid(at(""), "a message is {role, content}, its content text or a list of text parts");
    let (mut role, mut content, mut refused, mut extra) = (None, None, None, Map::new());
    let read = json::members(value.get(), |field, value| {
        match &*field {
            "role" => role = Some(value),
            "content" => content = Some(value).filter(|v| v.get() != "null"),
            "name" | "tool_call_id" | "reasoning_content" if value.get() != "null" => match json::text(value) {
                Some(text) => drop(extra.insert(field.into_owned(), Value::String(text))),
                None => {
                    refused = Some(RequestError::invalid(at(&format!(".{field}")), format!("{field} must be a text")))
                }
            },
            "tool_calls" if !matches!(json::items(value.get(), 0), Ok(Some(_))) && value.get() != "null" => {
                match tool_calls(&at(".tool_calls"), value) {
                    Ok(calls) => drop(extra.insert(field.into_owned(), calls)),
                    Err(error) => refused = Some(error),
                }
            }
            _ if value.get() == "null" || matches!(json::items(value.get(), 0), Ok(Some(_))) => {}
            field if REFUSED.contains(&field) => refused = Some(unsupported(at(&format!(".{field}")))),
            field => unknown.tell_inside(&at(""), field),
        }
        refused.is_none()
    });
    if let Some(error) = refused {
        return Err(error);
    }
    read.map_err(|_| shape())?;
    let role = role.and_then(json::text).ok_or_else(shape)?;
    let role = Role::from_name(&role)
        .ok_or_else(|| RequestError::invalid(at(".role"), "role must be system, developer, user, assistant or tool"))?;
    let Some(content) = content else {
        // A call needs no words.
        let calls = role == Role::Assistant && extra.contains_key("tool_calls");
        let required = || RequestError::invalid(at(".content"), "content is required");
        return calls.then_some(Message { role, content: None, extra }).ok_or_else(required);
    };
    let content = match json::text(content) {
        Some(text) => Content::Text(text),
        None => {
            let count = || RequestError::invalid(at(".content"), format!("content takes at most {PARTS_MAX} parts"));
            let parts = json::items(content.get(), PARTS_MAX).map_err(|_| shape())?.ok_or_else(count)?;
            let part = |(i, part)| {
                let at = || at(&format!(".content[{i}]"));
                text_part(&at, part, unknown).ok_or_else(|| unsupported(at()))
            };
            Content::Parts(parts.into_iter().enumerate().map(part).collect::<Result<_, _>>()?)
        }
    };
    Ok(Message { role, content: Some(content), extra })
}

fn text_part(at: &impl Fn() -> String, part: &RawValue, unknown: &mut Unknown) -> Option<String> {
    let (mut kind, mut text) = (None, None);
    json::members(part.get(), |field, value| {
        match &*field {
            "type" => kind = json::text(value),
            "text" => text = Some(value),
            field => unknown.tell_inside(&at(), field),
        }
        true
    })
    .ok()?;
    if kind? != "text" {
        return None;
    }
    json::text(text?)
}

fn unsupported(param: String) -> RequestError {
    let message = format!("{param} is not supported: messages carry text only");
    RequestError::new(ErrorKind::Unsupported, message).param(param)
}
