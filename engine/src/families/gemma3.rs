//! Gemma 3, its decoder of text: Gemma 2 with norms of heads instead of soft caps; five of six layers have a window, and a rotary embedding of
//! their own.
//!
//! "Gemma 3 Technical Report" (arXiv:2503.19786); the meaning of the keys: `configuration_gemma3.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily};
use super::gemma2::{NAMES, common, common_of_gguf, windows};
use super::qwen3::head_norms;
use super::{DecoderSpec, Rope, RopeScaling};
use crate::formats::{JsonObject, WeightsError};

/// Layers of the model of 27 billion parameters, whose scores have another factor; GGUF files do not say which.
const LAYERS_OF_27B: usize = 62;

/// The last layer of each so many has no window, where nothing else is said.
const PATTERN_DEFAULT: usize = 6;

/// Base of the rotary embedding of layers with a window, where a GGUF file states none (llama.cpp's default).
const LOCAL_THETA_DEFAULT: f32 = 10_000.0;

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        keys: &[
            "_sliding_window_pattern",
            "attn_logit_softcapping",
            "cache_implementation",
            "final_logit_softcapping",
            "hidden_activation",
            "layer_types",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window",
            "sliding_window_pattern",
        ],
        names: NAMES,
        gain_offset: 1.0,
        rope: |config, head_dim| match of_type(config, "full_attention")? {
            Some(rope) => rope.rope_parameters(head_dim),
            None => {
                // If absent, transformers uses its class default: a base of a million.
                config.need_theta()?;
                config.rope(head_dim)
            }
        },
        read,
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "gemma3",
        keys: &["attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"],
        read: |config, spec| {
            // llama.cpp computes this pattern, whatever the key says.
            common_of_gguf(config, spec, LAYERS_OF_27B, |layer| (layer + 1) % PATTERN_DEFAULT != 0)?;
            let theta = config.own_float("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA_DEFAULT);
            head_norms(spec);
            local_rope(spec, |dim| Ok(Rope { dim, theta, scaling: RopeScaling::None }))
        },
        ..GgufFamily::COMMON
    }),
};

/// The rotary embedding of layers of a type, where `rope_parameters` has them by type.
fn of_type(config: &JsonObject, kind: &str) -> Result<Option<JsonObject>, WeightsError> {
    config.object("rope_parameters")?.map_or(Ok(None), |types| types.object(kind))
}

/// Gives layers with a window their rotary embedding, of heads of their size.
fn local_rope(spec: &mut DecoderSpec, rope: impl Fn(usize) -> Result<Rope, WeightsError>) -> Result<(), WeightsError> {
    for layer in spec.layers.iter_mut().filter(|layer| layer.attention.window.is_some()) {
        layer.attention.rope = Some(rope(layer.attention.head_dim)?);
    }
    Ok(())
}

fn read(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    common(config, spec)?;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if config.get(key).is_some() {
            return Err(config.unsupported(format!("{key} in Gemma3ForCausalLM"), "Gemma 3 has no soft caps"));
        }
    }
    let stated = config.size("sliding_window_pattern")?.or(config.size("_sliding_window_pattern")?);
    let pattern = stated.unwrap_or(PATTERN_DEFAULT);
    if pattern == 0 {
        return Err(config.damaged("sliding_window_pattern is 0"));
    }
    windows(config, spec, |layer| (layer + 1) % pattern != 0)?;
    head_norms(spec);
    match of_type(config, "sliding_attention")? {
        Some(parameters) => local_rope(spec, |head_dim| parameters.rope_parameters(head_dim)),
        None => {
            let theta = config.need("rope_local_base_freq", config.float("rope_local_base_freq")?)?;
            local_rope(spec, |dim| Ok(Rope { dim, theta, scaling: RopeScaling::None }))
        }
    }
}
