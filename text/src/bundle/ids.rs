//! Checks that a model has an embedding row for every id of its tokenizer.

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
    /// An object of ids by token, except in models that are not supported.
    #[serde(default)]
    vocab: Value,
}

/// Most ids of any vocabulary: the largest dimension of a decoder. The bound for a bundle of another process.
pub const VOCAB_MAX: usize = 1 << 21;

/// Refuses a bundle whose tokenizer has an id of `vocab` or more, the number of rows of the model's embedding. Call it
/// before [`crate::Tokenizer::from_bundle`], which allocates memory for all ids up to the highest.
pub fn check_ids(bundle: &TextBundle, vocab: usize) -> Result<(), TextError> {
    let ids: Ids = serde_json::from_str(&bundle.tokenizer_json).map_err(|e| TextError::Broken(e.to_string()))?;
    let added = ids.added_tokens.iter().map(|token| (&token.content, Some(token.id)));
    let plain = ids.model.vocab.as_object().into_iter().flatten().map(|(token, id)| (token, id.as_u64()));
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_end_with_the_embedding() {
        let cases = [
            (json!({"model": {"vocab": {"a": 0, "b": 9}}}), true),
            (json!({"model": {"vocab": {"a": 0, "b": 10}}}), false),
            (json!({"model": {"vocab": {"a": 0, "b": u64::MAX}}}), false),
            (json!({"model": {"vocab": {"a": -1}}}), false),
            (json!({"added_tokens": [{"id": 10, "content": "<s>"}], "model": {"vocab": {}}}), false),
            (json!({"model": {"type": "Unigram", "vocab": [["a", 0.5]]}}), true),
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
