//! Unigram models of SentencePiece (Kudo, 2018, arXiv 1804.10959): of all ways to divide a text into pieces, the one
//! whose log probabilities have the highest sum.
//!
//! The tokenizers crate finds it, among all pieces of the vocabulary. Here, as in SentencePiece, no text spells a control
//! token, the unknown token, or a token of a byte: in the model of the crate they have no spelling.

use baton_types::TokenId;
use std::collections::HashMap;
use tokenizers::models::unigram::Unigram as Pieces;
use tokenizers::tokenizer::Model;
use tokenizers::{ModelWrapper, Token};

use super::normalizer::SPACE;
use super::vocab::byte_of;

/// What the crate's model needs besides.
pub(super) struct Unigram {
    /// Tokens without a spelling in the model.
    hidden: HashMap<String, TokenId>,
    unknown: Option<TokenId>,
    /// The token of each byte, if unknown characters become those.
    bytes: Option<Box<[Option<TokenId>; 256]>>,
    /// Whether no piece goes on into the next word, so that words can be divided one by one.
    has_words: bool,
}

impl Unigram {
    /// Returns the model for the crate, too. `control` says whether a token is a control token.
    pub(super) fn new(
        model: &Pieces,
        unknown: Option<TokenId>,
        control: impl Fn(TokenId) -> bool,
    ) -> tokenizers::Result<(Self, Pieces)> {
        let mut hidden = HashMap::new();
        let mut bytes = model.byte_fallback().then(|| Box::new([None; 256]));
        let mut pieces = Vec::new();
        let mut has_words = true;
        for (id, (piece, score)) in (0..).zip(model.iter()) {
            let byte = bytes.as_mut().and_then(|bytes| Some(&mut bytes[usize::from(byte_of(piece)?)]));
            let is_byte = byte.is_some();
            if let (Some(byte), false) = (byte, control(id)) {
                *byte = Some(id);
            }
            let hides = is_byte || Some(id) == unknown || control(id);
            if hides {
                hidden.insert(piece.clone(), id);
            } else {
                has_words &= !piece.trim_start_matches(SPACE).contains(SPACE);
            }
            pieces.push((if hides { String::new() } else { piece.clone() }, *score));
        }
        let model = Pieces::from(pieces, unknown.map(|id| id as usize), false)?;
        // Otherwise it depends on all of a run of unknown characters whether it becomes bytes.
        has_words &= bytes.as_ref().is_none_or(|bytes| !bytes.contains(&None));
        Ok((Self { hidden, unknown, bytes, has_words }, model))
    }

    /// A token that the crate's model does not know by its spelling.
    pub(super) fn hidden(&self, token: &str) -> Option<TokenId> {
        self.hidden.get(token).copied()
    }

    /// Whether every character has tokens of its own.
    pub(super) fn spells_all(&self) -> bool {
        self.bytes.as_ref().is_some_and(|bytes| !bytes.contains(&None))
    }

    /// The tokens of a text by `model`, the one that [`Self::new`] returned.
    pub(super) fn tokenize(&self, model: &ModelWrapper, text: &str) -> tokenizers::Result<Vec<Token>> {
        let mut tokens: Vec<Token> = Vec::new();
        let token = |id| Token::new(id, String::new(), (0, 0));
        for word in self.words(text) {
            for Token { id, value, .. } in model.tokenize(word)? {
                let is_unknown = Some(id) == self.unknown;
                match is_unknown.then(|| self.bytes(&value)).flatten() {
                    Some(bytes) => tokens.extend(bytes.into_iter().map(token)),
                    // A run of unknown characters is one token, also over the end of a word.
                    None if is_unknown && tokens.last().is_some_and(|last| last.id == id) => {}
                    None => tokens.push(token(id)),
                }
            }
        }
        Ok(tokens)
    }

    fn bytes(&self, text: &str) -> Option<Vec<TokenId>> {
        let tokens = self.bytes.as_ref()?;
        text.bytes().map(|byte| tokens[usize::from(byte)]).collect()
    }

    /// The parts of a text that each begin with a run of spaces.
    fn words<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let mut rest = text;
        let has_words = self.has_words;
        std::iter::from_fn(move || {
            let start = rest.len() - rest.trim_start_matches(SPACE).len();
            let end = rest[start..].find(SPACE).filter(|_| has_words).map_or(rest.len(), |end| start + end);
            let word;
            (word, rest) = rest.split_at(end);
            (!word.is_empty()).then_some(word)
        })
    }
}
