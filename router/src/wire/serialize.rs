//! JSON serialized once, into a buffer of the exact size.

use baton_types::{ErrorKind, RequestError};
use serde::Serialize;
use std::io::{self, Write};

/// Counts bytes instead of storing them.
struct Counter(u64);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the client gets instead of an answer that cannot be serialized.
pub(crate) fn not_written(error: &serde_json::Error) -> RequestError {
    RequestError::new(ErrorKind::Internal, format!("the answer could not be written: {error}"))
}

/// How many bytes a value takes as JSON. If it cannot be serialized the count is too low, and [`write`] returns the
/// error.
pub(crate) fn length(value: &impl Serialize) -> u64 {
    let mut counter = Counter(0);
    let written = serde_json::to_writer(&mut counter, value);
    debug_assert!(written.is_ok(), "names are strings, and counting never fails");
    counter.0
}

/// A value as JSON of `length` bytes: a growing buffer would take up to three times its memory.
///
/// # Errors
/// If it cannot be serialized.
pub(crate) fn write(value: &impl Serialize, length: u64) -> Result<Vec<u8>, RequestError> {
    let mut json = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    serde_json::to_writer(&mut json, value).map_err(|error| not_written(&error))?;
    debug_assert_eq!(json.len() as u64, length, "the bytes that were counted");
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_counted_is_written() {
        for value in [json!(null), json!({"a": "\u{fffd}\n\"", "b": [1, -9999.0, 0.1, {"c": []}]})] {
            let json = write(&value, length(&value)).unwrap();
            assert_eq!((json.capacity(), json), (value.to_string().len(), value.to_string().into_bytes()));
        }
    }

    /// A map whose keys are not strings, after some text.
    fn unwritable() -> (String, std::collections::BTreeMap<Vec<u8>, u8>) {
        ("text".into(), [(vec![1], 1)].into())
    }

    #[test]
    fn what_cannot_be_written_is_an_error_and_no_empty_answer() {
        assert_eq!(write(&unwritable(), 9).unwrap_err().kind, ErrorKind::Internal);
        let mut stream = b"data: 1\n\n".to_vec();
        assert_eq!(super::super::event(&unwritable(), &mut stream).unwrap_err().kind, ErrorKind::Internal);
        assert_eq!(stream, b"data: 1\n\n", "no half of it either");
    }
}
