//! What the router does with each field of a request body: one row a field, so that nothing is dropped in silence.

use baton_types::{ErrorKind, RequestError};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// What happens to one field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Policy {
    /// Honoured.
    Supported,
    /// Documented to have no effect on tokens; any value is accepted.
    Ignored,
    /// Not implemented: accepted at the values that change nothing, else refused.
    Only {
        /// Whether the value changes nothing.
        accepts: fn(&Value) -> bool,
        /// The accepted values, for the refusal.
        values: &'static str,
    },
}

/// A field and its policy.
pub(crate) type Row = (&'static str, Policy);

/// `null` or `false`.
pub(crate) const fn only_false() -> Policy {
    Policy::Only { accepts: |v| v == &Value::Bool(false), values: "false" }
}

/// `null` or 1.
pub(crate) const fn only_one() -> Policy {
    Policy::Only { accepts: |v| v.as_f64() == Some(1.0), values: "1" }
}

/// `null` alone.
pub(crate) const fn only_null() -> Policy {
    Policy::Only { accepts: |_| false, values: "null" }
}

/// `null` or an empty list or object.
pub(crate) const fn only_empty() -> Policy {
    Policy::Only { accepts: is_empty, values: "an empty value" }
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

/// The fields of one body, checked against a table.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Parses a JSON object and applies the table: every refusal names its field.
    pub(crate) fn parse(body: &[u8], table: &[Row]) -> Result<Self, RequestError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|e| RequestError::new(ErrorKind::InvalidRequest, format!("the body is not JSON: {e}")))?;
        let Value::Object(mut fields) = value else {
            return Err(RequestError::new(ErrorKind::InvalidRequest, "the body must be a JSON object"));
        };
        fields.retain(|_, v| !v.is_null());
        for (name, value) in &fields {
            match table.iter().find(|(row, _)| row == name) {
                Some((_, Policy::Supported | Policy::Ignored)) => {}
                Some((_, Policy::Only { accepts, .. })) if accepts(value) => {}
                Some((_, Policy::Only { values, .. })) => {
                    let message = format!("{name} is not supported: leave it out or set it to {values}");
                    return Err(RequestError {
                        param: Some(name.clone()),
                        ..RequestError::new(ErrorKind::Unsupported, message)
                    });
                }
                None => return Err(RequestError::invalid(name.clone(), format!("unknown field {name}"))),
            }
        }
        Ok(Self(fields))
    }

    /// Takes a field; `null` counts as absent.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, RequestError> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|e| RequestError::invalid(name, format!("{name}: {e}")))
    }

    /// Takes a field that must be there.
    pub(crate) fn require<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, RequestError> {
        self.take(name)?.ok_or_else(|| RequestError::invalid(name, format!("{name} is required")))
    }
}
