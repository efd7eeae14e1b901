//! The vocabulary as bytes: the text of each token.

use baton_types::TokenId;
use serde_json::Value;
use tokenizers::Tokenizer as Inner;

use super::bytes;
use super::control::Controls;
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
    /// Whether decoding drops one leading space, as SentencePiece does.
    pub(crate) drops_leading_space: bool,
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
        for id in 0..size {
            if let Some(text) = inner.id_to_token(id) {
                flat.extend(decoder.bytes(&text));
            }
            ends.push(u32::try_from(flat.len()).map_err(|_| TextError::Broken("its tokens exceed 4 GiB".to_owned()))?);
        }
        let mut control = vec![false; size as usize];
        controls.tokens().iter().for_each(|(id, _)| control[*id as usize] = true);
        let special = (0..size).map(|id| control[id as usize] || added.get(&id).is_some_and(|t| t.special)).collect();
        let drops_leading_space = decoder == Decoder::SentencePiece { drops_leading_space: true };
        Ok(Self { bytes: flat, ends, special, control, unknown, controls, drops_leading_space })
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

/// How tokens become bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decoder {
    ByteLevel,
    SentencePiece { drops_leading_space: bool },
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
        let strip = |v: &Value| v["content"] == " " && v["start"] == 1 && v["stop"] == 0;
        let kinds: Vec<String> = steps.iter().map(kind).collect();
        match kinds.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["ByteLevel"] => Ok(Self::ByteLevel),
            ["Replace", "ByteFallback", "Fuse"] if space(&steps[0]) => {
                Ok(Self::SentencePiece { drops_leading_space: false })
            }
            ["Replace", "ByteFallback", "Fuse", "Strip"] if space(&steps[0]) && strip(&steps[3]) => {
                Ok(Self::SentencePiece { drops_leading_space: true })
            }
            _ => Err(TextError::Unsupported {
                what: "decoder",
                name: kinds.join(" + "),
                supported: "ByteLevel; Replace(▁) + ByteFallback + Fuse, with Strip or without",
            }),
        }
    }

    fn bytes(self, token: &str) -> Vec<u8> {
        if self == Self::ByteLevel {
            return bytes::decode(token);
        }
        let byte = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|hex| hex.len() == 2);
        match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => vec![byte],
            None => token.replace('▁', " ").into_bytes(),
        }
    }
}
