//! Grammars in llguidance's words.

use crate::TextError;
use baton_types::{CallGrammar, CallsGrammar, Grammar};
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};

/// Whitespace between the tokens of JSON: none, a space, or a new line with its indentation. Small models that may write more of it never
/// come to the end.
const JSON_WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,32}";

/// The member of a schema that holds llguidance's options.
const OPTIONS: &str = "x-guidance";

pub(super) fn top_level(grammar: &Grammar) -> Result<TopLevelGrammar, TextError> {
    let refused = |error: &dyn std::fmt::Display| TextError::Grammar(error.to_string());
    grammar.check().map_err(|error| refused(&error))?;
    Ok(match grammar {
        Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(self::schema(schema)?),
        Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        Grammar::Calls(calls) => TopLevelGrammar::from_lark(lark_of_calls(calls)?),
        Grammar::Choice(choices) => {
            let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | ")))
        }
    })
}

/// A rule for each tool, and one for all of them.
fn lark_of_calls(calls: &CallsGrammar) -> Result<String, TextError> {
    let CallsGrammar { open_token, open, calls, separator, close } = calls;
    // No text is written as the empty text, which needs no lexeme.
    let literal = |text: &str| if text.is_empty() { String::new() } else { json!(text).to_string() };
    let token = open_token.map_or(String::new(), |token| format!("<[{token}]>"));
    let more = separator.as_ref().map_or(String::new(), |separator| format!("({} call)*", literal(separator)));
    let mut lark = format!("start: {token} {} call {more} {}\ncall: ", literal(open), literal(close));
    let (mut rules, mut patterns) = (String::new(), 0);
    for (at, CallGrammar { open, schema, close }) in calls.iter().enumerate() {
        let schema = self::schema(schema)?;
        patterns += pattern_bytes("", &schema);
        lark += &format!("{}call_{at}", if at > 0 { " | " } else { "" });
        rules += &format!(
            "\ncall_{at}: {} arguments_{at} {}\narguments_{at}: %json {schema}",
            literal(open),
            literal(close)
        );
    }
    check_patterns(patterns)?;
    Ok(lark + &rules + "\n")
}

fn check_patterns(bytes: usize) -> Result<(), TextError> {
    if bytes <= Grammar::PATTERN_BYTES_MAX {
        return Ok(());
    }
    let max = Grammar::PATTERN_BYTES_MAX;
    Err(TextError::Grammar(format!("the patterns of a JSON schema take at most {max} bytes together, got {bytes}")))
}

fn schema(text: &str) -> Result<Value, TextError> {
    let refused = |error: String| TextError::Grammar(error);
    let mut schema: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| refused(format!("a JSON schema must be a JSON object: {error}")))?;
    check_patterns(schema.iter().map(|(name, value)| pattern_bytes(name, value)).sum())?;
    let options = schema.entry(OPTIONS).or_insert_with(|| json!({}));
    let options = options.as_object_mut().ok_or_else(|| refused(format!("{OPTIONS} must be an object")))?;
    if !options.contains_key("whitespace_flexible") {
        options.entry("whitespace_pattern").or_insert_with(|| json!(JSON_WHITESPACE));
    }
    Ok(Value::Object(schema))
}

/// Bytes of all regular expressions in a member of a schema.
fn pattern_bytes(name: &str, value: &Value) -> usize {
    let members = |members: &Map<String, Value>| members.iter().map(|(name, value)| pattern_bytes(name, value)).sum();
    match value {
        Value::String(text) if name == "pattern" || name == "whitespace_pattern" => text.len(),
        Value::Object(patterns) if name == "patternProperties" => {
            patterns.keys().map(String::len).sum::<usize>() + members(patterns)
        }
        Value::Object(object) => members(object),
        Value::Array(items) => items.iter().map(|item| pattern_bytes("", item)).sum(),
        _ => 0,
    }
}
