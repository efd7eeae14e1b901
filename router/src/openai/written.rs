//! JSON written once, into as many bytes as it takes.

use serde::Serialize;
use std::io::{self, Write};

/// Bytes that pass by.
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

/// How many bytes a value takes as JSON.
pub(crate) fn length(value: &impl Serialize) -> u64 {
    let mut counter = Counter(0);
    let written = serde_json::to_writer(&mut counter, value);
    debug_assert!(written.is_ok(), "names are strings, and counting never fails");
    counter.0
}

/// A value as JSON of `length` bytes: a buffer that grows would hold it up to three times.
pub(crate) fn write(value: &impl Serialize, length: u64) -> Vec<u8> {
    let mut json = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    let written = serde_json::to_writer(&mut json, value);
    debug_assert!(written.is_ok() && json.len() as u64 == length, "{length} bytes were counted");
    json
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_counted_is_written() {
        for value in [json!(null), json!({"a": "\u{fffd}\n\"", "b": [1, -9999.0, 0.1, {"c": []}]})] {
            let json = write(&value, length(&value));
            assert_eq!((json.capacity(), json), (value.to_string().len(), value.to_string().into_bytes()));
        }
    }
}
