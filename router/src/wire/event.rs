//! Server-sent events.

use super::serialize::not_written;
use baton_types::RequestError;
use serde::Serialize;

/// A value as one event. JSON contains no line breaks.
///
/// # Errors
/// If it cannot be serialized; then `to` is unchanged.
pub(crate) fn event(value: &impl Serialize, to: &mut Vec<u8>) -> Result<(), RequestError> {
    write(b"data: ", value, to)
}

/// As [`event`], under a name.
pub(crate) fn named_event(name: &str, value: &impl Serialize, to: &mut Vec<u8>) -> Result<(), RequestError> {
    write(format!("event: {name}\ndata: ").as_bytes(), value, to)
}

fn write(before: &[u8], value: &impl Serialize, to: &mut Vec<u8>) -> Result<(), RequestError> {
    let length = to.len();
    to.extend_from_slice(before);
    if let Err(error) = serde_json::to_writer(&mut *to, value) {
        to.truncate(length);
        return Err(not_written(&error));
    }
    to.extend_from_slice(b"\n\n");
    Ok(())
}
