//! Tokenizer metadata and end tokens.

use super::config::GgufConfig;
use super::value::{Array, Value};
use crate::formats::WeightsError;
use baton_types::{GgufTokenizer, TokenId};

/// `tokenizer.ggml.token_type` of tokens that are not text.
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// `tokenizer.ggml.model` of unigram models.
const UNIGRAM: &str = "t5";

/// Keys of end tokens: of the text, of a turn, of a message.
const END_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Control tokens that end a turn or text in the model families that share the `llama` architecture. Most files name only one of theirs by
/// key, and a model continues past any that is not known to end its output (llama.cpp has such a list for the same reason).
const END_TEXTS: &[&str] =
    &["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"];

/// The file's tokenizer; `None` if it has none, so that only token ids can be served.
pub(super) fn tokenizer(config: &GgufConfig<'_, '_>, vocab: usize) -> Result<Option<GgufTokenizer>, WeightsError> {
    let Some(model) = text(config, "tokenizer.ggml.model")? else {
        return Ok(None);
    };
    let tokens = list(config, "tokenizer.ggml.tokens", Array::strings)?;
    if tokens.len() != vocab {
        let message = format!("tokenizer.ggml.tokens has {} entries, the embedding {vocab} rows", tokens.len());
        return Err(config.damaged(message));
    }
    let token_types = list(config, "tokenizer.ggml.token_type", Array::i32s)?;
    let scores = list(config, "tokenizer.ggml.scores", Array::f32s)?;
    for (key, length) in [("token_type", token_types.len()), ("scores", scores.len())] {
        if length != 0 && length != vocab {
            return Err(config.damaged(format!("tokenizer.ggml.{key} has {length} entries for {vocab} tokens")));
        }
    }
    const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
    let add_eos = flag(config, ADD_EOS)?;
    // llama.cpp adds an end token to texts of a unigram model unless the file says otherwise.
    if add_eos.unwrap_or(model == UNIGRAM) {
        let what = if add_eos.is_none() { format!("no {ADD_EOS}") } else { format!("{ADD_EOS} = true") };
        return Err(config.unsupported(what, "a prompt does not end with an end token"));
    }
    Ok(Some(GgufTokenizer {
        model,
        pre: text(config, "tokenizer.ggml.pre")?.unwrap_or_default(),
        tokens,
        token_types,
        scores,
        merges: list(config, "tokenizer.ggml.merges", Array::strings)?,
        bos: token(config, "tokenizer.ggml.bos_token_id", vocab)?,
        eos: token(config, "tokenizer.ggml.eos_token_id", vocab)?,
        add_bos: flag(config, "tokenizer.ggml.add_bos_token")?,
        add_space_prefix: flag(config, "tokenizer.ggml.add_space_prefix")?,
        remove_extra_whitespaces: flag(config, "tokenizer.ggml.remove_extra_whitespaces")?,
        precompiled_charsmap: list(config, "tokenizer.ggml.precompiled_charsmap", Array::bytes)?,
        chat_template: text(config, "tokenizer.chat_template")?,
    }))
}

/// All end tokens, ascending: those named by key, and control tokens whose text is known to end a turn.
pub(super) fn end_tokens(
    config: &GgufConfig<'_, '_>,
    tokenizer: Option<&GgufTokenizer>,
    vocab: usize,
) -> Result<Vec<TokenId>, WeightsError> {
    let mut ends = Vec::new();
    for key in END_KEYS {
        ends.extend(token(config, key, vocab)?);
    }
    if let Some(tokenizer) = tokenizer {
        let kinds = tokenizer.tokens.iter().zip(&tokenizer.token_types).zip(0..);
        ends.extend(kinds.filter_map(|((text, kind), id)| {
            ([CONTROL, USER_DEFINED].contains(kind) && END_TEXTS.contains(&text.as_str())).then_some(id)
        }));
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

fn text(config: &GgufConfig<'_, '_>, key: &str) -> Result<Option<String>, WeightsError> {
    match config.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.to_owned())),
        Some(_) => Err(config.damaged(format!("{key} is not a string"))),
    }
}

fn flag(config: &GgufConfig<'_, '_>, key: &str) -> Result<Option<bool>, WeightsError> {
    match config.get(key) {
        None => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(flag)),
        Some(_) => Err(config.damaged(format!("{key} is no boolean"))),
    }
}

fn list<'a, T>(
    config: &GgufConfig<'_, 'a>,
    key: &str,
    read: fn(Array<'a>) -> Option<Vec<T>>,
) -> Result<Vec<T>, WeightsError> {
    match config.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(array)) => {
            read(array).ok_or_else(|| config.damaged(format!("{key} has elements of the wrong type")))
        }
        Some(_) => Err(config.damaged(format!("{key} is not an array"))),
    }
}

fn token(config: &GgufConfig<'_, '_>, key: &str, vocab: usize) -> Result<Option<TokenId>, WeightsError> {
    let Some(value) = config.get(key) else { return Ok(None) };
    // -1 and its unsigned form mean "none" in some converters' files.
    if value == Value::Signed(-1) || value == Value::Unsigned(u64::from(u32::MAX)) {
        return Ok(None);
    }
    let id = value.as_unsigned().filter(|&id| id < vocab as u64);
    id.map(|id| Some(id as TokenId)).ok_or_else(|| config.damaged(format!("{key} is not a token of the vocabulary")))
}
