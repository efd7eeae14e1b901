//! Gemma 2: norms before and behind attention and MLP, whose gains are stored less one; GELU; soft caps of scores and logits; every other layer
//! has a window.
//!
//! "Gemma 2" (arXiv:2408.00118); the meaning of the keys: `configuration_gemma2.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily};
use super::qwen2::windows_of_types;
use super::{Activation, DecoderSpec, LayerNorms, LayerTensor, attention_scale};
use crate::formats::{GgufConfig, JsonObject, WeightsError};

/// Layers of the model of 27 billion parameters, whose scores have another factor; GGUF files do not say which.
const LAYERS_OF_27B: usize = 46;

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Gemma2ForCausalLM",
        model_type: "gemma2",
        keys: &[
            "attn_logit_softcapping",
            "cache_implementation",
            "final_logit_softcapping",
            "hidden_activation",
            "layer_types",
            "query_pre_attn_scalar",
            "sliding_window",
            // In some files beside `sliding_window`; transformers does not read it.
            "sliding_window_size",
        ],
        names: NAMES,
        gain_offset: 1.0,
        read: |config, spec| {
            common(config, spec)?;
            let of_scores = config.float("attn_logit_softcapping")?;
            spec.logit_soft_cap = config.float("final_logit_softcapping")?;
            spec.layers.iter_mut().for_each(|layer| layer.attention.soft_cap = of_scores);
            // If absent, transformers uses its class defaults, and null switches a cap off.
            for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
                if !config.keys().contains_key(key) {
                    return Err(config.damaged(format!("{key} is missing; null if the model has none")));
                }
            }
            windows(config, spec, |layer| layer % 2 == 0)
        },
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "gemma2",
        keys: &["attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"],
        read: |config, spec| {
            common_of_gguf(config, spec, LAYERS_OF_27B, |layer| layer % 2 == 0)?;
            // llama.cpp's defaults.
            let of_scores = config.own_float("attn_logit_softcapping")?.unwrap_or(50.0);
            spec.logit_soft_cap = Some(config.own_float("final_logit_softcapping")?.unwrap_or(30.0));
            spec.layers.iter_mut().for_each(|layer| layer.attention.soft_cap = Some(of_scores));
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};

/// Gemma 3 has the same.
pub(super) const NAMES: &[(LayerTensor, &str)] = &[
    (LayerTensor::AttentionOutputNorm, "post_attention_layernorm.weight"),
    (LayerTensor::MlpNorm, "pre_feedforward_layernorm.weight"),
    (LayerTensor::MlpOutputNorm, "post_feedforward_layernorm.weight"),
];

fn of_every_layer(spec: &mut DecoderSpec) {
    spec.embedding_factor = (spec.hidden as f64).sqrt() as f32;
    spec.layers.iter_mut().for_each(|layer| layer.norms = LayerNorms::Both);
}

/// What `config.json` says in the same way for Gemma 2 and 3.
pub(super) fn common(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    of_every_layer(spec);
    // If absent, transformers uses its class defaults: heads of 256, and the embedding as output.
    config.need("head_dim", config.get("head_dim"))?;
    spec.tied = config.bool("tie_word_embeddings")?.unwrap_or(true);
    let activation = config.need("hidden_activation", config.activation("hidden_activation")?)?;
    let of_scores = config.need("query_pre_attn_scalar", config.float("query_pre_attn_scalar")?)?;
    for layer in &mut spec.layers {
        layer.activation = activation;
        layer.attention.scale = f64::from(of_scores).powf(-0.5) as f32;
    }
    Ok(())
}

/// The window of layers of the type `sliding_attention`, and without `layer_types` of those that `slides` tells.
pub(super) fn windows(
    config: &JsonObject,
    spec: &mut DecoderSpec,
    slides: impl Fn(usize) -> bool,
) -> Result<(), WeightsError> {
    let window = config.need("sliding_window", config.window("sliding_window")?)?;
    if config.get("layer_types").is_some() {
        return windows_of_types(config, spec, Some(window));
    }
    let layers = spec.layers.iter_mut().enumerate().filter(|(layer, _)| slides(*layer));
    layers.for_each(|(_, layer)| layer.attention.window = Some(window));
    Ok(())
}

/// What GGUF files say, or leave to llama.cpp, in the same way for Gemma 2 and 3.
pub(super) fn common_of_gguf(
    config: &GgufConfig<'_, '_>,
    spec: &mut DecoderSpec,
    layers_of_27b: usize,
    slides: impl Fn(usize) -> bool,
) -> Result<(), WeightsError> {
    of_every_layer(spec);
    let window = config.own_window("attention.sliding_window")?;
    let (hidden, is_27b) = (spec.hidden, spec.layers.len() == layers_of_27b);
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        layer.activation = Activation::GeluTanh;
        layer.attention.window = slides(l).then_some(window);
        if is_27b {
            layer.attention.scale = attention_scale(hidden / layer.attention.heads);
        }
    }
    Ok(())
}
