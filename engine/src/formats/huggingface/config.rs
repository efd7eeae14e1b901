//! Converts `config.json` to [`ModelShape`].

use super::json::Object;
use super::{keys, rope};
use crate::formats::{ModelShape, WeightsError};

/// The supported classes, whose computation is the one implemented here, with the model type of each.
const LLAMA: &str = "LlamaForCausalLM";
const MISTRAL: &str = "MistralForCausalLM";
const TYPES: [(&str, &str); 2] = [(LLAMA, "llama"), (MISTRAL, "mistral")];

/// Checks every key and reads the shape.
pub(super) fn shape(config: &Object) -> Result<ModelShape, WeightsError> {
    let class = class(config)?;
    keys::check(config)?;
    check_type(config, class)?;
    if class == MISTRAL {
        // If absent, transformers uses its class default: a window of 4096, and 8 key/value heads.
        if !config.keys().contains_key("sliding_window") {
            let hint = "state \"sliding_window\": null if the model has none";
            return Err(config.unsupported(format!("{MISTRAL} without the key sliding_window"), hint));
        }
        config.need("num_key_value_heads", config.get("num_key_value_heads"))?;
    }
    match config.text("hidden_act")? {
        None | Some("silu" | "swish") => {}
        Some(other) => return Err(config.unsupported(format!("hidden_act `{other}`"), "only `silu` is implemented")),
    }
    let size = |key: &str| config.need(key, config.size(key)?);
    let (hidden, heads) = (size("hidden_size")?, size("num_attention_heads")?);
    let head_dim = match config.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(config.damaged("head_dim is missing and hidden_size does not divide by num_attention_heads"));
        }
    };
    let shape = ModelShape {
        vocab: size("vocab_size")?,
        hidden,
        layers: size("num_hidden_layers")?,
        heads,
        kv_heads: config.size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        ffn: size("intermediate_size")?,
        context: size("max_position_embeddings")?,
        rms_eps: config.need("rms_norm_eps", config.float("rms_norm_eps")?)?,
        rope: rope::read(config)?,
        tied: config.bool("tie_word_embeddings")?.unwrap_or(false),
    };
    shape.check().map_err(|reason| config.damaged(reason))?;
    Ok(shape)
}

/// transformers selects the computation by `model_type`, which must match the class.
fn check_type(config: &Object, class: &str) -> Result<(), WeightsError> {
    match config.text("model_type")? {
        Some(other) if !TYPES.contains(&(class, other)) => {
            let hint = "the two must name the same model; correct the one that is wrong";
            Err(config.unsupported(format!("model_type `{other}` beside architectures [\"{class}\"]"), hint))
        }
        _ => Ok(()),
    }
}

fn class(config: &Object) -> Result<&'static str, WeightsError> {
    let classes = config.get("architectures").and_then(|value| value.as_array());
    let classes = config.need("architectures", classes)?;
    let hint = "LlamaForCausalLM and MistralForCausalLM are implemented";
    match classes.as_slice() {
        [one] if one == LLAMA => Ok(LLAMA),
        [one] if one == MISTRAL => Ok(MISTRAL),
        other => {
            let names: Vec<_> = other.iter().map(|name| name.as_str().unwrap_or("?")).collect();
            Err(config.unsupported(format!("architectures {names:?}"), hint))
        }
    }
}
