//! Texts of others in messages.

/// Most bytes of such a text: more than names of models have.
const SHOWN_BYTES_MAX: usize = 256;

/// A text from a client, a peer or a file, in quotes, as an error repeats it. Of a long one, the beginning. A precision (`{:.256?}`) does not
/// shorten a text in quotes.
pub fn shown(text: &str) -> String {
    let beginning = &text[..text.floor_char_boundary(SHOWN_BYTES_MAX)];
    let more = if beginning.len() < text.len() { "…" } else { "" };
    format!("{beginning:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shown("a\n\""), r#""a\n\"""#);
        let fits = "x".repeat(SHOWN_BYTES_MAX);
        assert_eq!(shown(&fits), format!("\"{fits}\""));
        let wide = format!("{}€", "x".repeat(SHOWN_BYTES_MAX - 1));
        assert_eq!(shown(&wide), format!("\"{}\"…", "x".repeat(SHOWN_BYTES_MAX - 1)));
    }
}
