//! Unigrams of SentencePiece: the model `t5` of GGUF files.
//!
//! Only pieces of text take part in the division of a text. Other tokens get a score of zero, so that the lowest one, from
//! which that of an unknown character follows, stays that of a piece. Unused tokens lose their spelling; the loader of a
//! bundle takes it from the others ([`crate::Tokenizer`]).

use baton_types::GgufTokenizer;
use serde_json::{Value, json};

use super::sentencepiece::{added_tokens, check, decoder};
use super::{BYTE, NORMAL, Parts, UNKNOWN, UNUSED};
use crate::TextError;
use crate::tokenizer::charsmap::Charsmap;
use crate::tokenizer::normalizer::{SPACE, Spaces, sentencepiece};
use crate::tokenizer::vocab::byte_of;

/// Whether the begin token is added if the file does not say (llama.cpp's default).
const ADD_BOS: bool = false;

pub(super) fn parts(gguf: &GgufTokenizer) -> Result<Parts, TextError> {
    check(gguf, ADD_BOS)?;
    // As llama.cpp does, a file that does not say it means neither.
    let spaces = Spaces {
        add_dummy_prefix: gguf.add_space_prefix.unwrap_or(false),
        remove_extra_whitespaces: gguf.remove_extra_whitespaces.unwrap_or(false),
    };
    check_pieces(gguf, spaces)?;
    Charsmap::try_new(&gguf.precompiled_charsmap)?;
    let leading_spaces = match spaces {
        // Of each piece before the first text, SentencePiece drops one.
        Spaces { remove_extra_whitespaces: true, .. } => u32::MAX,
        Spaces { add_dummy_prefix, .. } => u32::from(add_dummy_prefix),
    };
    Ok(Parts {
        added_tokens: added_tokens(gguf, false),
        normalizer: sentencepiece(&gguf.precompiled_charsmap, spaces),
        pre_tokenizer: Value::Null,
        decoder: decoder(leading_spaces),
        model: json!({
            "type": "Unigram",
            "unk_id": unknown(gguf)?,
            "byte_fallback": falls_back_to_bytes(gguf)?,
            "vocab": vocab(gguf),
        }),
        add_bos: ADD_BOS,
    })
}

fn tokens(gguf: &GgufTokenizer) -> impl Iterator<Item = (&str, i32, f32)> {
    let all = gguf.tokens.iter().zip(&gguf.token_types).zip(&gguf.scores);
    all.map(|((token, kind), score)| (token.as_str(), *kind, *score))
}

fn check_pieces(gguf: &GgufTokenizer, spaces: Spaces) -> Result<(), TextError> {
    for (piece, _, score) in tokens(gguf).filter(|(_, kind, _)| *kind == NORMAL) {
        if score > 0.0 || score.is_infinite() {
            return Err(TextError::Broken(format!("the score of token {piece:?} is {score}, not a log probability")));
        }
        if spaces.remove_extra_whitespaces && piece.strip_prefix(SPACE).is_some_and(|rest| rest.starts_with(SPACE)) {
            return Err(TextError::Unsupported {
                what: "piece",
                name: piece.to_owned(),
                supported: "pieces with one space in front, where remove_extra_whitespaces is true",
            });
        }
    }
    Ok(())
}

/// The token of unknown characters.
fn unknown(gguf: &GgufTokenizer) -> Result<usize, TextError> {
    let mut all = (0..).zip(&gguf.token_types).filter(|(_, kind)| **kind == UNKNOWN);
    match (all.next(), all.count()) {
        (Some((id, _)), 0) => Ok(id),
        (first, more) => {
            let count = usize::from(first.is_some()) + more;
            Err(TextError::Broken(format!("it has {count} unknown tokens, not one")))
        }
    }
}

/// Whether unknown characters become tokens of their bytes: there is one for each byte, or none.
fn falls_back_to_bytes(gguf: &GgufTokenizer) -> Result<bool, TextError> {
    let mut has = [false; 256];
    for (token, ..) in tokens(gguf).filter(|(_, kind, _)| *kind == BYTE) {
        let Some(byte) = byte_of(token) else {
            return Err(TextError::Broken(format!("token {token:?} is of type byte, but spells none")));
        };
        has[usize::from(byte)] = true;
    }
    match has.iter().filter(|&&has| has).count() {
        0 => Ok(false),
        256 => Ok(true),
        count => Err(TextError::Broken(format!("it has tokens for {count} of 256 bytes"))),
    }
}

fn vocab(gguf: &GgufTokenizer) -> Vec<Value> {
    let piece = |(token, kind, score)| match kind {
        NORMAL => json!([token, score]),
        UNUSED => json!(["", 0.0]),
        _ => json!([token, 0.0]),
    };
    tokens(gguf).map(piece).collect()
}
