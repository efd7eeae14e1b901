//! Tools as bodies describe them.

use super::fields::Fields;
use super::json;
use crate::request::Tool;
use baton_types::{Grammar, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// Most bytes of a tool's name (OpenAI's limit).
const NAME_BYTES_MAX: usize = 64;
/// Most bytes of the calls of one message: as answers have them, with a file in the arguments.
pub(crate) const CALLS_BYTES_MAX: usize = 1 << 20;

/// The items of `tools`, within the limits of number and size.
pub(crate) fn take_list<'a>(fields: &mut Fields<'a>) -> Result<Vec<&'a RawValue>, RequestError> {
    let refuse = |message: String| RequestError::invalid("tools", message);
    let Some(list) = fields.take_raw("tools") else { return Ok(Vec::new()) };
    if list.get().len() > Grammar::SCHEMA_BYTES_MAX {
        let max = Grammar::SCHEMA_BYTES_MAX;
        return Err(refuse(format!("tools takes at most {max} bytes, got {}", list.get().len())));
    }
    let items =
        json::items(list.get(), Grammar::CALLS_MAX).map_err(|_| refuse("tools must be a list of tools".into()))?;
    items.ok_or_else(|| refuse(format!("tools takes at most {} tools", Grammar::CALLS_MAX)))
}

/// Name, schema and strictness of a function, which is described at `at`, its schema in the field `schema`.
pub(crate) fn function(at: &str, function: &Map<String, Value>, schema: &str) -> Result<Tool, RequestError> {
    let shape =
        |field: &str, what: &str| RequestError::invalid(format!("{at}.{field}"), format!("{at}.{field} {what}"));
    let is_name = |name: &&str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(allowed)
    };
    let name = function.get("name").and_then(Value::as_str).filter(is_name);
    let name = name.ok_or_else(|| shape("name", "must be 1 to 64 letters, digits, underscores, dashes or dots"))?;
    let arguments = match function.get(schema) {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(shape(schema, "must be a JSON schema, an object")),
    };
    let is_strict = function.get("strict") == Some(&Value::Bool(true));
    Ok(Tool { name: name.to_owned(), schema: arguments, is_strict, spec: Value::Null })
}

/// A function that is described in one flat object, as templates expect it: in OpenAI's form for chats.
pub(crate) fn flat_function(at: &str, spec: &Map<String, Value>, schema: &str) -> Result<Tool, RequestError> {
    let tool = function(at, spec, schema)?;
    let mut described = Map::from_iter([("name".to_owned(), Value::from(&*tool.name))]);
    described.extend(
        spec.get("description").filter(|text| text.is_string()).map(|text| ("description".into(), text.clone())),
    );
    described.insert("parameters".into(), tool.schema.clone());
    Ok(Tool { spec: json!({"type": "function", "function": described}), ..tool })
}
