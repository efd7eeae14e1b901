//! A bundle from the tokenizer metadata of a GGUF file.

mod byte_level;
mod pre_tokenizer;
mod sentencepiece;

use baton_types::{GgufTokenizer, TextBundle, TokenId};
use serde_json::{Map, Value, json};

use crate::TextError;

/// Token types of GGUF (`tokenizer.ggml.token_type`).
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// What differs by the kind of tokenizer.
struct Parts {
    added_tokens: Vec<Value>,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    merges: Vec<Value>,
    unknown: Option<String>,
    /// Whether unknown characters become tokens of their bytes, and several unknown ones a single token.
    falls_back_to_bytes: bool,
    /// Whether a word that is a token is used whole, without applying merges.
    ignore_merges: bool,
    /// Whether the begin token is added if the file does not say.
    add_bos: bool,
}

/// Makes a bundle of a byte-level BPE tokenizer (GGUF's model `gpt2`) or a BPE tokenizer of SentencePiece (`llama`).
/// Refuses, by name, everything that it cannot convert exactly.
pub fn from_gguf(gguf: &GgufTokenizer) -> Result<TextBundle, TextError> {
    let (tokens, types) = (gguf.tokens.len(), gguf.token_types.len());
    let parts = match gguf.model.as_str() {
        "gpt2" | "llama" if tokens != types => {
            return Err(TextError::Broken(format!("{tokens} tokens, but {types} token types")));
        }
        "gpt2" => byte_level::parts(gguf)?,
        "llama" => sentencepiece::parts(gguf)?,
        _ => {
            return Err(TextError::Unsupported {
                what: "model",
                name: gguf.model.clone(),
                supported: "gpt2 (byte-level BPE), llama (BPE of SentencePiece)",
            });
        }
    };
    let mut vocab = Map::with_capacity(tokens);
    for (id, token) in gguf.tokens.iter().enumerate() {
        if vocab.insert(token.clone(), id.into()).is_some() {
            return Err(TextError::Broken(format!("token {token:?} occurs twice, the second time as {id}")));
        }
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
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": parts.unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": parts.falls_back_to_bytes,
            "byte_fallback": parts.falls_back_to_bytes,
            "ignore_merges": parts.ignore_merges,
            "vocab": vocab,
            "merges": parts.merges,
        },
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
