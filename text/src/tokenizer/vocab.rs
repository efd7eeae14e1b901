//! The vocabulary as bytes: the text of each token.

use baton_types::TokenId;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use tokenizers::Tokenizer as Inner;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};

use super::bytes;
use super::control::Controls;
use super::normalizer::SPACE;
use crate::TextError;

/// Bytes and flags of every token, by id.
pub(crate) struct Vocab {
    bytes: Vec<u8>,
    /// `bytes[ends[id - 1]..ends[id]]` is token `id`.
    ends: Vec<u32>,
    special: Vec<bool>,
    control: Vec<bool>,
    /// The model's token for unknown characters; never produced from a spelling.
    unknown: Option<TokenId>,
    pub(crate) controls: Controls,
    /// What decoding drops in front.
    pub(crate) leading: Leading,
    /// The tokens that spell a space as such and lose `▁` where they are first, as they are there.
    first: HashMap<TokenId, Vec<u8>>,
}

impl Vocab {
    pub(crate) fn new(
        inner: &Inner,
        controls: Controls,
        unknown: Option<TokenId>,
        decoder: Decoder,
    ) -> Result<Self, TextError> {
        let added = inner.get_added_vocabulary().get_added_tokens_decoder();
        let last = inner.get_vocab(true).into_values().max().unwrap_or(0);
        let size = last.checked_add(1).ok_or_else(|| TextError::Broken(format!("a token has id {last}")))?;
        let (mut flat, mut ends) = (Vec::new(), Vec::with_capacity(size as usize));
        let (leading, mut first) = (decoder.leading(), HashMap::new());
        for id in 0..size {
            if let Some(text) = inner.id_to_token(id) {
                flat.extend(decoder.bytes(&text));
                if leading == Leading::FirstToken && text.contains(' ') {
                    first.insert(id, text.replace(SPACE, "").into_bytes());
                }
            }
            ends.push(u32::try_from(flat.len()).map_err(|_| TextError::Broken("its tokens exceed 4 GiB".to_owned()))?);
        }
        let mut control = vec![false; size as usize];
        controls.tokens().iter().for_each(|(id, _)| control[*id as usize] = true);
        let special = (0..size).map(|id| control[id as usize] || added.get(&id).is_some_and(|t| t.special)).collect();
        Ok(Self { bytes: flat, ends, special, control, unknown, controls, leading, first })
    }

    pub(crate) fn size(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)? as usize;
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        Some(&self.bytes[start..end])
    }

    /// Bytes of a token that is the first of a text, where that token loses its spaces ([`Leading::FirstToken`]).
    pub(crate) fn bytes_if_first(&self, id: TokenId) -> Option<Vec<u8>> {
        let spaceless = || Some(self.bytes(id)?.iter().copied().filter(|&byte| byte != b' ').collect());
        self.first.get(&id).cloned().or_else(spaceless)
    }

    /// Bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        (0..self.size() as TokenId).filter_map(|id| self.bytes(id)).map(<[u8]>::len).max().unwrap_or(0)
    }

    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    pub(crate) fn is_control(&self, id: TokenId) -> bool {
        self.control.get(id as usize).copied().unwrap_or(false)
    }

    /// Whether a token must not be produced from the characters of a text.
    pub(crate) fn is_forbidden(&self, id: TokenId) -> bool {
        self.is_control(id) && Some(id) != self.unknown
    }
}

/// What decoding drops at the start of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leading {
    /// At most so many spaces, whichever tokens they are in.
    Spaces(usize),
    /// Each `▁` of the first token, even in its middle.
    FirstToken,
}

/// How tokens become bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decoder {
    ByteLevel,
    SentencePiece {
        /// Most spaces at the start of a text that are dropped.
        leading_spaces: usize,
    },
    /// Without tokens of bytes.
    Metaspace {
        /// Whether the first token loses its spaces.
        first: bool,
    },
}

impl Decoder {
    /// Reads the `decoder` of a `tokenizer.json`.
    pub(crate) fn from_json(json: &Value) -> Result<Self, TextError> {
        let kind = |v: &Value| v["type"].as_str().unwrap_or("none").to_owned();
        let steps = match json["decoders"].as_array() {
            Some(steps) if kind(json) == "Sequence" => steps.clone(),
            _ => vec![json.clone()],
        };
        let space = |v: &Value| v["pattern"]["String"] == "▁" && v["content"] == " ";
        let stripped = |v: &Value| {
            let start = v["start"].as_u64().filter(|_| v["content"] == " " && v["stop"] == 0)?;
            usize::try_from(start).ok()
        };
        let kinds: Vec<String> = steps.iter().map(kind).collect();
        match kinds.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["ByteLevel"] => return Ok(Self::ByteLevel),
            ["Replace", "ByteFallback", "Fuse"] if space(&steps[0]) => {
                return Ok(Self::SentencePiece { leading_spaces: 0 });
            }
            ["Replace", "ByteFallback", "Fuse", "Strip"] if space(&steps[0]) => {
                if let Some(leading_spaces) = stripped(&steps[3]) {
                    return Ok(Self::SentencePiece { leading_spaces });
                }
            }
            ["Metaspace"] => {
                let read =
                    Metaspace::deserialize(&steps[0]).map_err(|e| TextError::Broken(format!("its decoder: {e}")))?;
                if read.get_replacement() == SPACE {
                    return Ok(Self::Metaspace { first: read.get_prepend_scheme() != PrependScheme::Never });
                }
            }
            _ => {}
        }
        Err(TextError::Unsupported {
            what: "decoder",
            name: kinds.join(" + "),
            supported: "ByteLevel; Replace(▁) + ByteFallback + Fuse, with Strip at the start or without; Metaspace(▁)",
        })
    }

    fn leading(self) -> Leading {
        match self {
            Self::Metaspace { first: true } => Leading::FirstToken,
            Self::SentencePiece { leading_spaces } => Leading::Spaces(leading_spaces),
            Self::ByteLevel | Self::Metaspace { first: false } => Leading::Spaces(0),
        }
    }

    fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => bytes::decode(token),
            Self::SentencePiece { .. } => byte_of(token).map_or_else(|| spaced(token), |byte| vec![byte]),
            Self::Metaspace { .. } => spaced(token),
        }
    }
}

fn spaced(token: &str) -> Vec<u8> {
    token.replace(SPACE, " ").into_bytes()
}

/// The byte that a token stands for in vocabularies of SentencePiece.
pub(crate) fn byte_of(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|hex| hex.len() == 2)?;
    u8::from_str_radix(hex, 16).ok()
}
