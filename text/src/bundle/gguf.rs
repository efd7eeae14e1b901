//! A bundle from the tokenizer metadata of a GGUF file.

use baton_types::{GgufTokenizer, TextBundle, TokenId};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

use super::pre_tokenizer;
use crate::TextError;
use crate::tokenizer::control::is_control;

/// Token types of GGUF (`tokenizer.ggml.token_type`).
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Makes a bundle of a byte-level BPE tokenizer (GGUF's model `gpt2`). Refuses, by name, everything that it cannot
/// convert exactly.
pub fn from_gguf(gguf: &GgufTokenizer) -> Result<TextBundle, TextError> {
    if gguf.model != "gpt2" {
        return Err(TextError::Unsupported {
            what: "model",
            name: gguf.model.clone(),
            supported: "gpt2 (byte-level BPE)",
        });
    }
    let pre = pre_tokenizer::named(&gguf.pre)?;
    let added = added_tokens(gguf)?;
    let mut vocab = Map::with_capacity(gguf.tokens.len());
    for (id, token) in gguf.tokens.iter().enumerate() {
        if vocab.insert(token.clone(), id.into()).is_some() {
            return Err(TextError::Broken(format!("token {token:?} occurs twice, the second time as {id}")));
        }
    }
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.pre_tokenizer,
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": merges(gguf)?,
        },
    });
    let text_of = |id: Option<TokenId>, what: &str| match id {
        None => Ok(None),
        Some(id) => match gguf.tokens.get(id as usize) {
            Some(token) => Ok(Some(token.clone())),
            None => Err(TextError::Broken(format!(
                "the {what} token {id} is outside the vocabulary of {}",
                gguf.tokens.len()
            ))),
        },
    };
    let bos_token = text_of(gguf.bos, "begin")?;
    Ok(TextBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: gguf.chat_template.clone(),
        add_bos: gguf.add_bos.unwrap_or(pre.add_bos) && bos_token.is_some(),
        bos_token,
        eos_token: text_of(gguf.eos, "end")?,
    })
}

fn added_tokens(gguf: &GgufTokenizer) -> Result<Vec<Value>, TextError> {
    let (tokens, types) = (gguf.tokens.len(), gguf.token_types.len());
    if tokens != types {
        return Err(TextError::Broken(format!("{tokens} tokens, but {types} token types")));
    }
    // Some files mark every token as normal. A token that is spelled as a control token and that no merge produces must
    // be one.
    let results = gguf.merges.iter().filter_map(|m| m.split_once(' ')).map(|(left, right)| [left, right].concat());
    let merged: HashSet<String> = results.filter(|result| is_control(false, result)).collect();
    let special = |token: &str, kind: i32| {
        kind == CONTROL || kind == NORMAL && is_control(false, token) && !merged.contains(token)
    };
    let mut added = Vec::new();
    for (id, (token, kind)) in gguf.tokens.iter().zip(&gguf.token_types).enumerate() {
        let special = special(token, *kind);
        if special || *kind == USER_DEFINED {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special,
            }));
        }
    }
    Ok(added)
}

fn merges(gguf: &GgufTokenizer) -> Result<Vec<Value>, TextError> {
    let pair = |merge: &String| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok(json!([left, right]))
        }
        _ => Err(TextError::Broken(format!("merge {merge:?} is not two tokens with a space between"))),
    };
    gguf.merges.iter().map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_spelled_as_control_tokens_are_told_from_merged_ones() {
        let count = 1000;
        let spelled = |of: usize| format!("<|{of}|>");
        let gguf = GgufTokenizer {
            model: "gpt2".into(),
            pre: "smollm".into(),
            tokens: (0..2 * count).map(spelled).collect(),
            token_types: vec![NORMAL; 2 * count],
            scores: Vec::new(),
            // All but the last produce a token of the second half.
            merges: (count..2 * count - 1).map(|of| format!("<| {of}|>")).collect(),
            bos: None,
            eos: None,
            add_bos: None,
            chat_template: None,
        };
        let added = added_tokens(&gguf).unwrap();
        let ids: Vec<_> = added.iter().map(|token| token["id"].as_u64().unwrap() as usize).collect();
        assert_eq!(ids, (0..count).chain([2 * count - 1]).collect::<Vec<_>>());
    }
}
