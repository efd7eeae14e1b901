//! The request.

use super::input;
use crate::openai::chat::{EFFORT, EFFORTS};
use crate::openai::common::{Common, SHARED, take_common};
use crate::openai::grammar::text_format;
use crate::openai::tools::{FLAT, take_tools};
use crate::request::{AskedGrammar, Prompt, Spelling, Tools};
use crate::wire::fields::{Fields, Policy, Row, only_empty, only_false, only_null};
use crate::wire::{Chat, json};
use baton_text::{Ending, Role};
use baton_types::{ErrorKind, RequestError};
use serde_json::Value;
use serde_json::value::RawValue;

pub(crate) const RESPONSES: &[Row] = &[
    ("input", Policy::Supported),
    ("instructions", Policy::Supported),
    ("max_output_tokens", Policy::Supported),
    ("tools", Policy::Supported),
    ("tool_choice", Policy::Supported),
    ("parallel_tool_calls", Policy::Supported),
    ("text", Policy::Supported),
    ("reasoning", Policy::Supported),
    ("stream_options", Policy::Supported),
    ("chat_template_kwargs", Policy::Supported),
    // Refused with the reason.
    ("previous_response_id", Policy::Supported),
    ("conversation", Policy::Supported),
    ("store", Policy::Ignored),
    ("user", Policy::Ignored),
    ("safety_identifier", Policy::Ignored),
    ("prompt_cache_key", Policy::Ignored),
    ("prompt_cache_retention", Policy::Ignored),
    ("background", only_false()),
    ("context_management", only_empty()),
    ("include", Policy::Only { accepts: is_encrypted, values: r#"["reasoning.encrypted_content"]"# }),
    ("max_tool_calls", only_null()),
    ("prompt", only_null()),
    ("top_logprobs", Policy::Only { accepts: |v| v.as_u64() == Some(0), values: "0" }),
    ("truncation", Policy::Only { accepts: |v| v == "disabled", values: r#""disabled""# }),
];

/// What clients ask for that store nothing. Reasoning comes as text in any case.
fn is_encrypted(value: &Value) -> bool {
    value.as_array().is_some_and(|list| list.iter().all(|item| item == "reasoning.encrypted_content"))
}

pub(crate) fn parse(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let table: Vec<Row> = RESPONSES.iter().chain(SHARED).copied().collect();
    let mut fields = Fields::parse(body, &table)?;
    for name in ["previous_response_id", "conversation"] {
        if fields.take_raw(name).is_some() {
            let message =
                format!("{name} is not supported: responses are not stored, so send the whole conversation as input");
            return Err(RequestError::new(ErrorKind::Unsupported, message).param(name));
        }
    }
    let mut common = take_common(&mut fields)?;
    let parameters = &mut common.parameters;
    parameters.sampling.max_tokens = fields.take("max_output_tokens")?;
    parameters.spellings.push(Spelling { checked: "max_tokens", given: "max_output_tokens" });
    parameters.tools = take_tools(&mut fields, &FLAT)?;
    parameters.sampling.grammar = fields.take_raw("text").map(text).transpose()?.flatten();
    parameters.check_one_form()?;
    let effort = fields.take_raw("reasoning").map(reasoning).transpose()?.flatten();
    let kwargs = fields.take_raw("chat_template_kwargs").map(|kwargs| json::kwargs(kwargs.get())).transpose();
    let mut template_kwargs = kwargs.map_err(|e| RequestError::invalid("chat_template_kwargs", e))?.unwrap_or_default();
    if let Some(effort) = effort {
        template_kwargs.entry("enable_thinking").or_insert(Value::Bool(effort != "none"));
        if EFFORTS.contains(&&*effort) {
            template_kwargs.entry(EFFORT).or_insert(Value::String(effort));
        }
    }
    let mut chat = Chat::default();
    if let Some(instructions) = fields.take_raw("instructions") {
        let shape = || RequestError::invalid("instructions", "instructions must be a text");
        chat.text(Role::System, json::text(instructions).ok_or_else(shape)?)?;
    }
    let input = fields.take_raw("input").ok_or_else(|| RequestError::invalid("input", "input is required"))?;
    input::read(input, &mut chat, &mut common.unknown)?;
    let tools = common.parameters.tools.as_ref().map(Tools::for_template);
    Ok((Prompt::Chat { messages: chat.messages(), tools, template_kwargs, ending: Ending::Answer }, common))
}

/// The form of the answer. How verbose it is to be changes nothing.
fn text(value: &RawValue) -> Result<Option<AskedGrammar>, RequestError> {
    let mut format = None;
    let read = json::members(value.get(), |name, value| {
        if name == "format" && value.get() != "null" {
            format = Some(value);
        }
        true
    });
    read.map_err(|_| RequestError::invalid("text", "text must be an object"))?;
    format.map(text_format).transpose().map(Option::flatten)
}

/// How much the model is asked to think first, where its template lets a request decide. A summary is never made.
fn reasoning(value: &RawValue) -> Result<Option<String>, RequestError> {
    let mut effort = None;
    let read = json::members(value.get(), |name, value| {
        if name == "effort" && value.get() != "null" {
            effort = Some(json::text(value));
        }
        true
    });
    match (read, effort) {
        (Ok(()), None) => Ok(None),
        (Ok(()), Some(Some(effort))) => Ok(Some(effort)),
        _ => Err(RequestError::invalid("reasoning", "reasoning must be an object, its effort a text")),
    }
}
