//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and an optional sliding window in the upper layers.
//!
//! Yang et al., "Qwen2 Technical Report" (arXiv:2407.10671); the meaning of the keys: `configuration_qwen2.py` of transformers 5.24.

use super::DecoderSpec;
use super::family::{ConfigFamily, Family, GgufFamily};
use crate::formats::{JsonObject, WeightsError};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Qwen2ForCausalLM",
        model_type: "qwen2",
        keys: WINDOW_KEYS,
        read: |config, spec| {
            biases(spec);
            read_windows(config, spec)
        },
        ..ConfigFamily::LLAMA
    },
    // The converter writes no window, and llama.cpp computes none.
    gguf: Some(GgufFamily {
        architecture: "qwen2",
        read: |_, spec| {
            biases(spec);
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};

/// Keys of [`read_windows`].
const WINDOW_KEYS: &[&str] = &["layer_types", "max_window_layers", "sliding_window", "use_sliding_window"];

fn biases(spec: &mut DecoderSpec) {
    spec.layers.iter_mut().for_each(|layer| layer.attention.qkv_bias = true);
}

/// Windows by layer: where `layer_types` says so; without that list, from layer `max_window_layers` on. Without `use_sliding_window` there
/// are none.
pub(super) fn read_windows(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    // If absent, transformers uses its class default: 32 key/value heads.
    config.need("num_key_value_heads", config.get("num_key_value_heads"))?;
    let on = config.bool("use_sliding_window")?.unwrap_or(false);
    if on && !config.keys().contains_key("sliding_window") {
        return Err(config.damaged("sliding_window is missing, though use_sliding_window is true"));
    }
    let window = if on { config.window("sliding_window")? } else { None };
    let first = config.size("max_window_layers")?;
    match config.get("layer_types") {
        None if window.is_some() => {
            let first = config.need("max_window_layers", first)?;
            spec.layers.iter_mut().skip(first).for_each(|layer| layer.attention.window = window);
        }
        None => {}
        Some(_) => windows_of_types(config, spec, window)?,
    }
    Ok(())
}

/// The window in the layers that `layer_types` names so.
pub(super) fn windows_of_types(
    config: &JsonObject,
    spec: &mut DecoderSpec,
    window: Option<u32>,
) -> Result<(), WeightsError> {
    let types = config.get("layer_types").and_then(|types| types.as_array()).map_or(&[][..], Vec::as_slice);
    if types.len() != spec.layers.len() {
        return Err(config.damaged(format!("layer_types is no list of {} layers", spec.layers.len())));
    }
    for (layer, kind) in spec.layers.iter_mut().zip(types) {
        layer.attention.window = match (kind.as_str(), window) {
            (Some("full_attention"), _) => None,
            (Some("sliding_attention"), Some(window)) => Some(window),
            (Some("sliding_attention"), None) => {
                return Err(config.damaged("layer_types has a window that sliding_window does not give"));
            }
            _ => return Err(config.unsupported(format!("layer_types with {kind}"), LAYER_TYPES_HINT)),
        };
    }
    Ok(())
}

const LAYER_TYPES_HINT: &str = "full_attention and sliding_attention are implemented";
