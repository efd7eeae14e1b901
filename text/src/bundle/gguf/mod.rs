//! A bundle from the tokenizer metadata of a GGUF file.

mod byte_level;
mod pre_tokenizer;
mod sentencepiece;
mod unigram;

use baton_types::{GgufTokenizer, TextBundle, TokenId};
use serde_json::{Value, json};
use std::collections::HashSet;

use crate::TextError;

/// Token types of GGUF (`tokenizer.ggml.token_type`).
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// What differs by the kind of tokenizer.
struct Parts {
    added_tokens: Vec<Value>,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Value,
    /// Whether the begin token is added if the file does not say.
    add_bos: bool,
}

/// A model of type `BPE`, besides its vocabulary.
struct Bpe {
    merges: Vec<Value>,
    unknown: Option<String>,
    /// Whether unknown characters become tokens of their bytes, and several unknown ones a single token.
    falls_back_to_bytes: bool,
    /// Whether a word that is a token is used whole, without applying merges.
    ignore_merges: bool,
}

impl Bpe {
    fn json(self, tokens: &[String]) -> Value {
        let vocab: Value = tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
        json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": self.unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": self.falls_back_to_bytes,
            "byte_fallback": self.falls_back_to_bytes,
            "ignore_merges": self.ignore_merges,
            "vocab": vocab,
            "merges": self.merges,
        })
    }
}

/// Makes a bundle of a byte-level BPE tokenizer (GGUF's model `gpt2`), or of a BPE or a unigram tokenizer of SentencePiece
/// (`llama`, `t5`). Refuses, by name, everything that it cannot convert exactly.
pub fn from_gguf(gguf: &GgufTokenizer) -> Result<TextBundle, TextError> {
    let (tokens, types) = (gguf.tokens.len(), gguf.token_types.len());
    let parts = match gguf.model.as_str() {
        "gpt2" | "llama" | "t5" if tokens != types => {
            return Err(TextError::Broken(format!("{tokens} tokens, but {types} token types")));
        }
        "gpt2" => byte_level::parts(gguf)?,
        "llama" => sentencepiece::parts(gguf)?,
        "t5" => unigram::parts(gguf)?,
        _ => {
            return Err(TextError::Unsupported {
                what: "model",
                name: gguf.model.clone(),
                supported: "gpt2 (byte-level BPE), llama (BPE of SentencePiece), t5 (unigrams of SentencePiece)",
            });
        }
    };
    let mut seen = HashSet::with_capacity(tokens);
    if let Some(id) = gguf.tokens.iter().position(|token| !seen.insert(token)) {
        let token = &gguf.tokens[id];
        return Err(TextError::Broken(format!("token {token:?} occurs twice, the second time as {id}")));
    }
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": parts.added_tokens,
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": null,
        "decoder": parts.decoder,
        "model": parts.model,
    });
    let bos_token = text_of(gguf, gguf.bos, "begin")?;
    Ok(TextBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: gguf.chat_template.clone(),
        add_bos: gguf.add_bos.unwrap_or(parts.add_bos) && bos_token.is_some(),
        bos_token,
        eos_token: text_of(gguf, gguf.eos, "end")?,
    })
}

fn text_of(gguf: &GgufTokenizer, id: Option<TokenId>, what: &str) -> Result<Option<String>, TextError> {
    let Some(id) = id else { return Ok(None) };
    let token = gguf.tokens.get(id as usize).cloned().map(Some);
    let size = gguf.tokens.len();
    token.ok_or_else(|| TextError::Broken(format!("the {what} token {id} is outside the vocabulary of {size}")))
}

/// A token that is found in a text before anything else is done with it.
fn added_token(id: usize, content: &str, special: bool, normalized: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": normalized,
        "special": special,
    })
}
