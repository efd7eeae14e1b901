//! Words that an answer does not have.

use crate::models::ModelText;
use baton_types::{RequestError, TokenId};

/// Checked texts. Each becomes two sequences of tokens: with and without a space before it, since a word within a text
/// mostly has other tokens than at its beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BadWords(Vec<String>);

impl BadWords {
    /// Most words.
    pub(crate) const MAX: usize = 128;
    /// Most bytes of a word: it has at least as many bytes as tokens, but for a space.
    const BYTES_MAX: usize = 127;

    /// Checks the words; spaces before them do not count.
    ///
    /// # Errors
    /// If there are too many, or one is empty or too long.
    pub(crate) fn try_new(words: Vec<String>) -> Result<Self, RequestError> {
        let refuse = |message| Err(RequestError::invalid("bad_words", message));
        if words.len() > Self::MAX {
            return refuse(format!("bad_words takes at most {} words, got {}", Self::MAX, words.len()));
        }
        let words: Vec<String> = words.iter().map(|word| word.trim_start().to_owned()).collect();
        match words.iter().find(|word| !(1..=Self::BYTES_MAX).contains(&word.len())) {
            Some(word) => {
                let message = format!(
                    "each of bad_words has 1 to {} bytes besides spaces before it, got {}",
                    Self::BYTES_MAX,
                    word.len()
                );
                refuse(message)
            }
            None => Ok(Self(words)),
        }
    }

    /// Bytes of their texts, with a space before each and without.
    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(|word| 2 * word.len() + 1).sum()
    }

    /// Their tokens, each sequence once.
    ///
    /// # Errors
    /// If the model has no text, or a word no tokens.
    pub(crate) fn tokens(&self, text: Option<&ModelText>) -> Result<Vec<Vec<TokenId>>, RequestError> {
        if self.0.is_empty() {
            return Ok(Vec::new());
        }
        let refuse = |message: &str| RequestError::invalid("bad_words", message);
        let text = text.ok_or_else(|| refuse("this model has no text; use logit_bias to bar tokens"))?;
        let mut all = Vec::with_capacity(2 * self.0.len());
        for word in self.0.iter().flat_map(|word| [word.clone(), format!(" {word}")]) {
            let tokens = text.encode_word(&word)?;
            if tokens.is_empty() {
                return Err(refuse("a word has no tokens in this model; leave it out"));
            }
            if !all.contains(&tokens) {
                all.push(tokens);
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::text::{byte_bundle, tokens};
    use baton_text::bundle;

    #[test]
    fn words_are_barred_with_and_without_a_space() {
        let text = ModelText::load(&bundle::decode(&byte_bundle("")).unwrap()).unwrap();
        let words = |words: &[&str]| BadWords::try_new(words.iter().map(|word| (*word).to_owned()).collect());
        let all = words(&["a", "  bc", "a", "<|end|>"]).unwrap().tokens(Some(&text)).unwrap();
        let expected = ["a", " a", "bc", " bc", "<|end|>", " <|end|>"].map(tokens);
        assert_eq!(all, expected, "no control token is meant");
        assert_eq!(words(&[]).unwrap().tokens(None), Ok(Vec::new()));
        assert!(words(&["a"]).unwrap().tokens(None).is_err());
        let (long, longest) = ("x".repeat(128), "x".repeat(127));
        let at_most = words(&[longest.as_str(); 128]).unwrap().tokens(Some(&text)).unwrap();
        assert_eq!(at_most.iter().map(Vec::len).max(), Some(128), "what a worker takes");
        for wrong in [&[""][..], &[" "], &[&long], &["a"; 129]] {
            assert_eq!(words(wrong).unwrap_err().param.as_deref(), Some("bad_words"), "{wrong:?}");
        }
    }
}
