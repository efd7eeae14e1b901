//! SmolLM3: Llama whose every fourth layer has no rotary embedding, with Qwen2's windows.
//!
//! "SmolLM3: smol, multilingual, long-context reasoner" (Hugging Face, 2025); the meaning of the keys: `configuration_smollm3.py` of
//! transformers 5.24.

use super::DecoderSpec;
use super::family::{ConfigFamily, Family, GgufFamily, RotaryRows};
use super::qwen2::read_windows;
use crate::formats::{JsonObject, WeightsError};

const INTERVAL: &str = "no_rope_layer_interval";
/// One number a layer: whether it has a rotary embedding, in spite of the name.
const LAYERS: &str = "no_rope_layers";
/// Where neither key is there, and in GGUF files.
const INTERVAL_DEFAULT: usize = 4;

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "SmolLM3ForCausalLM",
        model_type: "smollm3",
        keys: &[INTERVAL, LAYERS, "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"],
        read,
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "smollm3",
        rotary_rows: RotaryRows::Neighbours,
        read: |_, spec| {
            without_rope(spec, INTERVAL_DEFAULT);
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};

/// The last layer of each `interval` has none.
fn without_rope(spec: &mut DecoderSpec, interval: usize) {
    let layers = spec.layers.iter_mut().skip(interval - 1).step_by(interval);
    layers.for_each(|layer| layer.attention.rope = None);
}

fn read(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    match config.get(LAYERS) {
        None => {
            let interval = config.size(INTERVAL)?.unwrap_or(INTERVAL_DEFAULT);
            if interval == 0 {
                return Err(config.damaged(format!("{INTERVAL} is 0")));
            }
            without_rope(spec, interval);
        }
        Some(list) => {
            let list = list.as_array().map_or(&[][..], Vec::as_slice);
            if list.len() != spec.layers.len() {
                return Err(config.damaged(format!("{LAYERS} is no list of {} layers", spec.layers.len())));
            }
            for (layer, has_rope) in spec.layers.iter_mut().zip(list) {
                match has_rope.as_u64() {
                    Some(0) => layer.attention.rope = None,
                    Some(1) => {}
                    _ => return Err(config.damaged(format!("{LAYERS} has {has_rope}: 0 and 1 are possible"))),
                }
            }
        }
    }
    // If absent, transformers uses its class defaults: a base of two million, the embedding as output, 4 key/value heads.
    config.need("tie_word_embeddings", config.get("tie_word_embeddings"))?;
    config.need_theta()?;
    // Without the list, transformers gives the window to layers without rotary embedding, and Qwen2 to others.
    if config.bool("use_sliding_window")? == Some(true) && config.get("layer_types").is_none() {
        return Err(config.damaged("layer_types is missing, though use_sliding_window is true"));
    }
    read_windows(config, spec)
}
