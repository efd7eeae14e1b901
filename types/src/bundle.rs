//! What a router needs to serve a model's text: tokenizer, chat template and end tokens. Workers own it; routers get it by digest.

use crate::TokenId;
use serde::{Deserialize, Serialize};

/// The tokenizer + template bundle of a model. Its canonical bytes are its JSON; its digest is BLAKE3 over those.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextBundle {
    /// A Hugging Face `tokenizer.json`, as text. Of GGUF files with a unigram model its normalizer is our own, `SentencePiece`.
    pub tokenizer_json: String,
    /// Jinja chat template, if the model has one.
    pub chat_template: Option<String>,
    /// Text of the begin token, as templates use it.
    pub bos_token: Option<String>,
    /// Text of the end token, as templates use it.
    pub eos_token: Option<String>,
    /// Whether plain prompts start with the begin token. For chats the template decides.
    pub add_bos: bool,
}

/// The tokenizer metadata of a GGUF file, as read; `text` turns it into a [`TextBundle`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`, e.g. `gpt2` for byte-level BPE, `llama` for BPE of SentencePiece, `t5` for its unigrams.
    pub model: String,
    /// `tokenizer.ggml.pre`, e.g. `smollm`, `llama-bpe`.
    pub pre: String,
    /// Text of each token, by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type` by id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`, if the model has them.
    pub scores: Vec<f32>,
    /// BPE merges, `left right`.
    pub merges: Vec<String>,
    /// Id of the token that begins a text.
    pub bos: Option<TokenId>,
    /// Id of the token that ends a text.
    pub eos: Option<TokenId>,
    /// `tokenizer.ggml.add_bos_token`: whether a text gets the begin token.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`: whether a text gets a space in front (SentencePiece).
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`: whether a text loses spaces at its ends, and all but one of a row (SentencePiece).
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`: SentencePiece's rules of normalization in its own format; empty if there are none.
    pub precompiled_charsmap: Vec<u8>,
    /// `tokenizer.chat_template`, the source in Jinja.
    pub chat_template: Option<String>,
}

/// The model's recommended sampling defaults, with the fields of [`crate::SamplingParams`]; each `None` leaves the server's default.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub repetition_penalty: Option<f32>,
}
