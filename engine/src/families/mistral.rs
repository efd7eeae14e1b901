//! Mistral: Llama with one sliding window for all layers. Its GGUF files have the architecture `llama`.
//!
//! Jiang et al., "Mistral 7B" (arXiv:2310.06825).

use super::DecoderSpec;
use super::family::{ConfigFamily, Family};
use crate::formats::{JsonObject, WeightsError};

const WINDOW: &str = "sliding_window";

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "MistralForCausalLM",
        model_type: "mistral",
        keys: &[WINDOW],
        read,
        ..ConfigFamily::LLAMA
    },
    gguf: None,
};

fn read(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    // If absent, transformers uses its class default: a window of 4096, and 8 key/value heads.
    if !config.keys().contains_key(WINDOW) {
        let hint = "state \"sliding_window\": null if the model has none";
        return Err(config.unsupported("MistralForCausalLM without the key sliding_window", hint));
    }
    config.need("num_key_value_heads", config.get("num_key_value_heads"))?;
    let window = config.window(WINDOW)?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.window = window);
    Ok(())
}
