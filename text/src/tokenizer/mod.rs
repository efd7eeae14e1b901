//! Text to token ids, with control tokens only where they are allowed.

mod added;
mod byte_level;
pub(crate) mod bytes;
pub(crate) mod charsmap;
pub(crate) mod control;
mod library;
mod merges;
pub(crate) mod normalizer;
mod shrinks;
mod split;
mod unigram;
pub(crate) mod vocab;

use baton_types::{TextBundle, TokenId};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::sync::Arc;
use tokenizers::{ModelWrapper, NormalizedString, Tokenizer as Parsed};

use crate::{ControlSpan, Detokenizer, Prompt, TextError};
use added::AddedTokens;
use byte_level::{ByteLevel, Pipeline};
use control::{Controls, is_control};
use library::Library;
use normalizer::SentencePiece;
use unigram::Unigram;
use vocab::{Decoder, Vocab};

/// How to treat spellings of control tokens in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// As ordinary characters: for any text of a user.
    AsText,
    /// As control tokens: only for text that is trusted to contain whole prompts.
    Parse,
}

/// A model's tokenizer. Clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer(Arc<Parts>);

struct Parts {
    library: Library,
    /// The fast path, or why this model uses the library.
    byte_level: Result<ByteLevel, String>,
    added: AddedTokens,
    vocab: Arc<Vocab>,
    bos: Option<TokenId>,
    token_bytes_max: Option<usize>,
}

/// The fields of a `tokenizer.json` that are read in addition to those of the tokenizers crate.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(default)]
    added_tokens: Vec<HeadToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(borrow, default)]
    model: HeadModel<'a>,
}

#[derive(Default, Deserialize)]
struct HeadModel<'a> {
    #[serde(borrow, default)]
    merges: Option<&'a RawValue>,
    /// The unknown token of a unigram model.
    #[serde(default)]
    unk_id: Option<TokenId>,
}

#[derive(Deserialize)]
struct HeadToken {
    id: TokenId,
    content: String,
}

impl Tokenizer {
    /// Loads the bundle's tokenizer. BPE models with a byte-level or a SentencePiece-like decoder are supported, and unigram
    /// models with the latter.
    pub fn from_bundle(bundle: &TextBundle) -> Result<Self, TextError> {
        let broken = |e: &dyn std::fmt::Display| TextError::Broken(e.to_string());
        let head: Head = serde_json::from_str(&bundle.tokenizer_json).map_err(|e| broken(&e))?;
        let decoder = Decoder::from_json(&head.decoder)?;
        let normalizer = SentencePiece::from_json(&head.normalizer)?;
        if normalizer.is_none() {
            normalizer::check(&head.normalizer)?;
        }
        let mut parsed = parsed(&bundle.tokenizer_json, normalizer.is_some()).map_err(|e| broken(&e))?;
        // The crate assigns new ids to added tokens that the vocabulary lacks; a shifted id would give a wrong prompt.
        if let Some(t) = head.added_tokens.iter().find(|t| parsed.token_to_id(&t.content) != Some(t.id)) {
            return Err(TextError::Broken(format!("added token {:?} does not get its id {}", t.content, t.id)));
        }
        let mut tokens: Vec<_> = parsed.get_added_tokens_decoder().into_iter().collect();
        tokens.sort_by_key(|(id, _)| *id);
        let controls = tokens.iter().filter(|(_, t)| is_control(t.special, &t.content));
        let controls: Vec<_> = controls.map(|(id, t)| (*id, t.content.clone())).collect();
        let mut unigram = None;
        let (unknown, spells_all, fuses) = match parsed.get_model() {
            ModelWrapper::BPE(model) => {
                let unknown = model.get_unk_token().as_deref().and_then(|t| parsed.token_to_id(t));
                (unknown, shrinks::spells_all(model, decoder), model.fuse_unk)
            }
            ModelWrapper::Unigram(_) if decoder == Decoder::ByteLevel => {
                let (name, supported) = ("ByteLevel of a Unigram model".to_owned(), "ByteLevel of a BPE model");
                return Err(TextError::Unsupported { what: "decoder", name, supported });
            }
            ModelWrapper::Unigram(model) => {
                let is_control = |id| controls.binary_search_by_key(&id, |(control, _)| *control).is_ok();
                let (ours, theirs) = Unigram::new(model, head.model.unk_id, is_control).map_err(|e| broken(&e))?;
                let spells_all = ours.spells_all();
                unigram = Some((ours, theirs));
                (head.model.unk_id, spells_all, true)
            }
            other => {
                let name = format!("{other:?}").chars().take_while(|c| c.is_alphanumeric()).collect();
                return Err(TextError::Unsupported { what: "model", name, supported: "BPE, Unigram" });
            }
        };
        let loses = !spells_all && (fuses || unknown.is_none())
            || !shrinks::passes_all(&head.pre_tokenizer)
            || tokens.iter().any(|(_, t)| t.lstrip || t.rstrip);
        let shrinks = if loses { None } else { shrinks::most(&head.normalizer, decoder) };
        let vocab = Arc::new(Vocab::new(&parsed, Controls::new(controls)?, unknown, decoder)?);
        let byte_level = match (parsed.get_model(), head.model.merges) {
            (ModelWrapper::BPE(model), Some(merges)) => {
                let (normalizer, pre_tokenizer) = (&head.normalizer, &head.pre_tokenizer);
                ByteLevel::new(Pipeline { normalizer, pre_tokenizer, model, merges, decoder }, vocab.clone())
            }
            (ModelWrapper::BPE(_), None) => Err("its model has no merges".to_owned()),
            _ => Err("its model is Unigram".to_owned()),
        };
        let unigram = unigram.map(|(ours, theirs)| {
            parsed.with_model(theirs);
            ours
        });
        let library = Library { tokenizer: parsed, normalizer, unigram };
        let normalize = |text: &str| {
            let mut text = NormalizedString::from(text);
            library.normalize(&mut text).map_err(|e| broken(&e))?;
            Ok(text.get().to_owned())
        };
        let added = AddedTokens::new(tokens, |id| vocab.is_control(id), normalize)?;
        let bos = match &bundle.bos_token {
            Some(bos) if bundle.add_bos => Some(
                library
                    .token_to_id(bos)
                    .ok_or_else(|| TextError::Broken(format!("its begin token {bos:?} is not in the vocabulary")))?,
            ),
            None if bundle.add_bos => return Err(TextError::Broken("it adds a begin token but names none".to_owned())),
            _ => None,
        };
        // A character without a token is one unknown token.
        let longest = vocab.longest().max(char::MAX.len_utf8());
        let token_bytes_max = shrinks.map(|times| times.saturating_mul(longest));
        Ok(Self(Arc::new(Parts { library, byte_level, added, vocab, bos, token_bytes_max })))
    }

    /// Token ids of a text. Adds no begin token: see [`Self::bos`].
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<TokenId>, TextError> {
        match specials {
            Specials::AsText => self.encode_spans(text, &[]),
            Specials::Parse => self.encode_prompt(&self.parse(text)),
        }
    }

    /// Token ids of a prompt, with control tokens exactly where it marks them. Adds no begin token: templates contain
    /// their own.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<TokenId>, TextError> {
        self.encode_spans(prompt.text(), prompt.controls())
    }

    /// A trusted text as a prompt in which every spelling of a control token is one.
    pub fn parse(&self, text: &str) -> Prompt {
        let mut prompt = Prompt::default();
        let mut at = 0;
        for (range, index) in self.controls().find(text) {
            let (id, spelling) = &self.controls().tokens()[index];
            prompt.push_text(&text[at..range.start]);
            prompt.push_control(*id, spelling);
            at = range.end;
        }
        prompt.push_text(&text[at..]);
        prompt
    }

    fn encode_spans(&self, text: &str, controls: &[ControlSpan]) -> Result<Vec<TokenId>, TextError> {
        let Parts { library, byte_level, added, vocab, .. } = &*self.0;
        let ids = match byte_level {
            Ok(byte_level) => byte_level.encode(added, text, controls),
            Err(_) => library.encode(added, vocab, text, controls),
        };
        ids.map_err(|e| TextError::Encode(e.to_string()))
    }

    /// Why this model's text is encoded by the tokenizers crate, with about ten times the time and memory, as decided
    /// at load; `None` if it uses the fast path.
    pub fn slow_because(&self) -> Option<&str> {
        self.0.byte_level.as_ref().err().map(String::as_str)
    }

    /// Bytes of memory that a byte of text takes while it is tokenized (docs/decisions/0048): the most on the fast path, and
    /// of a unigram model, which keeps its state for each place of a word.
    pub fn memory_per_byte(&self) -> u64 {
        match (&self.0.byte_level, &self.0.library.unigram) {
            (Ok(_), _) => 40,
            (Err(_), None) => 120,
            (Err(_), Some(_)) => 240,
        }
    }

    /// The token that a plain prompt (not a chat) starts with, if the model needs one.
    pub fn bos(&self) -> Option<TokenId> {
        self.0.bos
    }

    /// Number of ids: one more than the highest. A model's logits may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab.size()
    }

    /// Upper bound of the bytes of text per token; `None` if there is none: a normalizer or a pre-tokenizer may drop text,
    /// a token absorbs adjacent spaces, or characters have no token.
    pub fn token_bytes_max(&self) -> Option<usize> {
        self.0.token_bytes_max
    }

    /// Control tokens and their spellings, by id.
    pub fn control_tokens(&self) -> &[(TokenId, String)] {
        self.controls().tokens()
    }

    /// Whether a token is omitted from shown text.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.0.vocab.is_special(token)
    }

    /// Id of a token by its spelling in the vocabulary (byte-level alphabet, or control token).
    pub fn token_id(&self, token: &str) -> Option<TokenId> {
        self.0.library.token_to_id(token)
    }

    /// Bytes of a token; none for ids outside the vocabulary. A token may contain a part of a character.
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.0.vocab.bytes(token)
    }

    /// A token as text to be shown alone: broken characters become U+FFFD, ids outside the vocabulary nothing.
    pub fn token_text(&self, token: TokenId) -> String {
        String::from_utf8_lossy(self.token_bytes(token).unwrap_or_default()).into_owned()
    }

    /// Text of all tokens at once, as [`Detokenizer`] returns it piece by piece.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special);
        let mut text: String = tokens.iter().filter_map(|&t| detokenizer.push(t)).collect();
        text.extend(detokenizer.finish());
        text
    }

    /// A detokenizer for one answer. `skip_special` leaves special tokens out of the text.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self.0.vocab.clone(), skip_special)
    }

    pub(crate) fn controls(&self) -> &Controls {
        &self.0.vocab.controls
    }
}

/// The crate's tokenizer; it does not know [`SentencePiece`], which is left out of it.
fn parsed(json: &str, without_normalizer: bool) -> tokenizers::Result<Parsed> {
    if !without_normalizer {
        return json.parse();
    }
    let mut json: Value = serde_json::from_str(json)?;
    json["normalizer"] = Value::Null;
    json.to_string().parse()
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
