//! The schemas inside of a JSON schema.

use crate::TextError;
use serde_json::{Map, Value};

/// Keywords whose members are named by the schema's author: their values are schemas.
const SCHEMAS_BY_NAME: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose values are data, whatever they look like.
const DATA: [&str; 5] = ["enum", "const", "examples", "example", "default"];

/// What is done with a schema.
type Visit<'a> = &'a mut dyn FnMut(&mut Map<String, Value>) -> Result<(), TextError>;

/// Visits each schema right inside of this one.
///
/// Members that are no keywords are visited as well: a `$ref` may point into them.
pub(super) fn each_inside(schema: &mut Map<String, Value>, visit: Visit<'_>) -> Result<(), TextError> {
    schema.iter_mut().try_for_each(|(name, value)| match value {
        _ if DATA.contains(&name.as_str()) => Ok(()),
        Value::Object(schemas) if SCHEMAS_BY_NAME.contains(&name.as_str()) => {
            schemas.values_mut().try_for_each(|schema| each_of(schema, visit))
        }
        _ => each_of(value, visit),
    })
}

fn each_of(value: &mut Value, visit: Visit<'_>) -> Result<(), TextError> {
    match value {
        Value::Object(schema) => visit(schema),
        Value::Array(items) => items.iter_mut().try_for_each(|item| each_of(item, visit)),
        _ => Ok(()),
    }
}
