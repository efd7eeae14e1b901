//! gpt-oss: experts in every layer, biases in all linears, attention with sinks, and a window in every other layer.
//!
//! "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925); the meaning of the keys: `configuration_gpt_oss.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily};
use super::gemma2::windows;
use super::mixtral::read_experts;
use super::{Activation, DecoderSpec, ExpertTensor, ExpertsSpec, LayerTensor, Rope, RopeScaling};
use crate::formats::{JsonObject, WeightsError};

/// Of the gate in its sigmoid, and bound of gate and up, where a file says nothing: the published models have these.
const ALPHA: f32 = 1.702;
const LIMIT: f32 = 7.0;

const QUANTIZATION: &str = "quantization_config";

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "GptOssForCausalLM",
        model_type: "gpt_oss",
        keys: &[
            "attention_bias",
            // The same as `num_experts_per_tok`, which transformers reads.
            "experts_per_token",
            // The same as `original_max_position_embeddings`, which transformers reads.
            "initial_context_length",
            "layer_types",
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            QUANTIZATION,
            "router_aux_loss_coef",
            "sliding_window",
            "swiglu_alpha",
            "swiglu_limit",
        ],
        names: &[(LayerTensor::Router, "mlp.router.weight"), (LayerTensor::RouterBias, "mlp.router.bias")],
        stacked: &[
            ("mlp.experts.gate_up_proj", &[ExpertTensor::Gate, ExpertTensor::Up]),
            ("mlp.experts.gate_up_proj_bias", &[ExpertTensor::GateBias, ExpertTensor::UpBias]),
            ("mlp.experts.down_proj", &[ExpertTensor::Down]),
            ("mlp.experts.down_proj_bias", &[ExpertTensor::DownBias]),
        ],
        read,
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "gpt-oss",
        names: &[("post_attention_norm.weight", LayerTensor::MlpNorm)],
        keys: &["attention.sliding_window", "expert_count", "expert_feed_forward_length", "expert_used_count"],
        read: |config, spec| {
            read_experts(config, spec, true)?;
            let window = config.own_window("attention.sliding_window")?;
            complete(spec, ALPHA, LIMIT, true);
            for (l, layer) in spec.layers.iter_mut().enumerate() {
                layer.attention.window = (l % 2 == 0).then_some(window);
                // Files do not say it; so the models were trained.
                if let Some(Rope { scaling: RopeScaling::Yarn { truncate, .. }, .. }) = &mut layer.attention.rope {
                    *truncate = false;
                }
            }
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};

fn read(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    check_quantization(config)?;
    // If absent, transformers uses its class defaults: heads of 64, 8 key/value heads, and YaRN with a base of 150,000.
    for key in ["head_dim", "num_key_value_heads"] {
        config.need(key, config.get(key))?;
    }
    config.need_theta()?;
    config.need("rope_parameters", config.get("rope_parameters").or(config.get("rope_scaling")))?;
    if spec.layers.iter().any(|layer| layer.activation != Activation::Silu) {
        return Err(config.unsupported("hidden_act other than `silu`", "gpt-oss has one activation"));
    }
    let size = |key: &str| config.need(key, config.size(key)?);
    let (count, used) = (size("num_local_experts")?, size("num_experts_per_tok")?);
    if let Some(other) = config.size("experts_per_token")?.filter(|other| *other != used) {
        return Err(config.damaged(format!("num_experts_per_tok is {used} and experts_per_token {other}")));
    }
    let bias = config.bool("attention_bias")?.unwrap_or(true);
    let alpha = config.float("swiglu_alpha")?.unwrap_or(ALPHA);
    let limit = config.float("swiglu_limit")?.unwrap_or(LIMIT);
    // A softmax over those that are chosen is that over all, divided by its sum.
    let experts = Some(ExpertsSpec::softmax(count, used, true));
    spec.layers.iter_mut().for_each(|layer| layer.experts = experts);
    complete(spec, alpha, limit, bias);
    windows(config, spec, |layer| layer % 2 == 0)
}

/// What is the same however a file says it.
fn complete(spec: &mut DecoderSpec, alpha: f32, limit: f32, bias: bool) {
    for layer in &mut spec.layers {
        layer.activation = Activation::ClampedSwiglu { alpha, limit };
        layer.attention.sinks = true;
        (layer.attention.qkv_bias, layer.attention.output_bias) = (bias, bias);
        if let Some(experts) = &mut layer.experts {
            experts.biases = true;
        }
    }
}

/// Refuses quantizations other than MXFP4, whose tensors name themselves.
fn check_quantization(config: &JsonObject) -> Result<(), WeightsError> {
    let Some(quantization) = config.object(QUANTIZATION)? else { return Ok(()) };
    match quantization.text("quant_method")? {
        Some("mxfp4") => {}
        method => {
            let what = format!("{QUANTIZATION} of method `{}`", method.unwrap_or("?"));
            return Err(config.unsupported(what, "of gpt-oss, `mxfp4` is implemented"));
        }
    }
    // Which modules stay as they are is seen in the file; whether transformers unpacks them changes no value.
    let known = ["dequantize", "modules_to_not_convert", "quant_method"];
    match quantization.keys().iter().find(|(key, value)| !known.contains(&key.as_str()) && !value.is_null()) {
        Some((key, _)) => Err(quantization.unsupported(key.clone(), "delete it if it has no meaning")),
        None => Ok(()),
    }
}
