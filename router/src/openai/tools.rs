//! `tools`, `tool_choice` and `parallel_tool_calls` of chats, and messages that call tools.

use crate::request::{Tool, ToolChoice, Tools};
use crate::wire::fields::Fields;
use crate::wire::json;
use crate::wire::tools::{CALLS_BYTES_MAX, flat_function, function, take_list};
use baton_types::{ErrorKind, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// How an API of OpenAI describes functions.
pub(super) struct Form {
    /// Reads a tool, which is described at this place.
    read: fn(&str, &Map<String, Value>) -> Result<Tool, RequestError>,
    /// A choice that names a function, for messages.
    named: &'static str,
    /// Where such a choice has the name.
    name_of: fn(&Value) -> &Value,
}

/// In an object of their own.
pub(super) const NESTED: Form = Form {
    read: nested,
    named: r#"{"type": "function", "function": {"name": …}}"#,
    name_of: |choice| &choice["function"]["name"],
};

/// In the tool itself.
pub(super) const FLAT: Form = Form {
    read: |at, spec| flat_function(at, spec, "parameters"),
    named: r#"{"type": "function", "name": …}"#,
    name_of: |choice| &choice["name"],
};

/// The tools of a request, if it has any that may be called.
///
/// # Errors
/// If one has another shape, or the choice names none of them.
pub(super) fn take_tools(fields: &mut Fields<'_>, form: &Form) -> Result<Option<Tools>, RequestError> {
    let items = take_list(fields)?.into_iter().enumerate();
    let list = items.map(|(i, item)| tool(&format!("tools[{i}]"), item, form)).collect::<Result<_, _>>()?;
    let choice = fields.take_raw("tool_choice").map(|choice| tool_choice(choice, form)).transpose()?;
    Tools::choose(list, choice, fields.take("parallel_tool_calls")?.unwrap_or(true))
}

fn tool(at: &str, value: &RawValue, form: &Form) -> Result<Tool, RequestError> {
    let spec: Map<String, Value> =
        json::read(value).map_err(|_| RequestError::invalid(at, format!("{at} must be an object")))?;
    check_type(at, &spec)?;
    (form.read)(at, &spec)
}

fn nested(at: &str, spec: &Map<String, Value>) -> Result<Tool, RequestError> {
    let at = format!("{at}.function");
    let described = spec.get("function").and_then(Value::as_object);
    let described = described.ok_or_else(|| RequestError::invalid(&*at, format!("{at} must be an object")))?;
    Ok(Tool { spec: Value::Object(spec.clone()), ..function(&at, described, "parameters")? })
}

/// Refuses tools that are no functions.
fn check_type(at: &str, spec: &Map<String, Value>) -> Result<(), RequestError> {
    if spec.get("type").and_then(Value::as_str) == Some("function") {
        return Ok(());
    }
    let message = format!("{at}.type is not supported: tools are of type function");
    Err(RequestError::new(ErrorKind::Unsupported, message).param(format!("{at}.type")))
}

fn tool_choice(value: &RawValue, form: &Form) -> Result<ToolChoice, RequestError> {
    let shape = || {
        let message = format!(r#"tool_choice must be "none", "auto", "required" or {}"#, form.named);
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
            let name = (form.name_of)(&named).as_str().filter(|_| named["type"] == "function");
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
    use crate::wire::fields::{Policy, Row};
    use serde_json::json;

    const TABLE: &[Row] =
        &[("tools", Policy::Supported), ("tool_choice", Policy::Supported), ("parallel_tool_calls", Policy::Supported)];

    fn take(body: &Value) -> Result<Option<Tools>, RequestError> {
        let body = body.to_string();
        take_tools(&mut Fields::parse(body.as_bytes(), TABLE).unwrap(), &NESTED)
    }

    fn named(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn tools_and_the_choice_among_them() {
        let two = json!([named("get"), {"type": "function", "function": {"name": "put", "strict": true}}]);
        let put = json!({"type": "function", "function": {"name": "put"}});
        let tools = |choice: Value| take(&json!({"tools": two, "tool_choice": choice, "parallel_tool_calls": false}));
        for (given, expected) in [
            (json!(null), ToolChoice::Auto),
            (json!("auto"), ToolChoice::Auto),
            (json!("required"), ToolChoice::Required),
            (put.clone(), ToolChoice::Named("put".into())),
        ] {
            let tools = tools(given).unwrap().unwrap();
            assert_eq!((tools.choice, tools.is_parallel), (expected, false));
            let told: Vec<_> = tools.list.iter().map(|tool| (&*tool.name, tool.is_strict, &tool.schema)).collect();
            let nothing = json!({"type": "object", "properties": {}});
            assert_eq!(told, [("get", false, &json!({"type": "object"})), ("put", true, &nothing)]);
            assert_eq!(tools.list[0].spec, named("get"));
        }
        assert!(tools(json!("none")).unwrap().is_none());
        assert!(take(&json!({"tools": [], "tool_choice": "auto"})).unwrap().is_none());
        assert!(take(&json!({})).unwrap().is_none());
    }

    #[test]
    fn others_are_refused_by_name() {
        let of = |tool: Value| json!({"tools": [tool]});
        let with = |choice: Value| json!({"tools": [named("get")], "tool_choice": choice});
        let strange = json!({"type": "function", "function": {"name": "a b"}});
        let listed = json!({"type": "function", "function": {"name": "a", "parameters": []}});
        for (body, param) in [
            (json!({"tools": {}}), "tools"),
            (of(json!(1)), "tools[0]"),
            (of(json!({"type": "web_search"})), "tools[0].type"),
            (of(json!({"type": "function"})), "tools[0].function"),
            (of(strange), "tools[0].function.name"),
            (of(listed), "tools[0].function.parameters"),
            (json!({"tools": [named("a"), named("a")]}), "tools"),
            (json!({"tools": vec![named("a"); 129]}), "tools"),
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
