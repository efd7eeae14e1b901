//! BPE of SentencePiece: the model `llama` of GGUF files (Llama 2, Mistral, Mixtral, Gemma, Phi-3).
//!
//! SentencePiece joins the two neighbours whose joined piece has the highest score, the leftmost of equal ones. Ranks
//! of merges in order of these scores do the same. Pieces that are not ordinary text have no merges: control tokens,
//! tokens of bytes, and pieces that are found in the text beforehand.

use baton_types::GgufTokenizer;
use serde_json::{Value, json};
use std::collections::HashSet;

use super::{Bpe, CONTROL, NORMAL, Parts, UNKNOWN, USER_DEFINED, added_token};
use crate::TextError;
use crate::tokenizer::control::is_control;
use crate::tokenizer::normalizer::SPACE;

/// Tokens of turns that some files mark as ordinary text: Gemma's trainer did not declare them.
const TURNS: [&str; 2] = ["<start_of_turn>", "<end_of_turn>"];

pub(super) fn parts(gguf: &GgufTokenizer) -> Result<Parts, TextError> {
    check(gguf, true)?;
    // As llama.cpp does, a file that does not say it means a space, and before every part between two added tokens.
    let prefix = gguf.add_space_prefix.unwrap_or(true);
    let space = SPACE.to_string();
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": space});
    let prepend = json!({"type": "Prepend", "prepend": space});
    let unknown = gguf.token_types.iter().position(|&kind| kind == UNKNOWN);
    let model = Bpe {
        merges: merges(gguf),
        unknown: unknown.map(|id| gguf.tokens[id].clone()),
        falls_back_to_bytes: true,
        ignore_merges: false,
    };
    Ok(Parts {
        // SentencePiece looks for its own in normalized text. With a space in front, normalization would give them one.
        added_tokens: added_tokens(gguf, !prefix),
        normalizer: if prefix { json!({"type": "Sequence", "normalizers": [prepend, replace]}) } else { replace },
        pre_tokenizer: Value::Null,
        decoder: decoder(u32::from(prefix)),
        model: model.json(&gguf.tokens),
        add_bos: true,
    })
}

/// Checks that there is a score for each token, and a begin token if it is added. `add_bos` is for files that do not say it.
pub(super) fn check(gguf: &GgufTokenizer, add_bos: bool) -> Result<(), TextError> {
    let (tokens, scores) = (gguf.tokens.len(), gguf.scores.len());
    if tokens != scores {
        return Err(TextError::Broken(format!("{tokens} tokens, but {scores} scores")));
    }
    if let Some(id) = gguf.scores.iter().position(|score| score.is_nan()) {
        return Err(TextError::Broken(format!("the score of token {:?} is not a number", gguf.tokens[id])));
    }
    if gguf.bos.is_none() && gguf.add_bos.unwrap_or(add_bos) {
        return Err(TextError::Broken("it adds a begin token but names none".to_owned()));
    }
    Ok(())
}

/// Drops at most so many spaces in front.
pub(super) fn decoder(leading_spaces: u32) -> Value {
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE.to_string()}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if leading_spaces > 0 {
        decoders.push(json!({"type": "Strip", "content": " ", "start": leading_spaces, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": decoders})
}

/// Whether a token structures prompts. Files may mark such tokens as text.
fn is_special(token: &str, kind: i32) -> bool {
    kind == CONTROL || kind != UNKNOWN && (is_control(false, token) || TURNS.contains(&token))
}

/// Control tokens, and those of the user. `normalized` says whether the latter are looked for in normalized text.
pub(super) fn added_tokens(gguf: &GgufTokenizer, normalized: bool) -> Vec<Value> {
    let mut added = Vec::new();
    for (id, (token, &kind)) in gguf.tokens.iter().zip(&gguf.token_types).enumerate() {
        let special = is_special(token, kind);
        if special || kind == USER_DEFINED {
            added.push(added_token(id, token, special, !special && normalized));
        }
    }
    added
}

/// Every way to join two pieces to one, best piece first.
fn merges(gguf: &GgufTokenizer) -> Vec<Value> {
    let all = gguf.tokens.iter().zip(&gguf.token_types).zip(&gguf.scores);
    let texts: Vec<(&str, f32)> = all
        .filter(|((piece, kind), _)| **kind == NORMAL && !is_special(piece, NORMAL))
        .map(|((piece, _), score)| (piece.as_str(), *score))
        .collect();
    let pieces: HashSet<&str> = texts.iter().map(|(piece, _)| *piece).collect();
    let mut merges: Vec<(f32, &str, &str)> = Vec::new();
    for (piece, score) in texts {
        let splits = piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at));
        merges.extend(splits.filter(|(l, r)| pieces.contains(l) && pieces.contains(r)).map(|(l, r)| (score, l, r)));
    }
    merges.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
    merges.into_iter().map(|(_, left, right)| json!([left, right])).collect()
}
