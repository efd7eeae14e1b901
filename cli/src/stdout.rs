//! Output of the commands.

use std::io::{self, ErrorKind, Write as _};

/// Prints a text and a newline in one write. `false` if stdout is closed, as behind `head`.
pub(crate) fn tell(text: &str) -> io::Result<bool> {
    let mut out = io::stdout();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        told => told.map(|()| true),
    }
}

/// A number with commas between thousands.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let comma = |i: usize| i > 0 && (digits.len() - i).is_multiple_of(3);
    digits.chars().enumerate().flat_map(|(i, digit)| comma(i).then_some(',').into_iter().chain([digit])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_commas() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
