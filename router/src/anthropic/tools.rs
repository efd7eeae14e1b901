//! `tools` and `tool_choice`.

use super::blocks::Notes;
use crate::request::{Tool, ToolChoice, Tools};
use crate::wire::fields::Fields;
use crate::wire::json;
use crate::wire::tools::{flat_function, take_list};
use baton_types::{ErrorKind, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// The tools of a request, if it has any that may be called.
///
/// # Errors
/// If one has another shape, or the choice names none of them.
pub(super) fn take_tools(fields: &mut Fields<'_>, notes: &mut Notes) -> Result<Option<Tools>, RequestError> {
    let items = take_list(fields)?.into_iter().enumerate();
    let list = items.map(|(i, item)| tool(&format!("tools[{i}]"), item, notes)).collect::<Result<_, _>>()?;
    let (choice, is_parallel) = fields.take_raw("tool_choice").map(tool_choice).transpose()?.unzip();
    Tools::choose(list, choice, is_parallel.unwrap_or(true))
}

fn tool(at: &str, value: &RawValue, notes: &mut Notes) -> Result<Tool, RequestError> {
    let shape = || RequestError::invalid(at, format!("{at} must be an object"));
    let mut spec: Map<String, Value> = json::read(value).map_err(|_| shape())?;
    if let Some(kind) = spec.get("type").filter(|kind| !kind.is_null() && *kind != "custom") {
        let kind = kind.as_str().unwrap_or_default();
        let message = format!(
            "{at}.type {kind:.64} is not supported: tools have a name and an input_schema, and run at the client"
        );
        return Err(RequestError::new(ErrorKind::Unsupported, message).param(format!("{at}.type")));
    }
    if let Some(control) = spec.remove("cache_control").filter(|control| !control.is_null()) {
        let control = serde_json::value::to_raw_value(&control).map_err(|_| shape())?;
        notes.control(&format!("{at}.cache_control"), &control)?;
    }
    flat_function(at, &spec, "input_schema")
}

/// The choice, and whether an answer may have several calls.
fn tool_choice(value: &RawValue) -> Result<(ToolChoice, bool), RequestError> {
    let shape = || {
        let message = r#"tool_choice must be {"type": "auto" | "any" | "none"} or {"type": "tool", "name": …}"#;
        RequestError::invalid("tool_choice", message)
    };
    let choice: Map<String, Value> = json::read(value).map_err(|_| shape())?;
    let text = |name: &str| choice.get(name).and_then(Value::as_str);
    let kind = match text("type") {
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => ToolChoice::Named(text("name").ok_or_else(shape)?.to_owned()),
        _ => return Err(shape()),
    };
    Ok((kind, choice.get("disable_parallel_tool_use") != Some(&Value::Bool(true))))
}
