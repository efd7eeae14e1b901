//! Byte-level BPE, word by word: what most models use, and the fast way through it.

use baton_types::TokenId;
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use tokenizers::models::bpe::BPE;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::bpe::{Merges, Scratch};
use super::split::Splitter;
use super::vocab::Vocab;

/// What a byte-level model does to text between added tokens: normalizes, splits into words, merges.
#[derive(Debug)]
pub(super) struct ByteLevel {
    /// Unicode's composed form (NFC), the one normalizer that is known here.
    composes: bool,
    pub(super) splitter: Splitter,
    pub(super) merges: Merges,
}

impl ByteLevel {
    /// None for what has to be left to the tokenizers crate: other normalizers, pre-tokenizers and models.
    pub(super) fn new(
        normalizer: &Value,
        pre_tokenizer: &Value,
        model: &BPE,
        merges: &RawValue,
        vocab: &Vocab,
    ) -> Option<Self> {
        let composes = match normalizer {
            Value::Null => false,
            normalizer if normalizer["type"] == "NFC" => true,
            _ => return None,
        };
        let splitter = Splitter::from_json(pre_tokenizer)?;
        Some(Self { composes, splitter, merges: Merges::new(model, merges, vocab)? })
    }

    pub(super) fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if !self.composes || matches!(is_nfc_quick(text.chars()), IsNormalized::Yes) {
            return Cow::Borrowed(text);
        }
        Cow::Owned(text.nfc().map(|(c, _)| c).collect())
    }

    /// Appends the tokens of a normalized text. A vocabulary may reach a control token (`forbidden`) by plain merges; such a word is
    /// taken in halves.
    pub(super) fn encode(
        &self,
        text: &str,
        vocab: &Vocab,
        forbidden: impl Fn(TokenId) -> bool + Copy,
        scratch: &mut Scratch,
        ids: &mut Vec<TokenId>,
    ) -> tokenizers::Result<()> {
        self.splitter.split(text, &mut |word| self.encode_word(word.as_bytes(), vocab, forbidden, scratch, ids))
    }

    fn encode_word(
        &self,
        word: &[u8],
        vocab: &Vocab,
        forbidden: impl Fn(TokenId) -> bool + Copy,
        scratch: &mut Scratch,
        ids: &mut Vec<TokenId>,
    ) -> tokenizers::Result<()> {
        let done = ids.len();
        self.merges.encode(word, vocab, scratch, ids);
        if !ids[done..].iter().any(|&id| forbidden(id)) {
            return Ok(());
        }
        ids.truncate(done);
        if word.len() < 2 {
            return Err(format!("byte {word:?} is a control token and nothing else").into());
        }
        let (left, right) = word.split_at(word.len() / 2);
        self.encode_word(left, vocab, forbidden, scratch, ids)?;
        self.encode_word(right, vocab, forbidden, scratch, ids)
    }
}
