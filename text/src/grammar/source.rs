//! Grammars in llguidance's words.

use super::bounds;
use super::multiples::{self, Multiples};
use crate::TextError;
use baton_types::{CallGrammar, CallsGrammar, Grammar, GrammarPiece};
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};

/// Whitespace between the tokens of JSON: none, a space, or a new line with its indentation. Small models that may write more of it never
/// come to the end.
const JSON_WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,16}";

/// The member of a schema that holds llguidance's options.
const OPTIONS: &str = "x-guidance";

/// Lets keywords of a schema that cannot be enforced not count, unless it has options of its own.
pub fn lenient(schema: &mut Map<String, Value>) {
    schema.entry(OPTIONS).or_insert_with(|| json!({"lenient": true}));
}

pub(super) fn top_level(grammar: &Grammar) -> Result<TopLevelGrammar, TextError> {
    let refused = |error: &dyn std::fmt::Display| TextError::Grammar(error.to_string());
    grammar.check().map_err(|error| refused(&error))?;
    Ok(match grammar {
        Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(self::schema(schema)?),
        Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        // Control tokens are no text.
        Grammar::Lark(lark) if lark.contains("<[") => {
            let message = "tokens by number (`<[`) are not supported; write `\"<\" \"[\"` for such a text, `[<][` in an expression";
            return Err(TextError::Grammar(message.into()));
        }
        Grammar::Lark(lark) => {
            check_schemas_of(lark)?;
            TopLevelGrammar::from_lark(lark.clone())
        }
        Grammar::Calls(calls) => TopLevelGrammar::from_lark(lark_of_calls(calls)?),
        Grammar::Choice(choices) => {
            let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | ")))
        }
    })
}

/// A rule for each tool, and one for all of them.
fn lark_of_calls(calls: &CallsGrammar) -> Result<String, TextError> {
    let CallsGrammar { open, calls, separator, close } = calls;
    let more = separator.as_ref().map_or(String::new(), |separator| format!("({} call)*", lark_of(separator)));
    let mut lark = format!("start: {} call {more} {}\ncall: ", lark_of(open), lark_of(close));
    let (mut rules, mut all) = (String::new(), Work::default());
    for (at, CallGrammar { open, schema, close }) in calls.iter().enumerate() {
        let schema = self::schema(schema)?;
        all.add(&schema)?;
        lark += &format!("{}call_{at}", if at > 0 { " | " } else { "" });
        rules += &format!(
            "\ncall_{at}: {} arguments_{at} {}\narguments_{at}: %json {schema}",
            lark_of(open),
            lark_of(close)
        );
    }
    Ok(lark + &rules + "\n")
}

/// Pieces of a notation, one after another. An empty text is left out: it needs no lexeme.
fn lark_of(pieces: &[GrammarPiece]) -> String {
    let piece = |piece: &GrammarPiece| match piece {
        GrammarPiece::Text(text) if text.is_empty() => String::new(),
        GrammarPiece::Text(text) => json!(text).to_string(),
        GrammarPiece::Token(token) => format!("<[{token}]>"),
    };
    pieces.iter().map(piece).collect::<Vec<_>>().join(" ")
}

/// Checks the schemas inside a Lark grammar.
fn check_schemas_of(lark: &str) -> Result<(), TextError> {
    const SCHEMA: &str = "%json";
    let mut all = Work::default();
    for (at, _) in lark.match_indices(SCHEMA) {
        let mut values = serde_json::Deserializer::from_str(&lark[at + SCHEMA.len()..]).into_iter::<Value>();
        let Some(Ok(mut schema)) = values.next() else {
            return Err(TextError::Grammar(format!("behind {SCHEMA} there must be a JSON schema")));
        };
        all.add(&schema)?;
        if let Some(schema) = schema.as_object_mut() {
            // Its text stays as it is, so nothing can be left out of a lenient one.
            bounds::check(schema, false)?;
        }
    }
    Ok(())
}

/// What all schemas of a grammar take together.
#[derive(Default)]
struct Work {
    pattern_bytes: usize,
    multiples: u64,
}

impl Work {
    /// Adds a schema, and refuses what is too much.
    fn add(&mut self, schema: &Value) -> Result<(), TextError> {
        let mut count = Count::default();
        count.value("", schema)?;
        self.take(&count)
    }

    /// The same, of a schema that is counted.
    fn take(&mut self, count: &Count) -> Result<(), TextError> {
        self.pattern_bytes += count.pattern_bytes;
        self.multiples = self.multiples.saturating_add(count.multiples.states());
        let refuse = |what: String| Err(TextError::Grammar(what));
        let (bytes, max) = (self.pattern_bytes, Grammar::PATTERN_BYTES_MAX);
        if bytes > max {
            return refuse(format!("the patterns of a JSON schema take at most {max} bytes together, got {bytes}"));
        }
        if self.multiples > multiples::STATES_MAX {
            let (keyword, max) = (multiples::KEYWORD, multiples::STATES_MAX);
            return refuse(format!(
                "`{keyword}` takes too much work: the least common multiple of all its values, times one more than their decimals, is at most {max}"
            ));
        }
        Ok(())
    }
}

fn is_lenient(schema: &Map<String, Value>) -> bool {
    schema.get(OPTIONS).and_then(|options| options.get("lenient")) == Some(&Value::Bool(true))
}

fn schema(text: &str) -> Result<Value, TextError> {
    let refused = |error: String| TextError::Grammar(error);
    let mut schema = match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(schema)) => schema,
        // Any value.
        Ok(Value::Bool(true)) => Map::new(),
        Ok(Value::Bool(false)) => return Err(refused("the JSON schema `false` allows no value".into())),
        Ok(_) => return Err(refused("a JSON schema must be an object or `true`".into())),
        Err(error) => return Err(refused(format!("a JSON schema must be JSON: {error}"))),
    };
    let is_lenient = is_lenient(&schema);
    let mut count = Count::default();
    count.object(&schema)?;
    if is_lenient && count.multiples.states() > multiples::STATES_MAX {
        multiples::leave_out(&mut schema)?;
        // Those in data count: a `$ref` may point there.
        count = Count::default();
        count.object(&schema)?;
    }
    Work::default().take(&count)?;
    bounds::check(&mut schema, is_lenient)?;
    let options = schema.entry(OPTIONS).or_insert_with(|| json!({}));
    let options = options.as_object_mut().ok_or_else(|| refused(format!("{OPTIONS} must be an object")))?;
    if !options.contains_key("whitespace_flexible") {
        options.entry("whitespace_pattern").or_insert_with(|| json!(JSON_WHITESPACE));
    }
    Ok(Value::Object(schema))
}

/// What takes more work than its size says.
#[derive(Default)]
struct Count {
    pattern_bytes: usize,
    multiples: Multiples,
    patterns: usize,
    properties: usize,
}

/// Most properties of a schema, in all of its objects; their work grows by the square.
const PROPERTIES_MAX: usize = 1_000;
/// Most properties of an object whose number of properties is bounded; their work grows by the cube.
const COUNTED_PROPERTIES_MAX: usize = 32;
/// Most patterns of properties: each is compared with each.
const PATTERN_PROPERTIES_MAX: usize = 32;

impl Count {
    fn object(&mut self, members: &Map<String, Value>) -> Result<(), TextError> {
        let len = |name: &str| members.get(name).and_then(Value::as_object).map_or(0, Map::len);
        let is_counted = members.contains_key("minProperties") || members.contains_key("maxProperties");
        let required = members.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        self.properties += len("properties").max(required);
        self.patterns += len("patternProperties");
        let refuse =
            |what: &str, max: usize| Err(TextError::Grammar(format!("a JSON schema takes at most {max} {what}")));
        if self.properties > PROPERTIES_MAX {
            return refuse("properties", PROPERTIES_MAX);
        }
        if self.patterns > PATTERN_PROPERTIES_MAX {
            return refuse("patternProperties", PATTERN_PROPERTIES_MAX);
        }
        if is_counted && len("properties") > COUNTED_PROPERTIES_MAX {
            return refuse("properties where minProperties or maxProperties count them", COUNTED_PROPERTIES_MAX);
        }
        members.iter().try_for_each(|(name, value)| self.value(name, value))
    }

    fn value(&mut self, name: &str, value: &Value) -> Result<(), TextError> {
        match value {
            Value::Number(divisor) if name == multiples::KEYWORD => {
                self.multiples.add(divisor);
                Ok(())
            }
            Value::String(text)
                if ["pattern", "whitespace_pattern", "item_separator", "key_separator"].contains(&name) =>
            {
                self.pattern_bytes += text.len();
                Ok(())
            }
            Value::Object(members) => {
                if name == "patternProperties" {
                    self.pattern_bytes += members.keys().map(String::len).sum::<usize>();
                }
                self.object(members)
            }
            Value::Array(items) => items.iter().try_for_each(|item| self.value("", item)),
            _ => Ok(()),
        }
    }
}
