//! How the router treats each field of a request body: one row per field. Fields without a row are ignored, and told by name.
//!
//! A body is parsed in place. Its fields are slices of it until they are read as a type, so an unread field costs
//! nothing. No tree is built from what a client sends.

use super::{Unknown, json};
use baton_types::{ErrorKind, RequestError};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// What happens to one field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Policy {
    /// Implemented: its value has the documented effect.
    Supported,
    /// Documented to have no effect on tokens; any value is accepted.
    Ignored,
    /// Not implemented: accepted only with values that have no effect, else refused.
    Only {
        /// Whether the value has no effect.
        accepts: fn(&Value) -> bool,
        /// The accepted values, for the refusal.
        values: &'static str,
    },
}

/// A field and its policy.
pub(crate) type Row = (&'static str, Policy);

/// Accepts only `null` or `false`.
pub(crate) const fn only_false() -> Policy {
    Policy::Only { accepts: |v| v == &Value::Bool(false), values: "false" }
}

/// Accepts only `null` or 1.
pub(crate) const fn only_one() -> Policy {
    Policy::Only { accepts: |v| v.as_f64() == Some(1.0), values: "1" }
}

/// Accepts nothing but `null`.
pub(crate) const fn only_null() -> Policy {
    Policy::Only { accepts: |_| false, values: "null" }
}

/// Accepts only `null`, an empty list or an empty object.
pub(crate) const fn only_empty() -> Policy {
    Policy::Only { accepts: is_empty, values: "an empty value" }
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

/// Longest value without effect, in bytes of JSON.
const CHANGES_NOTHING_BYTES_MAX: usize = 256;

/// The fields of one body, checked against a table.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    /// At most one per row.
    used: Vec<(&'static str, &'a RawValue)>,
    /// Those that the table does not have.
    unknown: Unknown,
}

impl<'a> Fields<'a> {
    /// Parses a JSON object and applies the table: every refusal names its field.
    pub(crate) fn parse(body: &'a [u8], table: &[Row]) -> Result<Self, RequestError> {
        let refuse = |message: String| RequestError::new(ErrorKind::InvalidRequest, message);
        let not_json = |e: &dyn std::fmt::Display| refuse(format!("the body is not a JSON object: {e}"));
        let body = std::str::from_utf8(body).map_err(|e| not_json(&e))?;
        let (mut fields, mut refused) = (Self { used: Vec::new(), unknown: Unknown::default() }, None);
        let read = json::members(body, |name, value| {
            let Some((row, policy)) = table.iter().find(|(row, _)| *row == name) else {
                fields.unknown.tell(&name);
                return true;
            };
            match check(row, policy, value) {
                Ok(is_used) => {
                    // The last field of a name counts.
                    fields.used.retain(|(known, _)| known != row);
                    fields.used.extend(is_used.then_some((*row, value)));
                }
                Err(error) => refused = Some(error),
            }
            refused.is_none()
        });
        match (refused, read) {
            (Some(error), _) => Err(error),
            (None, Err(e)) => Err(not_json(&e)),
            (None, Ok(())) => Ok(fields),
        }
    }

    /// Takes the names of fields that the table does not have.
    pub(crate) fn take_unknown(&mut self) -> Unknown {
        std::mem::take(&mut self.unknown)
    }

    /// Takes a field as raw JSON; `null` counts as absent.
    pub(crate) fn take_raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.used.iter().position(|(known, _)| *known == name)?;
        Some(self.used.swap_remove(at).1)
    }

    /// Takes a field; `null` counts as absent.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, RequestError> {
        let Some(value) = self.take_raw(name) else { return Ok(None) };
        json::read(value).map(Some).map_err(|e| RequestError::invalid(name, format!("{name}: {e}")))
    }
}

/// Whether a field is used. Refuses what its row refuses.
fn check(name: &str, policy: &Policy, value: &RawValue) -> Result<bool, RequestError> {
    if value.get() == "null" {
        return Ok(false);
    }
    match policy {
        Policy::Supported => Ok(true),
        Policy::Ignored => Ok(false),
        Policy::Only { accepts, values } => {
            let short = value.get().len() <= CHANGES_NOTHING_BYTES_MAX;
            if short && json::read::<Value>(value).is_ok_and(|value| accepts(&value)) {
                return Ok(false);
            }
            let message = format!("{name} is not supported: leave it out or set it to {values}");
            Err(RequestError::new(ErrorKind::Unsupported, message).param(name))
        }
    }
}
