//! Fields that ask for an answer of a certain form. Each becomes one grammar.

use crate::request::AskedGrammar;
use crate::wire::fields::Fields;
use crate::wire::json;
use baton_text::grammar;
use baton_types::{ErrorKind, Grammar, RequestError};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Fields that ask for a form, OpenAI's and vLLM's.
pub(super) const FORMS: [&str; 6] =
    ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"];

/// The grammar that a request asks for.
///
/// # Errors
/// If it asks for two, or for a form that is not supported.
pub(super) fn take_grammar(fields: &mut Fields<'_>) -> Result<Option<AskedGrammar>, RequestError> {
    let mut asked: Option<AskedGrammar> = None;
    for param in FORMS {
        let Some(value) = fields.take_raw(param) else { continue };
        let grammar = match param {
            "response_format" => response_format(value)?,
            "structured_outputs" => structured_outputs(value)?,
            _ => Some(guided(param, &param["guided_".len()..], value)?),
        };
        let Some(grammar) = grammar else { continue };
        if let Some(AskedGrammar { param: other, .. }) = asked {
            return Err(RequestError::invalid(param, format!("an answer has one form: leave out {other} or {param}")));
        }
        grammar.check().map_err(|error| RequestError::invalid(param, error.to_string()))?;
        asked = Some(AskedGrammar { grammar: Arc::new(grammar), param });
    }
    Ok(asked)
}

/// `{"type": "text" | "json_object" | "json_schema"}`; a schema is in `json_schema.schema`.
fn response_format(value: &RawValue) -> Result<Option<Grammar>, RequestError> {
    const PARAM: &str = "response_format";
    let shape = |what: &str| RequestError::invalid(PARAM, format!("{PARAM}{what}"));
    let (mut kind, mut schema) = (None, None);
    let read = json::members(value.get(), |name, value| {
        match &*name {
            "type" => kind = json::text(value),
            "json_schema" => schema = Some(value),
            _ => {}
        }
        true
    });
    read.map_err(|_| shape(" must be an object"))?;
    match kind.as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(any_object())),
        Some("json_schema") => {
            let named = schema.ok_or_else(|| shape(".json_schema is required with this type"))?;
            let (mut schema, mut strict) = (None, false);
            let read = json::members(named.get(), |name, value| {
                match &*name {
                    "schema" => schema = Some(value),
                    "strict" => strict = value.get() == "true",
                    _ => {}
                }
                true
            });
            read.map_err(|_| shape(".json_schema must be an object"))?;
            let Some(schema) = schema else { return Ok(Some(any_object())) };
            Ok(Some(if strict { Grammar::JsonSchema(schema.get().into()) } else { lenient(schema.get()) }))
        }
        Some(other) => {
            let message = format!("{PARAM}.type {other:.64} is not supported: take text, json_object or json_schema");
            Err(RequestError::new(ErrorKind::Unsupported, message).param(PARAM))
        }
        None => Err(shape(".type is required: text, json_object or json_schema")),
    }
}

/// `text.format` of the Responses API, in which a schema is not nested.
pub(super) fn text_format(value: &RawValue) -> Result<Option<AskedGrammar>, RequestError> {
    const PARAM: &str = "text.format";
    let shape = |what: &str| RequestError::invalid(PARAM, format!("{PARAM}{what}"));
    let (mut kind, mut schema, mut strict) = (None, None, false);
    let read = json::members(value.get(), |name, value| {
        match &*name {
            "type" => kind = json::text(value),
            "schema" => schema = Some(value),
            "strict" => strict = value.get() == "true",
            _ => {}
        }
        true
    });
    read.map_err(|_| shape(" must be an object"))?;
    let grammar = match (kind.as_deref(), schema) {
        (Some("text"), _) => return Ok(None),
        (Some("json_object"), _) => any_object(),
        (Some("json_schema"), Some(schema)) if strict => Grammar::JsonSchema(schema.get().into()),
        (Some("json_schema"), Some(schema)) => lenient(schema.get()),
        (Some("json_schema"), None) => return Err(shape(".schema is required with this type")),
        (Some(other), _) => {
            let message = format!("{PARAM}.type {other:.64} is not supported: take text, json_object or json_schema");
            return Err(RequestError::new(ErrorKind::Unsupported, message).param(PARAM));
        }
        (None, _) => return Err(shape(".type is required: text, json_object or json_schema")),
    };
    grammar.check().map_err(|error| RequestError::invalid(PARAM, error.to_string()))?;
    Ok(Some(AskedGrammar { grammar: Arc::new(grammar), param: PARAM }))
}

/// vLLM's object of one of `json`, `regex`, `choice`, `grammar` and `json_object`.
fn structured_outputs(value: &RawValue) -> Result<Option<Grammar>, RequestError> {
    const PARAM: &str = "structured_outputs";
    let refuse = |message: String| RequestError::invalid(PARAM, message);
    let (mut asked, mut refused) = (None, None);
    let read = json::members(value.get(), |name, value| {
        let grammar =
            match (&*name, value.get()) {
                (_, "null" | "false") => return true,
                ("json_object", "true") => Ok(any_object()),
                ("json" | "regex" | "choice" | "grammar", _) => guided(PARAM, &name, value),
                _ => Err(RequestError::new(ErrorKind::Unsupported, format!("{PARAM}.{name:.64} is not supported"))
                    .param(PARAM)),
            };
        let grammar = grammar.and_then(|grammar| match asked.replace(grammar) {
            None => Ok(()),
            Some(_) => Err(refuse(format!("{PARAM} takes one of json, regex, choice, grammar and json_object"))),
        });
        refused = grammar.err();
        refused.is_none()
    });
    match (refused, read) {
        (Some(error), _) => Err(error),
        (None, Err(_)) => Err(refuse(format!("{PARAM} must be an object"))),
        (None, Ok(())) => Ok(asked),
    }
}

fn guided(param: &str, kind: &str, value: &RawValue) -> Result<Grammar, RequestError> {
    let shape = |what: &str| RequestError::invalid(param, format!("{param}: {kind} must be {what}"));
    let text = || json::text(value).ok_or_else(|| shape("a text"));
    match kind {
        // An object, or its text.
        "json" => Ok(Grammar::JsonSchema(json::text(value).unwrap_or_else(|| value.get().to_owned()))),
        "regex" => text().map(Grammar::Regex),
        "grammar" => text().map(Grammar::Lark),
        _ => {
            let items = json::items(value.get(), Grammar::CHOICES_MAX).map_err(|_| shape("a list of texts"))?;
            let most = || shape(&format!("a list of at most {} texts", Grammar::CHOICES_MAX));
            let texts = items.ok_or_else(most)?.into_iter().map(json::text).collect::<Option<_>>();
            texts.map(Grammar::Choice).ok_or_else(|| shape("a list of texts"))
        }
    }
}

fn any_object() -> Grammar {
    Grammar::JsonSchema(r#"{"type": "object"}"#.into())
}

/// Without `strict`, keywords of JSON Schema that cannot be enforced do not count.
fn lenient(schema: &str) -> Grammar {
    let text = match serde_json::from_str::<Map<String, Value>>(schema) {
        Ok(mut schema) => {
            grammar::lenient(&mut schema);
            Value::Object(schema).to_string()
        }
        // What is wrong with it is told where it is compiled.
        Err(_) => schema.to_owned(),
    };
    Grammar::JsonSchema(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::fields::{Policy, Row};
    use serde_json::json;

    fn take(body: &Value) -> Result<Option<(Grammar, &'static str)>, String> {
        let table: Vec<Row> = FORMS.iter().map(|name| (*name, Policy::Supported)).collect();
        let body = body.to_string();
        let mut fields = Fields::parse(body.as_bytes(), &table).unwrap();
        let asked = take_grammar(&mut fields).map_err(|error| error.message)?;
        Ok(asked.map(|AskedGrammar { grammar, param }| ((*grammar).clone(), param)))
    }

    #[test]
    fn each_spelling_asks_for_its_form() {
        let schema = json!({"type": "object", "properties": {"z": {}, "a": {}}});
        let text = schema.to_string();
        let strict = |strict: bool| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}});
        let of = |grammar: Grammar, param| Ok(Some((grammar, param)));
        let json_schema = |text: &str| Grammar::JsonSchema(text.into());
        let lenient = r#"{"type":"object","properties":{"z":{},"a":{}},"x-guidance":{"lenient":true}}"#;
        for (body, expected) in [
            (json!({}), Ok(None)),
            (json!({"response_format": null, "guided_json": null}), Ok(None)),
            (json!({"response_format": {"type": "text"}}), Ok(None)),
            (json!({"response_format": {"type": "json_object"}}), of(any_object(), "response_format")),
            (json!({"response_format": strict(true)}), of(json_schema(&text), "response_format")),
            (json!({"response_format": strict(false)}), of(json_schema(lenient), "response_format")),
            (json!({"guided_json": schema}), of(json_schema(&text), "guided_json")),
            (json!({"guided_json": text}), of(json_schema(&text), "guided_json")),
            (json!({"guided_regex": "a+"}), of(Grammar::Regex("a+".into()), "guided_regex")),
            (json!({"guided_choice": ["a", "b"]}), of(Grammar::Choice(vec!["a".into(), "b".into()]), "guided_choice")),
            (json!({"guided_grammar": "start: \"a\""}), of(Grammar::Lark("start: \"a\"".into()), "guided_grammar")),
            (
                json!({"structured_outputs": {"json": schema, "regex": null}}),
                of(json_schema(&text), "structured_outputs"),
            ),
            (json!({"structured_outputs": {"json_object": true}}), of(any_object(), "structured_outputs")),
            (json!({"structured_outputs": {"regex": "a"}}), of(Grammar::Regex("a".into()), "structured_outputs")),
            (json!({"structured_outputs": {}}), Ok(None)),
        ] {
            assert_eq!(take(&body), expected, "{body}");
        }
    }

    #[test]
    fn other_forms_are_refused_by_name() {
        for (body, part) in [
            (json!({"response_format": "json"}), "must be an object"),
            (json!({"response_format": {}}), "response_format.type is required"),
            (json!({"response_format": {"type": "structural_tag"}}), "structural_tag is not supported"),
            (json!({"response_format": {"type": "json_schema"}}), "json_schema is required"),
            (
                json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}),
                "leave out response_format or guided_regex",
            ),
            (json!({"guided_choice": "a"}), "choice must be a list of texts"),
            (json!({"guided_choice": [1]}), "choice must be a list of texts"),
            (json!({"guided_choice": []}), "1 to 4096 texts"),
            (json!({"guided_regex": 1}), "regex must be a text"),
            (json!({"structured_outputs": {"json": {}, "regex": "a"}}), "takes one of"),
            (json!({"structured_outputs": {"structural_tag": "a"}}), "structural_tag is not supported"),
            (json!({"structured_outputs": 1}), "must be an object"),
        ] {
            let told = take(&body).unwrap_err();
            assert!(told.contains(part), "{body}: {told}");
        }
    }
}
