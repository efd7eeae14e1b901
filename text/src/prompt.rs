//! A text with its control tokens marked: what a chat template renders and the tokenizer encodes.

use baton_types::TokenId;

/// One control token in a text: `text[start..end]` spells it.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlSpan {
    /// First byte of the spelling.
    pub start: usize,
    /// One past its last byte.
    pub end: usize,
    pub token: TokenId,
}

/// A whole prompt text. Only its [`ControlSpan`]s may become control tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    controls: Vec<ControlSpan>,
}

impl Prompt {
    /// A prompt without control tokens, even if its text spells some.
    pub fn plain(text: impl Into<String>) -> Self {
        Self { text: text.into(), controls: Vec::new() }
    }

    /// The text, control tokens spelled out.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The control tokens, in order and without overlaps.
    pub fn controls(&self) -> &[ControlSpan] {
        &self.controls
    }

    pub(crate) fn push_text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Adds one ordinary character.
    pub(crate) fn push_char(&mut self, c: char) {
        self.text.push(c);
    }

    /// Adds a control token.
    pub(crate) fn push_control(&mut self, token: TokenId, spelling: &str) {
        let start = self.text.len();
        self.text.push_str(spelling);
        self.controls.push(ControlSpan { start, end: self.text.len(), token });
    }
}
