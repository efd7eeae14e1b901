//! Byte-level BPE directly on the text: the kind that most models use. It is about ten times faster than the tokenizers
//! crate and takes a tenth of its memory or less, with the same ids. It stores nothing of a request: it reads only
//! vocabulary and merges.

use baton_types::TokenId;
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::sync::Arc;
use tokenizers::models::bpe::BPE;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::added::{AddedTokens, Part};
use super::merges::{Merges, Scratch};
use super::split::Splitter;
use super::vocab::{Decoder, Vocab};
use crate::ControlSpan;

/// The steps of a byte-level model: normalize, split into words, merge.
pub(super) struct ByteLevel {
    /// Whether text is normalized to Unicode's composed form (NFC), the only normalizer supported here.
    composes: bool,
    splitter: Splitter,
    merges: Merges,
    vocab: Arc<Vocab>,
}

/// The parts of a `tokenizer.json` that decide how text is encoded. Fields are as the tokenizers crate writes them.
pub(super) struct Pipeline<'a> {
    pub(super) normalizer: &'a Value,
    pub(super) pre_tokenizer: &'a Value,
    pub(super) model: &'a BPE,
    /// Pairs of strings, or lines of two words.
    pub(super) merges: &'a RawValue,
    pub(super) decoder: Decoder,
}

impl ByteLevel {
    /// An unsupported part is returned as the error, by name: such a model uses the tokenizers crate.
    pub(super) fn new(pipeline: Pipeline<'_>, vocab: Arc<Vocab>) -> Result<Self, String> {
        let Pipeline { normalizer, pre_tokenizer, model, merges, decoder } = pipeline;
        if decoder != Decoder::ByteLevel {
            return Err("its decoder is not ByteLevel".to_owned());
        }
        let composes = match normalizer["type"].as_str() {
            Some("NFC") => true,
            None if normalizer.is_null() => false,
            name => return Err(format!("its normalizer is {}", name.unwrap_or("of no type"))),
        };
        let splitter = Splitter::from_json(pre_tokenizer)?;
        Ok(Self { composes, splitter, merges: Merges::new(model, merges, &vocab)?, vocab })
    }

    /// Token ids of a text, control tokens exactly at the given spans.
    pub(super) fn encode(
        &self,
        added: &AddedTokens,
        text: &str,
        controls: &[ControlSpan],
    ) -> tokenizers::Result<Vec<TokenId>> {
        let (mut ids, mut scratch) = (Vec::new(), Scratch::default());
        for Part { range, token } in added.split_raw(text, controls) {
            if let Some(token) = token {
                ids.push(token);
                continue;
            }
            let text = self.normalize(&text[range]);
            for Part { range, token } in added.split_normalized(&text) {
                match token {
                    Some(token) => ids.push(token),
                    None => self
                        .splitter
                        .split(&text[range], &mut |word| self.encode_word(word.as_bytes(), &mut scratch, &mut ids))?,
                }
            }
        }
        Ok(ids)
    }

    fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if !self.composes || matches!(is_nfc_quick(text.chars()), IsNormalized::Yes) {
            return Cow::Borrowed(text);
        }
        let mut composed = String::with_capacity(text.len());
        composed.extend(text.nfc().map(|(c, _)| c));
        Cow::Owned(composed)
    }

    /// Appends the tokens of one word. A vocabulary may produce a control token by plain merges; such a word is encoded
    /// in halves.
    fn encode_word(&self, word: &[u8], scratch: &mut Scratch, ids: &mut Vec<TokenId>) -> tokenizers::Result<()> {
        let done = ids.len();
        self.merges.encode(word, &self.vocab, scratch, ids);
        if !ids[done..].iter().any(|&id| self.vocab.is_forbidden(id)) {
            return Ok(());
        }
        ids.truncate(done);
        if word.len() < 2 {
            return Err(format!("byte {word:?} is a control token and nothing else").into());
        }
        let (left, right) = word.split_at(word.len() / 2);
        self.encode_word(left, scratch, ids)?;
        self.encode_word(right, scratch, ids)
    }
}
