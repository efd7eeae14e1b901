//! Tokenizer files of a folder to a [`TextBundle`].

use super::json::{CONFIG_BYTES_MAX, Object, TOKENIZER_BYTES_MAX, read_text};
use crate::weights::WeightsError;
use baton_types::{TextBundle, TokenId};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

const TOKENIZER: &str = "tokenizer.json";

/// The parts of `tokenizer.json` that are looked at here; the rest is the tokenizer library's.
#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    post_processor: Value,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
}

/// The bundle, and the id of the end token where it is an added one.
pub(super) struct Text {
    pub(super) bundle: TextBundle,
    pub(super) eos: Option<TokenId>,
}

/// Reads the folder's tokenizer; `None` where it has none, so that only token ids can be served.
pub(super) fn read(folder: &Path) -> Result<Option<Text>, WeightsError> {
    let path = folder.join(TOKENIZER);
    let Some(tokenizer_json) = read_text(&path, TOKENIZER_BYTES_MAX)? else {
        if folder.join("tokenizer.model").exists() {
            let hint = "load it with transformers' AutoTokenizer and save_pretrained it";
            let what = format!("a tokenizer.model without {TOKENIZER}");
            return Err(WeightsError::unsupported(&folder.display().to_string(), what, hint));
        }
        return Ok(None);
    };
    let tokenizer: Tokenizer = serde_json::from_str(&tokenizer_json)
        .map_err(|error| WeightsError::damaged(&path.display().to_string(), error.to_string()))?;
    let config = Object::read(&folder.join("tokenizer_config.json"))?;
    let token = |key: &str| config.as_ref().map(|config| token_text(config, key)).transpose().map(Option::flatten);
    let (bos_token, eos_token) = (token("bos_token")?, token("eos_token")?);
    let stated = config.as_ref().map(|config| config.bool("add_bos_token")).transpose()?.flatten();
    let add_bos = stated.unwrap_or_else(|| starts_with(&tokenizer.post_processor, bos_token.as_deref()));
    let chat_template = match read_text(&folder.join("chat_template.jinja"), CONFIG_BYTES_MAX)? {
        Some(template) => Some(template),
        None => config.as_ref().map(chat_template).transpose()?.flatten(),
    };
    let eos = tokenizer.added_tokens.iter().find(|added| Some(&added.content) == eos_token.as_ref());
    let eos = eos.map(|added| added.id);
    Ok(Some(Text { bundle: TextBundle { tokenizer_json, chat_template, bos_token, eos_token, add_bos }, eos }))
}

/// A special token, written as its text or as an object around it.
fn token_text(config: &Object, key: &str) -> Result<Option<String>, WeightsError> {
    let text = match config.get(key) {
        None => return Ok(None),
        Some(Value::Object(token)) => token.get("content").and_then(Value::as_str),
        Some(value) => value.as_str(),
    };
    text.map(|text| Some(text.to_owned())).ok_or_else(|| config.damaged(format!("{key} is no token")))
}

/// One template, or the one called `default` of a list.
fn chat_template(config: &Object) -> Result<Option<String>, WeightsError> {
    let list = match config.get("chat_template") {
        None => return Ok(None),
        Some(Value::String(template)) => return Ok(Some(template.clone())),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(config.damaged("chat_template is neither text nor a list")),
    };
    let default = list.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"));
    let template = default.and_then(|entry| entry.get("template")).and_then(Value::as_str);
    let template = template.ok_or_else(|| config.damaged("chat_template is a list without one named `default`"))?;
    Ok(Some(template.to_owned()))
}

/// Whether the tokenizer's own template for one text starts with this token, alone or within a sequence of processors.
fn starts_with(post_processor: &Value, bos: Option<&str>) -> bool {
    let Some(bos) = bos else { return false };
    if let Some(processors) = post_processor.get("processors").and_then(Value::as_array) {
        return processors.iter().any(|processor| starts_with(processor, Some(bos)));
    }
    let first = post_processor.get("single").and_then(|single| single.get(0));
    first.and_then(|piece| piece.get("SpecialToken")?.get("id")?.as_str()) == Some(bos)
}
