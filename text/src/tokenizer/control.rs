//! Control tokens: those that structure a prompt and that user text must never become.

use aho_corasick::{AhoCorasick, MatchKind};
use baton_types::TokenId;
use std::ops::Range;

use crate::TextError;

/// Whether an added token structures prompts: marked special, or spelled `<|...|>` or `<｜...｜>`. Some models do not
/// mark theirs (the `<｜User｜>` of DeepSeek); without this rule users could forge turns of a chat.
pub(crate) fn is_control(special: bool, spelling: &str) -> bool {
    let bracketed = |open, close| spelling.starts_with(open) && spelling.ends_with(close);
    special || bracketed("<|", "|>") || bracketed("<｜", "｜>")
}

/// The control tokens of one tokenizer.
#[derive(Debug)]
pub(crate) struct Controls {
    tokens: Vec<(TokenId, String)>,
    finder: AhoCorasick,
}

impl Controls {
    pub(crate) fn new(mut tokens: Vec<(TokenId, String)>) -> Result<Self, TextError> {
        tokens.retain(|(_, spelling)| !spelling.is_empty());
        let finder = finder("added tokens", tokens.iter().map(|(_, spelling)| spelling.as_str()))?;
        Ok(Self { tokens, finder })
    }

    pub(crate) fn tokens(&self) -> &[(TokenId, String)] {
        &self.tokens
    }

    /// Spellings in `text`, leftmost first, and the longest of those with the same start: position, and index into
    /// [`Self::tokens`].
    pub(crate) fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (Range<usize>, usize)> + 'a {
        self.finder.find_iter(text).map(|m| (m.range(), m.pattern().as_usize()))
    }
}

/// A leftmost-longest search, as Hugging Face's tokenizers search for added tokens. `what` names the spellings in an error.
pub(crate) fn finder<'a>(what: &str, spellings: impl Iterator<Item = &'a str>) -> Result<AhoCorasick, TextError> {
    AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostLongest)
        .build(spellings)
        .map_err(|e| TextError::Broken(format!("its {what} cannot be searched for: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_by_mark_or_by_spelling() {
        let cases =
            [(true, "</s>", true), (false, "<|User|>", true), (false, "<｜User｜>", true), (false, "<think>", false)];
        for (special, spelling, control) in cases {
            assert_eq!(is_control(special, spelling), control, "{spelling}");
        }
    }
}
