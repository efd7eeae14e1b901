//! What verbs print.

use std::io::{self, ErrorKind, Write as _};

/// Prints a text and its line's end at once. `false` where nobody reads it any more, as behind `head`.
pub(crate) fn tell(text: &str) -> io::Result<bool> {
    let mut out = io::stdout();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        told => told.map(|()| true),
    }
}
