//! Numbers that bound the numbers of a JSON schema: llguidance computes with them as `f64`.

use crate::TextError;
use serde_json::{Map, Value};

/// The largest integer that `f64` tells from its neighbours (RFC 8259, section 6).
const EXACT_MAX: u64 = (1 << 53) - 1;

/// Keywords whose numbers bound what an answer may say.
const BOUNDS: [&str; 5] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
/// Keywords whose members are named by the schema's author: their values are schemas.
const SCHEMAS_BY_NAME: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose values are data, whatever they look like.
const DATA: [&str; 5] = ["enum", "const", "examples", "example", "default"];

/// Refuses bounds that would not be enforced exactly. In a lenient schema they do not count.
///
/// Members that are no keywords are walked as well: a `$ref` may point into them.
pub(super) fn check(schema: &mut Map<String, Value>, is_lenient: bool) -> Result<(), TextError> {
    if is_lenient {
        schema.retain(|name, value| !is_inexact(name, value));
    }
    for (name, value) in schema {
        if is_inexact(name, value) {
            return Err(TextError::Grammar(format!(
                "`{name}` is {value}: bounds of numbers are supported from -{EXACT_MAX} to {EXACT_MAX}"
            )));
        }
        match value {
            _ if DATA.contains(&name.as_str()) => {}
            Value::Object(schemas) if SCHEMAS_BY_NAME.contains(&name.as_str()) => {
                schemas.values_mut().try_for_each(|schema| check_value(schema, is_lenient))?;
            }
            _ => check_value(value, is_lenient)?,
        }
    }
    Ok(())
}

fn check_value(value: &mut Value, is_lenient: bool) -> Result<(), TextError> {
    match value {
        Value::Object(schema) => check(schema, is_lenient),
        Value::Array(items) => items.iter_mut().try_for_each(|item| check_value(item, is_lenient)),
        _ => Ok(()),
    }
}

fn is_inexact(name: &str, value: &Value) -> bool {
    let Value::Number(number) = value else { return false };
    let integer = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
    // A float of that size is an integer, and may stand for several.
    let is_large = integer.map_or_else(
        || number.as_f64().is_none_or(|float| float.abs() > EXACT_MAX as f64),
        |integer| integer > EXACT_MAX,
    );
    is_large && BOUNDS.contains(&name)
}
