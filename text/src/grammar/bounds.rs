//! Numbers that bound the numbers of a JSON schema: llguidance computes with them as `f64`.

use super::schemas::each_inside;
use crate::TextError;
use serde_json::{Map, Value};

/// The largest integer that `f64` tells from its neighbours (RFC 8259, section 6).
const EXACT_MAX: u64 = (1 << 53) - 1;

/// Keywords whose numbers bound what an answer may say.
const BOUNDS: [&str; 5] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
/// Refuses bounds that would not be enforced exactly. In a lenient schema they do not count.
pub(super) fn check(schema: &mut Map<String, Value>, is_lenient: bool) -> Result<(), TextError> {
    if is_lenient {
        schema.retain(|name, value| !is_inexact(name, value));
    } else if let Some((name, value)) = schema.iter().find(|(name, value)| is_inexact(name, value)) {
        return Err(TextError::Grammar(format!(
            "`{name}` is {value}: bounds of numbers are supported from -{EXACT_MAX} to {EXACT_MAX}"
        )));
    }
    each_inside(schema, &mut |inside| check(inside, is_lenient))
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
