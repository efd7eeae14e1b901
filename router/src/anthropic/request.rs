//! `POST /v1/messages`: the request.

use super::blocks::{Notes, texts, turn};
use super::tools::take_tools;
use crate::openai::common::{Common, SHARED, take_common};
use crate::request::{AskedGrammar, MESSAGES_MAX, Prompt, Tools};
use crate::wire::fields::{Fields, Policy, Row, only_empty, only_null};
use crate::wire::{Chat, json};
use baton_text::{Ending, Message, Role, STOPS_MAX, StopMatcher};
use baton_types::{Grammar, RequestError};
use serde_json::Value;
use serde_json::value::RawValue;
use std::sync::Arc;

pub(crate) const MESSAGES: &[Row] = &[
    ("messages", Policy::Supported),
    ("system", Policy::Supported),
    ("max_tokens", Policy::Supported),
    ("stop_sequences", Policy::Supported),
    ("tools", Policy::Supported),
    ("tool_choice", Policy::Supported),
    ("thinking", Policy::Supported),
    ("cache_control", Policy::Supported),
    ("output_config", Policy::Supported),
    ("chat_template_kwargs", Policy::Supported),
    ("inference_geo", Policy::Ignored),
    // Nothing is taken out of a context.
    ("context_management", Policy::Ignored),
    ("container", only_null()),
    ("mcp_servers", only_empty()),
];

/// A request for an answer.
pub(crate) fn parse(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let (prompt, common) = parse_counted(body)?;
    if common.parameters.sampling.max_tokens.is_none() {
        return Err(RequestError::invalid("max_tokens", "max_tokens is required"));
    }
    Ok((prompt, common))
}

/// A request whose tokens are counted: it may leave out how long an answer may be.
pub(crate) fn parse_counted(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let table: Vec<Row> = MESSAGES.iter().chain(SHARED).copied().collect();
    let mut fields = Fields::parse(body, &table)?;
    let mut common = take_common(&mut fields)?;
    let mut notes = Notes { unknown: std::mem::take(&mut common.unknown), ..Notes::default() };
    let mut chat = Chat::default();
    let parameters = &mut common.parameters;
    parameters.stops = take_stops(&mut fields)?;
    parameters.tools = take_tools(&mut fields, &mut notes)?;
    parameters.sampling.grammar = fields.take_raw("output_config").map(output_config).transpose()?.flatten();
    parameters.check_one_form()?;
    if let Some(system) = fields.take_raw("system") {
        let texts = texts("system", system, &mut notes)?;
        texts.into_iter().try_for_each(|text| chat.text(Role::System, text))?;
    }
    take_messages(&mut fields, &mut notes, &mut chat)?;
    let messages = chat.messages();
    let ending = ending(&messages)?;
    if let Some(control) = fields.take_raw("cache_control") {
        notes.control("cache_control", control)?;
    }
    common.parameters.cache.pin_wish_ms = notes.cached_ms;
    common.unknown = notes.unknown;
    let thinking = fields.take_raw("thinking").map(thinking).transpose()?;
    let kwargs = fields.take_raw("chat_template_kwargs").map(|kwargs| json::kwargs(kwargs.get())).transpose();
    let mut template_kwargs = kwargs.map_err(|e| RequestError::invalid("chat_template_kwargs", e))?.unwrap_or_default();
    if let Some(thinks) = thinking {
        template_kwargs.entry("enable_thinking").or_insert(Value::Bool(thinks));
    }
    let tools = common.parameters.tools.as_ref().map(Tools::for_template);
    Ok((Prompt::Chat { messages, tools, template_kwargs, ending }, common))
}

/// An answer continues what the assistant has begun to say.
fn ending(messages: &[Message]) -> Result<Ending, RequestError> {
    let refuse = |message: &str| Err(RequestError::invalid("messages", message));
    match messages.last() {
        Some(Message { role: Role::Assistant, extra, .. }) if extra.contains_key("tool_calls") => {
            refuse("the last message uses tools, so no answer continues it: add their results")
        }
        Some(Message { role: Role::Assistant, content: None, .. }) => refuse(
            "the last message is the assistant's, and has no text that an answer could continue: add a user's message",
        ),
        Some(Message { role: Role::Assistant, .. }) => Ok(Ending::Continued),
        _ => Ok(Ending::Answer),
    }
}

fn take_messages(fields: &mut Fields<'_>, notes: &mut Notes, chat: &mut Chat) -> Result<(), RequestError> {
    let refuse = |message: String| RequestError::invalid("messages", message);
    let list = fields.take_raw("messages").ok_or_else(|| refuse("messages is required".into()))?;
    let items = json::items(list.get(), MESSAGES_MAX).map_err(|_| refuse("messages must be a list".into()))?;
    let items = items.filter(|items| !items.is_empty());
    let items = items.ok_or_else(|| refuse(format!("messages takes 1 to {MESSAGES_MAX} messages")))?;
    items.iter().enumerate().try_for_each(|(i, item)| turn(&format!("messages[{i}]"), item, notes, chat))
}

fn take_stops(fields: &mut Fields<'_>) -> Result<StopMatcher, RequestError> {
    const PARAM: &str = "stop_sequences";
    let shape = |what: String| RequestError::invalid(PARAM, format!("{PARAM} {what}"));
    let Some(list) = fields.take_raw(PARAM) else { return Ok(StopMatcher::default()) };
    let items = json::items(list.get(), STOPS_MAX).map_err(|_| shape("must be a list of strings".into()))?;
    let items = items.ok_or_else(|| shape(format!("takes at most {STOPS_MAX} strings")))?;
    let texts: Option<Vec<String>> = items.into_iter().map(json::text).collect();
    let texts = texts.ok_or_else(|| shape("must be a list of strings".into()))?;
    StopMatcher::new(&texts).map_err(|error| RequestError::invalid(PARAM, error.to_string()))
}

/// The form of the answer: `{"format": {"type": "json_schema", "schema": …}}`. How much effort is wanted changes nothing.
fn output_config(value: &RawValue) -> Result<Option<AskedGrammar>, RequestError> {
    const PARAM: &str = "output_config.format";
    let shape = |what: &str| RequestError::invalid(PARAM, format!("{PARAM} {what}"));
    let (mut format, mut kind, mut schema) = (None, None, None);
    let read = json::members(value.get(), |name, value| {
        if name == "format" {
            format = Some(value).filter(|value| value.get() != "null");
        }
        true
    });
    read.map_err(|_| RequestError::invalid("output_config", "output_config must be an object"))?;
    let Some(format) = format else { return Ok(None) };
    let read = json::members(format.get(), |name, value| {
        match &*name {
            "type" => kind = json::text(value),
            "schema" => schema = Some(value),
            _ => {}
        }
        true
    });
    read.map_err(|_| shape("must be an object"))?;
    let (Some("json_schema"), Some(schema)) = (kind.as_deref(), schema) else {
        return Err(shape(r#"must be {"type": "json_schema", "schema": …}"#));
    };
    let grammar = Grammar::JsonSchema(schema.get().into());
    grammar.check().map_err(|error| shape(&error.to_string()))?;
    Ok(Some(AskedGrammar { grammar: Arc::new(grammar), param: PARAM }))
}

/// Whether the model is asked to think first, where its template lets a request decide.
fn thinking(value: &RawValue) -> Result<bool, RequestError> {
    let mut kind = None;
    let read = json::members(value.get(), |name, value| {
        if name == "type" {
            kind = json::text(value);
        }
        true
    });
    match kind.as_deref().filter(|_| read.is_ok()) {
        Some("enabled" | "adaptive") => Ok(true),
        Some("disabled") => Ok(false),
        _ => {
            let message = r#"thinking must be {"type": "enabled", "budget_tokens": …}, {"type": "adaptive"} or {"type": "disabled"}"#;
            Err(RequestError::invalid("thinking", message))
        }
    }
}
