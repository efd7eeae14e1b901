//! Qwen3.5, its decoder of text: three of four layers keep a recurrent state by the gated delta rule, the fourth attends to all tokens, and what a head
//! attends to is multiplied by the sigmoid of a gate.
//!
//! Layers and the meaning of the keys: `modeling_qwen3_5.py` and `configuration_qwen3_5.py` of transformers 5.24. Positions of text are the same in all
//! three parts of its rotary embedding, so that the parts have no effect.

use super::family::{ConfigFamily, Family};
use super::qwen3::head_norms;
use super::{DecoderSpec, GatedDeltaSpec};
use crate::formats::{JsonObject, WeightsError};

/// The last layer of each so many attends, where nothing else is said.
const INTERVAL_DEFAULT: usize = 4;

const LAYER_TYPES_HINT: &str = "full_attention and linear_attention are implemented";

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Qwen3_5ForCausalLM",
        model_type: "qwen3_5_text",
        keys: &[
            "attn_output_gate",
            "full_attention_interval",
            "layer_types",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_value_head_dim",
            // The type of states in transformers: here they are always f32.
            "mamba_ssm_dtype",
            "partial_rotary_factor",
        ],
        gain_offset: 1.0,
        rope: |config, head_dim| {
            // If absent, transformers uses its class default: a quarter of each head.
            let inner = config.object("rope_parameters")?.and_then(|rope| rope.get("partial_rotary_factor").map(drop));
            config.need("partial_rotary_factor", config.get("partial_rotary_factor").map(drop).or(inner))?;
            config.text_rope(head_dim)
        },
        read,
        ..ConfigFamily::LLAMA
    },
    gguf: None,
};

fn read(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    // If absent, transformers uses its class default: heads of 256.
    config.need("head_dim", config.get("head_dim"))?;
    if config.bool("attn_output_gate")? == Some(false) {
        return Err(config.unsupported("attn_output_gate = false", "Qwen3.5 has gates of attention"));
    }
    head_norms(spec);
    let size = |key: &str| config.need(key, config.size(key)?);
    let delta = GatedDeltaSpec {
        key_heads: size("linear_num_key_heads")?,
        value_heads: size("linear_num_value_heads")?,
        key_dim: size("linear_key_head_dim")?,
        value_dim: size("linear_value_head_dim")?,
        taps: size("linear_conv_kernel_dim")?,
    };
    let interval = config.size("full_attention_interval")?.unwrap_or(INTERVAL_DEFAULT);
    if interval == 0 {
        return Err(config.damaged("full_attention_interval is 0"));
    }
    let types = config.get("layer_types").map(|types| types.as_array().map_or(&[][..], Vec::as_slice));
    if types.is_some_and(|types| types.len() != spec.layers.len()) {
        return Err(config.damaged(format!("layer_types is no list of {} layers", spec.layers.len())));
    }
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let attends = match types.map(|types| &types[index]) {
            None => (index + 1) % interval == 0,
            Some(kind) => match kind.as_str() {
                Some("full_attention") => true,
                Some("linear_attention") => false,
                _ => return Err(config.unsupported(format!("layer_types with {kind}"), LAYER_TYPES_HINT)),
            },
        };
        layer.attention.output_gate = true;
        layer.delta = (!attends).then_some(delta);
    }
    Ok(())
}
