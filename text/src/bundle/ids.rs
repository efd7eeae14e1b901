//! Checks a tokenizer before it is built: that its added tokens are few and short, and that the model has an embedding row
//! for every id.

use baton_types::TextBundle;
use serde::Deserialize;
use serde_json::Value;

use crate::TextError;

/// The fields of a `tokenizer.json` that contain ids.
#[derive(Deserialize)]
struct Ids {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u64,
    content: String,
}

#[derive(Default, Deserialize)]
struct Model {
    /// An object of ids by token, or in unigram models a list by id.
    #[serde(default)]
    vocab: Value,
}

/// Most ids of any vocabulary: the largest dimension of a decoder. The bound for a bundle of another process.
pub const VOCAB_MAX: usize = 1 << 21;

/// Most added tokens: loading takes time with the square of their number, and each may be compared with each literal of
/// the chat template. Llama 3 has 256, Gemma 3 has 6,242, models of speech up to 28,684.
pub const ADDED_TOKENS_MAX: usize = 1 << 15;
/// Longest spelling of an added token, in bytes; those of known models stay under 100.
pub const ADDED_BYTES_MAX: usize = 1 << 10;
/// Most bytes of all of them together. What finds them in a text takes some 50 bytes of memory for each.
pub const ADDED_BYTES_SUM_MAX: usize = 1 << 20;

/// Refuses a bundle whose tokenizer has an id of `vocab` or more, the number of rows of the model's embedding, or more or
/// longer added tokens than the limits above. Call it before [`crate::Tokenizer::from_bundle`], which allocates memory for
/// all ids up to the highest.
pub fn check_ids(bundle: &TextBundle, vocab: usize) -> Result<(), TextError> {
    let ids: Ids = serde_json::from_str(&bundle.tokenizer_json).map_err(|e| TextError::Broken(e.to_string()))?;
    check_added(&ids.added_tokens)?;
    let added = ids.added_tokens.iter().map(|token| (&token.content, Some(token.id)));
    let plain = ids.model.vocab.as_object().into_iter().flatten().map(|(token, id)| (token, id.as_u64()));
    let listed = ids.model.vocab.as_array().map_or(0, Vec::len);
    if listed > vocab {
        return Err(TextError::Broken(format!("it has {listed} tokens, but the model's vocabulary has {vocab} ids")));
    }
    for (token, id) in added.chain(plain) {
        if id.is_none_or(|id| id >= vocab as u64) {
            let id = id.map_or_else(|| "no id".to_owned(), |id| format!("id {id}"));
            return Err(TextError::Broken(format!(
                "token {token:?} has {id}, but the model's vocabulary has {vocab} ids"
            )));
        }
    }
    Ok(())
}

fn check_added(tokens: &[Added]) -> Result<(), TextError> {
    let lengths = || tokens.iter().map(|token| token.content.len());
    for (what, is, max) in [
        ("added tokens", tokens.len(), ADDED_TOKENS_MAX),
        ("bytes in its longest added token", lengths().max().unwrap_or(0), ADDED_BYTES_MAX),
        ("bytes in its added tokens", lengths().sum(), ADDED_BYTES_SUM_MAX),
    ] {
        if is > max {
            return Err(TextError::Broken(format!("it has {is} {what}, over the limit of {max}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn added_tokens_are_few_and_short() {
        let check = |count: usize, bytes: usize| {
            let added: Vec<_> = (0..count).map(|id| json!({"id": id, "content": format!("{id:0>bytes$}")})).collect();
            let bundle = TextBundle {
                tokenizer_json: json!({ "added_tokens": added }).to_string(),
                chat_template: None,
                bos_token: None,
                eos_token: None,
                add_bos: false,
            };
            check_ids(&bundle, VOCAB_MAX).map_err(|error| error.to_string())
        };
        assert_eq!(check(ADDED_TOKENS_MAX, 20), Ok(()));
        assert_eq!(check(1_024, 1_024), Ok(()));
        for (count, bytes, what) in [
            (ADDED_TOKENS_MAX + 1, 5, "32769 added tokens, over the limit of 32768"),
            (1, 1_025, "1025 bytes in its longest added token"),
            (1_025, 1_024, "1049600 bytes in its added tokens"),
        ] {
            let told = check(count, bytes).unwrap_err();
            assert!(told.contains(what), "{told}");
        }
    }

    #[test]
    fn ids_end_with_the_embedding() {
        let cases = [
            (json!({"model": {"vocab": {"a": 0, "b": 9}}}), true),
            (json!({"model": {"vocab": {"a": 0, "b": 10}}}), false),
            (json!({"model": {"vocab": {"a": 0, "b": u64::MAX}}}), false),
            (json!({"model": {"vocab": {"a": -1}}}), false),
            (json!({"added_tokens": [{"id": 10, "content": "<s>"}], "model": {"vocab": {}}}), false),
            (json!({"model": {"type": "Unigram", "vocab": vec![("a", 0.5); 10]}}), true),
            (json!({"model": {"type": "Unigram", "vocab": vec![("a", 0.5); 11]}}), false),
            (json!({}), true),
        ];
        for (tokenizer, fits) in cases {
            let bundle = TextBundle {
                tokenizer_json: tokenizer.to_string(),
                chat_template: None,
                bos_token: None,
                eos_token: None,
                add_bos: false,
            };
            assert_eq!(check_ids(&bundle, 10).is_ok(), fits, "{tokenizer}");
        }
    }
}
