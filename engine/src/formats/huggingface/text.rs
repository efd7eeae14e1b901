//! Converts tokenizer files of a folder to a [`TextBundle`].

use super::json::{CONFIG_BYTES_MAX, JsonObject, TOKENIZER_BYTES_MAX, read_text};
use crate::formats::WeightsError;
use baton_types::{TextBundle, TokenId};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

const TOKENIZER: &str = "tokenizer.json";
/// The template of a chat with tools, beside that of a chat without.
const TEMPLATE_WITH_TOOLS: &str = "additional_chat_templates/tool_use.jinja";
/// Tokenizer classes that replace the file's post-processor by their own, built from `add_bos_token` (default on) and `add_eos_token`
/// (default off): transformers' `LlamaTokenizerFast.update_post_processor` and its copy for Code Llama.
const LLAMA_CLASSES: [&str; 4] =
    ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"];

/// The parts of `tokenizer.json` that are read here; the tokenizer library reads the rest.
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

/// Reads the folder's tokenizer; `None` if it has none, so that only token ids can be served.
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
    let config = JsonObject::read(&folder.join("tokenizer_config.json"))?;
    let token = |key: &str| config.as_ref().map(|config| token_text(config, key)).transpose().map(Option::flatten);
    let (bos_token, eos_token) = (token("bos_token")?, token("eos_token")?);
    let added = match &config {
        Some(config) if is_llama(config)? => added_by_llama(config, bos_token.clone())?,
        _ => added_before(&tokenizer.post_processor).map_err(|what| {
            let hint = "a prompt can only get a begin token, in front: mend post_processor";
            WeightsError::unsupported(&path.display().to_string(), format!("post_processor {what}"), hint)
        })?,
    };
    let add_bos = added.is_some();
    if let (Some(added), Some(bos)) = (&added, &bos_token)
        && added != bos
    {
        let message = format!("post_processor adds {added:?}, but bos_token in tokenizer_config.json is {bos:?}");
        return Err(WeightsError::damaged(&path.display().to_string(), message));
    }
    let bos_token = bos_token.or(added);
    let chat_template = match read_text(&folder.join("chat_template.jinja"), CONFIG_BYTES_MAX)? {
        Some(template) => Some(match read_text(&folder.join(TEMPLATE_WITH_TOOLS), CONFIG_BYTES_MAX)? {
            Some(with_tools) => by_tools(&with_tools, &template),
            None => template,
        }),
        None => config.as_ref().map(chat_template).transpose()?.flatten(),
    };
    let eos = tokenizer.added_tokens.iter().find(|added| Some(&added.content) == eos_token.as_ref());
    let eos = eos.map(|added| added.id);
    Ok(Some(Text { bundle: TextBundle { tokenizer_json, chat_template, bos_token, eos_token, add_bos }, eos }))
}

/// A special token, stored as its text or as an object that contains it.
fn token_text(config: &JsonObject, key: &str) -> Result<Option<String>, WeightsError> {
    let text = match config.get(key) {
        None => return Ok(None),
        Some(Value::Object(token)) => token.get("content").and_then(Value::as_str),
        Some(value) => value.as_str(),
    };
    text.map(|text| Some(text.to_owned())).ok_or_else(|| config.damaged(format!("{key} is no token")))
}

/// The only template. Of a list, those named `default` and, for chats with tools, `tool_use`, as one.
fn chat_template(config: &JsonObject) -> Result<Option<String>, WeightsError> {
    let list = match config.get("chat_template") {
        None => return Ok(None),
        Some(Value::String(template)) => return Ok(Some(template.clone())),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(config.damaged("chat_template is neither text nor a list")),
    };
    let named = |name: &str| {
        let entry = list.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(name));
        entry.and_then(|entry| entry.get("template")).and_then(Value::as_str)
    };
    let default = named("default");
    let default = default.ok_or_else(|| config.damaged("chat_template is a list without one named `default`"))?;
    Ok(Some(match named("tool_use") {
        Some(with_tools) => by_tools(with_tools, default),
        None => default.to_owned(),
    }))
}

/// A template of two. Jinja drops the line break that ends a template, and those that follow a statement.
fn by_tools(with_tools: &str, without: &str) -> String {
    let [with_tools, without] = [with_tools, without].map(|source| source.strip_suffix('\n').unwrap_or(source));
    format!("{{% if tools %}}{{{{ '' }}}}{with_tools}{{% else %}}{{{{ '' }}}}{without}{{% endif %}}")
}

fn is_llama(config: &JsonObject) -> Result<bool, WeightsError> {
    Ok(config.text("tokenizer_class")?.is_some_and(|class| LLAMA_CLASSES.contains(&class)))
}

/// The token that a tokenizer of [`LLAMA_CLASSES`] prepends to a text.
fn added_by_llama(config: &JsonObject, bos: Option<String>) -> Result<Option<String>, WeightsError> {
    if config.bool("add_eos_token")? == Some(true) {
        return Err(
            config.unsupported("add_eos_token: true", "a prompt does not end with an end token: set it to false")
        );
    }
    if config.bool("add_bos_token")? == Some(false) {
        return Ok(None);
    }
    config.need("bos_token", bos).map(Some)
}

/// The token that a post-processor prepends to a single text; an error for any other effect.
fn added_before(processor: &Value) -> Result<Option<String>, String> {
    match processor.get("type").and_then(Value::as_str) {
        None if processor.is_null() => Ok(None),
        // It moves offsets only.
        Some("ByteLevel") => Ok(None),
        Some("Sequence") => {
            let steps = processor.get("processors").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let added: Vec<String> =
                steps.iter().filter_map(|step| added_before(step).transpose()).collect::<Result<_, _>>()?;
            match <[String; 1]>::try_from(added) {
                Ok([token]) => Ok(Some(token)),
                Err(none) if none.is_empty() => Ok(None),
                Err(added) => Err(format!("that adds {added:?}")),
            }
        }
        Some("TemplateProcessing") => {
            let single = processor.get("single").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let token = |piece: &Value| piece.get("SpecialToken")?.get("id")?.as_str().map(str::to_owned);
            let is_text = |piece: &Value| piece.get("Sequence").is_some();
            match single {
                [text] if is_text(text) => Ok(None),
                [first, text] if is_text(text) && token(first).is_some() => Ok(token(first)),
                _ => Err(format!("with the template {}", Value::from(single))),
            }
        }
        kind => Err(format!("of type {:?}", kind.unwrap_or("none"))),
    }
}
