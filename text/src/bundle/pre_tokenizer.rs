//! The pre-tokenizers that GGUF files name, as parts of a `tokenizer.json`. A name is listed only if the model's own
//! `tokenizer.json` is known to have the same split: a nearly right split gives plausible but wrong tokens.

use serde_json::{Value, json};

use crate::TextError;

/// The settings that a name means.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    /// Whether a word that is a token is used whole, without applying merges.
    pub(super) ignore_merges: bool,
    /// Whether the begin token is added if the file does not say.
    pub(super) add_bos: bool,
}

/// The split of Llama 3: words, digits by up to three, punctuation with its line ends, white space.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The split of Qwen 2 and 2.5: as Llama 3, digits one by one.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Finds a pre-tokenizer by the file's `tokenizer.ggml.pre`.
pub(super) fn named(name: &str) -> Result<PreTokenizer, TextError> {
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let sequence = |first: Value, last: Value| json!({"type": "Sequence", "pretokenizers": [first, last]});
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let digits = json!({"type": "Digits", "individual_digits": true});
    let (normalizer, pre_tokenizer, llama3) = match name {
        "gpt-2" | "gpt2" => (Value::Null, byte_level(true), false),
        "smollm" | "starcoder" => (Value::Null, sequence(digits, byte_level(true)), false),
        "llama-bpe" | "llama3" | "llama-v3" => (Value::Null, sequence(split(LLAMA3), byte_level(false)), true),
        "qwen2" => (json!({"type": "NFC"}), sequence(split(QWEN2), byte_level(false)), false),
        _ => {
            return Err(TextError::Unsupported {
                what: "pre-tokenizer",
                name: name.to_owned(),
                supported: "gpt-2, smollm, starcoder, llama-bpe, qwen2",
            });
        }
    };
    Ok(PreTokenizer { normalizer, pre_tokenizer, ignore_merges: llama3, add_bos: llama3 })
}
