//! Why a message was refused, and the small checks that conversions share.

use baton_types::RequestError;
use std::fmt::Display;

/// A message of a peer that cannot be converted: the path of the field, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("field `{field}` {problem}")]
pub struct ConvertError {
    field: String,
    problem: String,
}

impl ConvertError {
    pub(super) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }

    /// The field is not set.
    pub fn missing(field: &str) -> Self {
        Self::new(field, "is missing")
    }

    pub(super) fn invalid(field: impl Into<String>, error: impl Display) -> Self {
        Self::new(field, format!("is invalid: {error}"))
    }

    /// Prepends the name of the enclosing field to the path.
    #[must_use]
    pub fn within(mut self, parent: &str) -> Self {
        self.field = format!("{parent}.{}", self.field);
        self
    }

    /// Path of the field at fault, e.g. `sequence.sampling.top_p`.
    pub fn field(&self) -> &str {
        &self.field
    }
}

impl From<ConvertError> for RequestError {
    fn from(error: ConvertError) -> Self {
        Self::invalid(error.field.clone(), error.to_string())
    }
}

impl From<ConvertError> for tonic::Status {
    fn from(error: ConvertError) -> Self {
        super::status::from_error(&error.into())
    }
}

/// The sub-message, converted, or an error that carries its path.
pub fn required<M, T>(field: &str, message: Option<M>) -> Result<T, ConvertError>
where
    T: TryFrom<M, Error = ConvertError>,
{
    T::try_from(message.ok_or_else(|| ConvertError::missing(field))?).map_err(|e| e.within(field))
}

/// At most `max` items.
pub(super) fn bounded(field: &str, len: usize, max: usize, unit: &str) -> Result<(), ConvertError> {
    if len > max {
        return Err(ConvertError::new(field, format!("holds {len} {unit}, at most {max} are accepted")));
    }
    Ok(())
}

/// A text without control characters, of at most `bytes_max` bytes.
pub(super) fn text(field: impl Into<String>, value: String, bytes_max: usize) -> Result<String, ConvertError> {
    if value.len() > bytes_max {
        return Err(ConvertError::new(field, format!("holds {} bytes, at most {bytes_max} are accepted", value.len())));
    }
    if value.chars().any(char::is_control) {
        return Err(ConvertError::new(field, "holds control characters"));
    }
    Ok(value)
}

/// A text like [`text`] that is not empty.
pub(super) fn name(field: impl Into<String>, value: String, bytes_max: usize) -> Result<String, ConvertError> {
    if value.is_empty() { Err(ConvertError::new(field, "is empty")) } else { text(field, value, bytes_max) }
}
