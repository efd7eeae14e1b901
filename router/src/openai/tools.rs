//! `tools`, `tool_choice` and `parallel_tool_calls` of chats, and messages that call tools.

use super::fields::Fields;
use super::json;
use crate::request::{Tool, ToolChoice, Tools};
use baton_types::{ErrorKind, Grammar, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most bytes of a tool's name (OpenAI's limit).
const NAME_BYTES_MAX: usize = 64;
/// Most bytes of the calls of one message: as answers have them, with a file in the arguments.
const CALLS_BYTES_MAX: usize = 1 << 20;

/// The tools of a request, if it has any that may be called.
///
/// # Errors
/// If one has another shape, or the choice names none of them.
pub(super) fn take_tools(fields: &mut Fields<'_>) -> Result<Option<Tools>, RequestError> {
    let refuse = |param: &str, message: String| RequestError::invalid(param, message);
    let list = match fields.take_raw("tools") {
        Some(list) => {
            if list.get().len() > Grammar::SCHEMA_BYTES_MAX {
                let max = Grammar::SCHEMA_BYTES_MAX;
                return Err(refuse("tools", format!("tools takes at most {max} bytes, got {}", list.get().len())));
            }
            let items = json::items(list.get(), Grammar::CALLS_MAX);
            let items = items.map_err(|_| refuse("tools", "tools must be a list of tools".into()))?;
            let most = || refuse("tools", format!("tools takes at most {} tools", Grammar::CALLS_MAX));
            items.ok_or_else(most)?.into_iter().enumerate().map(|(i, item)| tool(i, item)).collect::<Result<_, _>>()?
        }
        None => Vec::new(),
    };
    let choice = fields.take_raw("tool_choice").map(tool_choice).transpose()?;
    let is_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    if list.is_empty() {
        return match choice {
            None | Some(ToolChoice::None | ToolChoice::Auto) => Ok(None),
            Some(_) => Err(refuse("tool_choice", "tool_choice asks for a call, and there are no tools".into())),
        };
    }
    if let Some(twice) = (1..list.len()).find(|at| list[..*at].iter().any(|tool| tool.name == list[*at].name)) {
        return Err(refuse("tools", format!("two tools have the name {}", list[twice].name)));
    }
    match choice.unwrap_or(ToolChoice::Auto) {
        ToolChoice::None => Ok(None),
        ToolChoice::Named(name) if list.iter().all(|tool| tool.name != name) => {
            Err(refuse("tool_choice", format!("tool_choice names {name}, which is none of the tools")))
        }
        choice => Ok(Some(Tools { list: Arc::new(list), choice, is_parallel })),
    }
}

fn tool(index: usize, value: &RawValue) -> Result<Tool, RequestError> {
    let at = |field: &str| format!("tools[{index}]{field}");
    let shape = |field: &str, what: &str| RequestError::invalid(at(field), format!("{}{what}", at(field)));
    let spec: Map<String, Value> = json::read(value).map_err(|_| shape("", " must be an object"))?;
    if spec.get("type").and_then(Value::as_str) != Some("function") {
        let message = format!("{} is not supported: tools are of type function", at(".type"));
        return Err(RequestError::new(ErrorKind::Unsupported, message).param(at(".type")));
    }
    let function = spec.get("function").and_then(Value::as_object);
    let function = function.ok_or_else(|| shape(".function", " must be an object"))?;
    let is_name = |name: &&str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(allowed)
    };
    let name = function.get("name").and_then(Value::as_str).filter(is_name);
    let name =
        name.ok_or_else(|| shape(".function.name", " must be 1 to 64 letters, digits, underscores, dashes or dots"))?;
    let schema = match function.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(shape(".function.parameters", " must be a JSON schema, an object")),
    };
    let is_strict = function.get("strict") == Some(&Value::Bool(true));
    Ok(Tool { name: name.to_owned(), schema, is_strict, spec: Value::Object(spec) })
}

fn tool_choice(value: &RawValue) -> Result<ToolChoice, RequestError> {
    let shape = || {
        let message =
            r#"tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}"#;
        RequestError::invalid("tool_choice", message)
    };
    match json::read::<Value>(value).map_err(|_| shape())? {
        Value::String(choice) => match &*choice {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            _ => Err(shape()),
        },
        named => {
            let name = named["function"]["name"].as_str().filter(|_| named["type"] == "function");
            name.map(|name| ToolChoice::Named(name.to_owned())).ok_or_else(shape)
        }
    }
}

/// The calls of an assistant's message, as templates expect them: with arguments as an object, not as its text.
pub(super) fn tool_calls(param: &str, value: &RawValue) -> Result<Value, RequestError> {
    let shape = |what: &str| RequestError::invalid(param, format!("{param} {what}"));
    if value.get().len() > CALLS_BYTES_MAX {
        return Err(shape(&format!("takes at most {CALLS_BYTES_MAX} bytes, got {}", value.get().len())));
    }
    let mut calls: Vec<Value> = serde_json::from_str(value.get()).map_err(|_| shape("must be a list of calls"))?;
    for call in &mut calls {
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let function = function.ok_or_else(|| shape("are {id, type, function: {name, arguments}}"))?;
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(shape("have a name, a text"));
        }
        if let Some(Value::String(text)) = function.get("arguments")
            && let Ok(arguments) = serde_json::from_str::<Map<String, Value>>(text)
        {
            function.insert("arguments".into(), Value::Object(arguments));
        }
    }
    Ok(Value::Array(calls))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::fields::{Policy, Row};

    const TABLE: &[Row] =
        &[("tools", Policy::Supported), ("tool_choice", Policy::Supported), ("parallel_tool_calls", Policy::Supported)];

    fn take(body: &Value) -> Result<Option<Tools>, RequestError> {
        let body = body.to_string();
        take_tools(&mut Fields::parse(body.as_bytes(), TABLE).unwrap())
    }

    fn function(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn tools_and_the_choice_among_them() {
        let two = json!([function("get"), {"type": "function", "function": {"name": "put", "strict": true}}]);
        let named = json!({"type": "function", "function": {"name": "put"}});
        let tools = |choice: Value| take(&json!({"tools": two, "tool_choice": choice, "parallel_tool_calls": false}));
        for (given, expected) in [
            (json!(null), ToolChoice::Auto),
            (json!("auto"), ToolChoice::Auto),
            (json!("required"), ToolChoice::Required),
            (named.clone(), ToolChoice::Named("put".into())),
        ] {
            let tools = tools(given).unwrap().unwrap();
            assert_eq!((tools.choice, tools.is_parallel), (expected, false));
            let told: Vec<_> = tools.list.iter().map(|tool| (&*tool.name, tool.is_strict, &tool.schema)).collect();
            let nothing = json!({"type": "object", "properties": {}});
            assert_eq!(told, [("get", false, &json!({"type": "object"})), ("put", true, &nothing)]);
            assert_eq!(tools.list[0].spec, function("get"));
        }
        assert!(tools(json!("none")).unwrap().is_none());
        assert!(take(&json!({"tools": [], "tool_choice": "auto"})).unwrap().is_none());
        assert!(take(&json!({})).unwrap().is_none());
    }

    #[test]
    fn others_are_refused_by_name() {
        let of = |tool: Value| json!({"tools": [tool]});
        let with = |choice: Value| json!({"tools": [function("get")], "tool_choice": choice});
        let strange = json!({"type": "function", "function": {"name": "a b"}});
        let listed = json!({"type": "function", "function": {"name": "a", "parameters": []}});
        for (body, param) in [
            (json!({"tools": {}}), "tools"),
            (of(json!(1)), "tools[0]"),
            (of(json!({"type": "web_search"})), "tools[0].type"),
            (of(json!({"type": "function"})), "tools[0].function"),
            (of(strange), "tools[0].function.name"),
            (of(listed), "tools[0].function.parameters"),
            (json!({"tools": [function("a"), function("a")]}), "tools"),
            (json!({"tools": vec![function("a"); 129]}), "tools"),
            (with(json!("any")), "tool_choice"),
            (with(json!({"type": "function", "function": {"name": "other"}})), "tool_choice"),
            (json!({"tool_choice": "required"}), "tool_choice"),
        ] {
            assert_eq!(take(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn arguments_of_calls_become_objects() {
        let read = |calls: Value| {
            let text = calls.to_string();
            tool_calls("messages[1].tool_calls", serde_json::from_str(&text).unwrap())
        };
        let call = |arguments: Value| json!({"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}});
        let calls =
            read(json!([call(json!("{\"b\": 1, \"a\": 2}")), call(json!("{")), call(json!({"x": 1}))])).unwrap();
        assert_eq!(calls, json!([call(json!({"b": 1, "a": 2})), call(json!("{")), call(json!({"x": 1}))]));
        assert!(read(json!([{"id": "1"}])).is_err() && read(json!({})).is_err());
    }
}
