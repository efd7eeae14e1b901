//! Output of the commands.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Write as _};

/// Prints a text and a newline in one write. `false` if stdout is closed, as behind `head`.
pub(crate) fn tell(text: &str) -> io::Result<bool> {
    let mut out = io::stdout();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        told => told.map(|()| true),
    }
}

/// A text from elsewhere, for a terminal: control characters, which could write anywhere on it and send it commands, are shown as signs.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    let is_command = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_command) {
        return text.into();
    }
    // U+2400 is the sign of NUL, and those of the others of ASCII follow; the rest have none.
    let sign = |c: char| match u32::from(c) {
        code @ 0..0x20 => char::from_u32(0x2400 + code).unwrap_or('\u{fffd}'),
        0x7f => '\u{2421}',
        _ => '\u{fffd}',
    };
    text.chars().map(|c| if is_command(c) { sign(c) } else { c }).collect()
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
    fn a_text_sends_no_commands_to_a_terminal() {
        assert!(matches!(harmless("a\tb\né"), Cow::Borrowed("a\tb\né")));
        assert_eq!(harmless("\u{1b}]0;x\u{7}\r\u{9b}2J\u{7f}"), "␛]0;x␇␍\u{fffd}2J␡");
    }

    #[test]
    fn numbers_have_commas() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
