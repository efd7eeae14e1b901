//! Byte-level BPE, with the pre-tokenizer that the file names.

use baton_types::GgufTokenizer;
use serde_json::{Value, json};
use std::collections::HashSet;

use super::{Bpe, CONTROL, NORMAL, Parts, USER_DEFINED, added_token, pre_tokenizer};
use crate::TextError;
use crate::tokenizer::control::is_control;

pub(super) fn parts(gguf: &GgufTokenizer) -> Result<Parts, TextError> {
    let pre = pre_tokenizer::named(&gguf.pre)?;
    let model =
        Bpe { merges: merges(gguf)?, unknown: None, falls_back_to_bytes: false, ignore_merges: pre.ignore_merges };
    Ok(Parts {
        added_tokens: added_tokens(gguf),
        normalizer: pre.normalizer,
        pre_tokenizer: pre.pre_tokenizer,
        decoder: json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        model: model.json(&gguf.tokens),
        add_bos: pre.add_bos,
    })
}

fn added_tokens(gguf: &GgufTokenizer) -> Vec<Value> {
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
            added.push(added_token(id, token, special, false));
        }
    }
    added
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
            // All but the last produce a token of the second half.
            merges: (count..2 * count - 1).map(|of| format!("<| {of}|>")).collect(),
            ..GgufTokenizer::default()
        };
        let added = added_tokens(&gguf);
        let ids: Vec<_> = added.iter().map(|token| token["id"].as_u64().unwrap() as usize).collect();
        assert_eq!(ids, (0..count).chain([2 * count - 1]).collect::<Vec<_>>());
    }
}
