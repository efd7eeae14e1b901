//! Token ids to text, one token at a time, without splitting a character.

use baton_types::TokenId;
use std::sync::Arc;

use crate::tokenizer::vocab::{Leading, Vocab};

/// Incremental decoding of one answer. The concatenated deltas equal the text of all tokens decoded at once. The work
/// per token is proportional to its bytes, and at most three bytes are held back.
#[derive(Clone)]
pub struct Detokenizer {
    vocab: Arc<Vocab>,
    skip_special: bool,
    /// Special tokens that are not skipped.
    shown: Arc<[TokenId]>,
    /// The first bytes of an incomplete character.
    partial: Vec<u8>,
    /// What is still dropped in front.
    leading: Leading,
}

impl Detokenizer {
    pub(crate) fn new(vocab: Arc<Vocab>, skip_special: bool) -> Self {
        let leading = vocab.leading;
        Self { vocab, skip_special, shown: Arc::default(), partial: Vec::new(), leading }
    }

    /// Leaves these special tokens in the text.
    #[must_use]
    pub fn showing(mut self, tokens: Arc<[TokenId]>) -> Self {
        self.shown = tokens;
        self
    }

    /// Takes a token; returns the text that it completes. Bytes that cannot become a character become U+FFFD; ids
    /// outside the vocabulary add nothing.
    pub fn push(&mut self, token: TokenId) -> Option<String> {
        if self.skip_special && self.vocab.is_special(token) && !self.shown.contains(&token) {
            return None;
        }
        let bytes = self.vocab.bytes(token).filter(|bytes| !bytes.is_empty())?;
        match self.leading {
            Leading::Spaces(spaces) => {
                let dropped = bytes.iter().take(spaces).take_while(|&&byte| byte == b' ').count();
                self.partial.extend_from_slice(&bytes[dropped..]);
                self.leading = Leading::Spaces(if dropped == bytes.len() { spaces - dropped } else { 0 });
            }
            Leading::FirstToken => {
                self.partial.extend(self.vocab.bytes_if_first(token)?);
                self.leading = Leading::Spaces(0);
            }
        }
        let mut text = String::new();
        let mut keep = self.partial.len();
        for chunk in self.partial.utf8_chunks() {
            text.push_str(chunk.valid());
            let broken = chunk.invalid();
            let at_end = std::ptr::eq(broken.as_ptr_range().end, self.partial.as_ptr_range().end);
            match std::str::from_utf8(broken) {
                Err(e) if at_end && e.error_len().is_none() => keep = self.partial.len() - broken.len(),
                Err(_) => text.push(char::REPLACEMENT_CHARACTER),
                Ok(_) => {}
            }
        }
        self.partial.drain(..keep);
        (!text.is_empty()).then_some(text)
    }

    /// Ends the answer: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> Option<String> {
        let partial = std::mem::take(&mut self.partial);
        (!partial.is_empty()).then(|| String::from_utf8_lossy(&partial).into_owned())
    }
}

impl std::fmt::Debug for Detokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Detokenizer").field("partial", &self.partial).finish_non_exhaustive()
    }
}
