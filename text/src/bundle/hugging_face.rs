//! A bundle from the tokenizer files of a Hugging Face model folder.

use baton_types::TextBundle;
use serde_json::Value;

use crate::TextError;

/// Texts of the files, as read.
#[derive(Clone, Debug, Default)]
pub struct HuggingFaceFiles {
    /// `tokenizer.json`.
    pub tokenizer: String,
    /// `tokenizer_config.json`, where there is one.
    pub tokenizer_config: Option<String>,
    /// `chat_template.jinja`, where there is one; it wins over the template in the configuration.
    pub chat_template: Option<String>,
}

/// Makes a bundle. The tokenizer itself is taken as it is and checked by [`crate::Tokenizer::from_bundle`].
pub fn from_hugging_face(files: HuggingFaceFiles) -> Result<TextBundle, TextError> {
    let parse = |name: &str, text: &str| -> Result<Value, TextError> {
        serde_json::from_str(text).map_err(|e| TextError::Broken(format!("{name}: {e}")))
    };
    let config =
        files.tokenizer_config.as_deref().map_or(Ok(Value::Null), |text| parse("tokenizer_config.json", text))?;
    let tokenizer = parse("tokenizer.json", &files.tokenizer)?;
    let bos_token = token_text(&config["bos_token"]);
    // The post-processor is what really adds the token; configurations of fast tokenizers may say what never happens.
    let add_bos = match &bos_token {
        Some(bos) => {
            starts_with(&tokenizer["post_processor"], bos)
                || config["add_bos_token"] == true && tokenizer["post_processor"].is_null()
        }
        None => false,
    };
    Ok(TextBundle {
        tokenizer_json: files.tokenizer,
        chat_template: files.chat_template.or_else(|| template(&config["chat_template"])),
        bos_token,
        eos_token: token_text(&config["eos_token"]),
        add_bos,
    })
}

/// A token is its text, or an object with the text in `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// One template, or a list of named ones, of which `default` is for chats.
fn template(value: &Value) -> Option<String> {
    let default = || value.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    value.as_str().or_else(default).map(str::to_owned)
}

/// Whether a post-processor puts `token` in front of a single text.
fn starts_with(processor: &Value, token: &str) -> bool {
    match processor["type"].as_str() {
        Some("Sequence") => {
            processor["processors"].as_array().is_some_and(|all| all.iter().any(|p| starts_with(p, token)))
        }
        Some("TemplateProcessing") => processor["single"][0]["SpecialToken"]["id"] == token,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn bundle(tokenizer: Value, config: Value) -> TextBundle {
        let files = HuggingFaceFiles {
            tokenizer: tokenizer.to_string(),
            tokenizer_config: Some(config.to_string()),
            chat_template: None,
        };
        from_hugging_face(files).unwrap()
    }

    #[test]
    fn begin_token_is_what_the_post_processor_adds() {
        let single = json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
        let template = json!({"type": "TemplateProcessing", "single": single});
        let nested = json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]});
        let cases = [
            (json!({"post_processor": template}), json!({"bos_token": "<s>"}), true),
            (json!({"post_processor": nested}), json!({"bos_token": {"content": "<s>"}}), true),
            (
                json!({"post_processor": {"type": "ByteLevel"}}),
                json!({"bos_token": "<s>", "add_bos_token": true}),
                false,
            ),
            (json!({}), json!({"bos_token": "<s>", "add_bos_token": true}), true),
            (json!({"post_processor": template}), json!({"bos_token": null}), false),
        ];
        for (tokenizer, config, add_bos) in cases {
            assert_eq!(bundle(tokenizer, config.clone()).add_bos, add_bos, "{config}");
        }
    }

    #[test]
    fn template_is_text_or_the_default_of_a_list() {
        let list = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
        assert_eq!(bundle(json!({}), json!({"chat_template": list})).chat_template.as_deref(), Some("d"));
        assert_eq!(bundle(json!({}), json!({"chat_template": "x"})).chat_template.as_deref(), Some("x"));
        assert_eq!(bundle(json!({}), json!({})).chat_template, None);
    }
}
