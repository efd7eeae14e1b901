//! Mixtral: Mistral with experts in place of every layer's MLP. Its GGUF files have the architecture `llama`.
//!
//! Jiang et al., "Mixtral of Experts" (arXiv:2401.04088); the meaning of the keys: `configuration_mixtral.py` of transformers 5.24.

use super::family::{ConfigFamily, Family};
use super::{DecoderSpec, ExpertNames, ExpertsSpec, LayerTensor};
use crate::formats::{GgufConfig, WeightsError};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "MixtralForCausalLM",
        model_type: "mixtral",
        keys: &[
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "sliding_window",
        ],
        names: &[(LayerTensor::Router, "block_sparse_moe.gate.weight")],
        experts: ExpertNames::of("block_sparse_moe.experts", ["w1.weight", "w3.weight", "w2.weight"]),
        read: |config, spec| {
            let size = |key: &str| config.need(key, config.size(key)?);
            let (count, used) = (size("num_local_experts")?, size("num_experts_per_tok")?);
            // If absent, transformers uses its class defaults: 8 key/value heads, and a base of a million.
            config.need("num_key_value_heads", config.get("num_key_value_heads"))?;
            config.need_theta()?;
            let window = config.window("sliding_window")?;
            for layer in &mut spec.layers {
                layer.attention.window = window;
                layer.experts = Some(ExpertsSpec::softmax(count, used, true));
            }
            Ok(())
        },
        ..ConfigFamily::LLAMA
    },
    gguf: None,
};

/// Keys of [`read_experts`].
pub(super) const GGUF_KEYS: &[&str] = &["expert_count", "expert_feed_forward_length", "expert_used_count"];

/// Experts in all layers of a GGUF file that has some.
pub(super) fn read_experts(
    config: &GgufConfig<'_, '_>,
    spec: &mut DecoderSpec,
    renormalize: bool,
) -> Result<(), WeightsError> {
    let count = config.own_size_or("expert_count", 0)?;
    if count == 0 {
        return Ok(());
    }
    let used = config.own_size("expert_used_count")?;
    for layer in &mut spec.layers {
        layer.ffn = config.own_size_or("expert_feed_forward_length", layer.ffn)?;
        layer.experts = Some(ExpertsSpec::softmax(count, used, renormalize));
    }
    Ok(())
}
