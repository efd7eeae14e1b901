//! Encoding with the tokenizers crate, for every model that [`super::byte_level`] does not support. It stores an origin
//! for every byte, which takes about a hundred bytes of memory per byte of text.

use tokenizers::normalizer::Range as TextRange;
use tokenizers::tokenizer::{Model, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
use tokenizers::{NormalizedString, Token, Tokenizer};

use super::added::{AddedTokens, Part};
use super::normalizer::SentencePiece;
use super::unigram::Unigram;
use super::vocab::Vocab;
use crate::ControlSpan;
use baton_types::TokenId;

/// The crate's tokenizer, and what replaces parts of it.
pub(super) struct Library {
    pub(super) tokenizer: Tokenizer,
    /// Instead of the crate's own normalizer.
    pub(super) normalizer: Option<SentencePiece>,
    /// If the model is a unigram model.
    pub(super) unigram: Option<Unigram>,
}

impl Library {
    /// The steps of the crate's own `Tokenizer::encode`, with our split at control tokens instead of its own.
    pub(super) fn encode(
        &self,
        added: &AddedTokens,
        vocab: &Vocab,
        text: &str,
        controls: &[ControlSpan],
    ) -> tokenizers::Result<Vec<TokenId>> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, text| Ok(slices(&text, added.split_raw(text.get(), controls))))?;
        pieces.split(|_, mut text| {
            self.normalize(&mut text)?;
            Ok(slices(&text, added.split_normalized(text.get())))
        })?;
        self.tokenizer.get_pre_tokenizer().map_or(Ok(()), |p| p.pre_tokenize(&mut pieces))?;
        pieces.tokenize(|word| self.encode_word(vocab, word.get()))?;
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
        Ok(splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref()).flatten().map(|t| t.id).collect())
    }

    pub(super) fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        match &self.normalizer {
            Some(normalizer) => normalizer.normalize(text),
            None => self.tokenizer.get_normalizer().map_or(Ok(()), |n| n.normalize(text)),
        }
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<TokenId> {
        let hidden = || self.unigram.as_ref().and_then(|unigram| unigram.hidden(token));
        self.tokenizer.token_to_id(token).or_else(hidden)
    }

    /// The model's tokens of one word. A vocabulary may produce a control token by plain merges; such a word is encoded
    /// in halves.
    fn encode_word(&self, vocab: &Vocab, word: &str) -> tokenizers::Result<Vec<Token>> {
        let tokens = match &self.unigram {
            Some(unigram) => unigram.tokenize(self.tokenizer.get_model(), word)?,
            None => self.tokenizer.get_model().tokenize(word)?,
        };
        if !tokens.iter().any(|t| vocab.is_forbidden(t.id)) {
            return Ok(tokens);
        }
        let (middle, _) = word.char_indices().nth(word.chars().count() / 2).unwrap_or_default();
        if middle == 0 {
            return Err(format!("{word:?} is a control token and nothing else").into());
        }
        let mut halves = self.encode_word(vocab, &word[..middle])?;
        halves.extend(self.encode_word(vocab, &word[middle..])?);
        Ok(halves)
    }
}

/// The parts of a text, in the crate's type.
fn slices(text: &NormalizedString, parts: Vec<Part>) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    let slice = |Part { range, token }: Part| {
        let token = token.map(|id| vec![Token::new(id, String::new(), (0, range.len()))]);
        (text.slice(TextRange::Normalized(range)).expect("parts end at characters"), token)
    };
    parts.into_iter().map(slice).collect()
}
