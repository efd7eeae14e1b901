//! Qwen3.5, dense: three of four layers have a gated delta rule in place of attention; attention has norms of heads, a gate of its output, and
//! rotates a part of each head.
//!
//! The meaning of keys and tensors: `configuration_qwen3_5.py` and `modeling_qwen3_5.py` of transformers 5.24, and of those of GGUF files
//! llama.cpp's `qwen35`. Published folders have the model of images too ([`WITH_IMAGES`]), whose tensors are left out: a prompt of text has the
//! same position in all three axes of the rotary embedding, so that its sections say nothing.

use super::family::{ConfigFamily, Family, GgufFamily, Inside, LeftOut};
use super::qwen3::head_norms;
use super::{DecoderSpec, GatedDeltaSpec, LayerTensor, Rope};
use crate::formats::{GgufConfig, JsonObject, WeightsError};

/// Added to squares of lengths, whatever `rms_norm_eps` is.
const LENGTH_EPS: f32 = 1e-6;

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Qwen3_5ForCausalLM",
        model_type: "qwen3_5_text",
        keys: KEYS,
        gain_offset: 1.0,
        left_out: &[PREDICTION],
        rope,
        read,
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "qwen35",
        names: &[("post_attention_norm.weight", LayerTensor::MlpNorm)],
        value_heads_in_turns: true,
        extra_layers: Some("nextn_predict_layers"),
        keys: &[
            INTERVAL,
            // Of positions in three axes, which are the same for text.
            "rope.dimension_sections",
            "ssm.conv_kernel",
            "ssm.group_count",
            "ssm.inner_size",
            "ssm.state_size",
            "ssm.time_step_rank",
        ],
        read: read_gguf,
        ..GgufFamily::COMMON
    }),
};

/// With a model of images beside the decoder, which has all its keys in one of its own.
pub(super) const WITH_IMAGES: Family = Family {
    config: ConfigFamily {
        class: "Qwen3_5ForConditionalGeneration",
        model_type: "qwen3_5",
        inside: Some(Inside {
            key: "text_config",
            model_type: "qwen3_5_text",
            prefix: "model.language_model.",
            keys: &[
                "image_token_id",
                "language_model_only",
                "video_token_id",
                "vision_config",
                "vision_end_token_id",
                "vision_start_token_id",
            ],
        }),
        left_out: &[PREDICTION, LeftOut { prefix: "model.visual.", what: "of the model of images" }],
        ..FAMILY.config
    },
    gguf: None,
};

const PREDICTION: LeftOut = LeftOut { prefix: "mtp.", what: "which predict tokens after the next" };

/// Where a GGUF file says nothing (llama.cpp's default).
const INTERVAL_DEFAULT: usize = 4;

const GATE: &str = "attn_output_gate";
const INTERVAL: &str = "full_attention_interval";
const PARTIAL: &str = "partial_rotary_factor";

const KEYS: &[&str] = &[
    GATE,
    INTERVAL,
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    // The type of states, which is f32 here whatever a file says.
    "mamba_ssm_dtype",
    // Layers that predict tokens after the next: their tensors are left out.
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    PARTIAL,
];

fn rope(config: &JsonObject, head_dim: usize) -> Result<Rope, WeightsError> {
    // If absent, transformers uses its class defaults: a base of 10000, of a quarter of each head.
    config.need_theta()?;
    config.need_of_rope(PARTIAL)?;
    config.text_rope(head_dim)
}

fn read(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    // If absent, transformers uses its class defaults.
    config.need("head_dim", config.get("head_dim"))?;
    config.need("num_key_value_heads", config.get("num_key_value_heads"))?;
    if config.bool(GATE)? == Some(false) {
        return Err(config.unsupported(format!("{GATE} = false"), "attention of Qwen3.5 has a gate of its output"));
    }
    let size = |key: &str| config.need(key, config.size(key)?);
    let delta = GatedDeltaSpec {
        key_heads: size("linear_num_key_heads")?,
        value_heads: size("linear_num_value_heads")?,
        key_dim: size("linear_key_head_dim")?,
        value_dim: size("linear_value_head_dim")?,
        taps: size("linear_conv_kernel_dim")?,
        length_eps: LENGTH_EPS,
    };
    let recurrent = recurrent(config, spec.layers.len())?;
    complete(spec, delta, &recurrent);
    Ok(())
}

fn read_gguf(config: &GgufConfig<'_, '_>, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    // If absent, a head would be rotated as a whole, by the base of other families.
    config.own_size("rope.dimension_count")?;
    config.own_float("rope.freq_base")?.ok_or_else(|| config.damaged("rope.freq_base is missing"))?;
    let (value_heads, inner) = (config.own_size("ssm.time_step_rank")?, config.own_size("ssm.inner_size")?);
    if value_heads == 0 || !inner.is_multiple_of(value_heads) {
        return Err(config.damaged(format!("ssm.inner_size {inner} does not divide among {value_heads} heads")));
    }
    let delta = GatedDeltaSpec {
        key_heads: config.own_size("ssm.group_count")?,
        value_heads,
        key_dim: config.own_size("ssm.state_size")?,
        value_dim: inner / value_heads,
        taps: config.own_size("ssm.conv_kernel")?,
        length_eps: LENGTH_EPS,
    };
    let interval = config.own_size_or(INTERVAL, INTERVAL_DEFAULT)?;
    let recurrent = by_interval(interval, spec.layers.len());
    complete(spec, delta, &recurrent.ok_or_else(|| config.damaged(format!("{INTERVAL} is 0")))?);
    Ok(())
}

/// What is the same however a file says it.
fn complete(spec: &mut DecoderSpec, delta: GatedDeltaSpec, recurrent: &[bool]) {
    head_norms(spec);
    for (layer, recurrent) in spec.layers.iter_mut().zip(recurrent) {
        layer.attention.output_gate = true;
        layer.delta = recurrent.then_some(delta);
    }
}

/// All layers but the last of each so many are recurrent; `None` if that is 0.
fn by_interval(interval: usize, layers: usize) -> Option<Vec<bool>> {
    (interval > 0).then(|| (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
}

/// Whether each layer is recurrent: as `layer_types` says; without that list, all but the last of each so many.
fn recurrent(config: &JsonObject, layers: usize) -> Result<Vec<bool>, WeightsError> {
    let Some(types) = config.get("layer_types") else {
        let interval = config.need("layer_types", config.size(INTERVAL)?)?;
        return by_interval(interval, layers).ok_or_else(|| config.damaged(format!("{INTERVAL} is 0")));
    };
    let types = types.as_array().map_or(&[][..], Vec::as_slice);
    if types.len() != layers {
        return Err(config.damaged(format!("layer_types is no list of {layers} layers")));
    }
    let recurrent = |kind: &serde_json::Value| match kind.as_str() {
        Some("linear_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => {
            let hint = "full_attention and linear_attention are implemented";
            Err(config.unsupported(format!("layer_types with {kind}"), hint))
        }
    };
    types.iter().map(recurrent).collect()
}
