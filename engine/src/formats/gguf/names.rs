//! llama.cpp's tensor names.

use super::config::GgufConfig;
use super::latents::Part;
use crate::families::{ExpertTensor, FusedTensor, GgufFamily, LayerTensor, TensorName, layer_index};
use crate::formats::WeightsError;

/// Per-frequency rotary divisors: configuration stored as a tensor.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

/// The same of LongRoPE, for no longer context than the original one, and for longer ones.
pub(super) const ROPE_SHORT: &str = "rope_factors_short.weight";
pub(super) const ROPE_LONG: &str = "rope_factors_long.weight";

/// Names of the layers' tensors, after `blk.N.`.
const LAYER: [(&str, LayerTensor); LayerTensor::ALL.len()] = [
    ("attn_norm.weight", LayerTensor::AttentionNorm),
    ("attn_q.weight", LayerTensor::Query),
    ("attn_k.weight", LayerTensor::Key),
    ("attn_v.weight", LayerTensor::Value),
    ("attn_q.bias", LayerTensor::QueryBias),
    ("attn_k.bias", LayerTensor::KeyBias),
    ("attn_v.bias", LayerTensor::ValueBias),
    ("attn_q_norm.weight", LayerTensor::QueryNorm),
    ("attn_k_norm.weight", LayerTensor::KeyNorm),
    ("attn_sinks.weight", LayerTensor::Sinks),
    ("attn_output.weight", LayerTensor::AttentionOutput),
    ("attn_output.bias", LayerTensor::AttentionOutputBias),
    ("post_attention_norm.weight", LayerTensor::AttentionOutputNorm),
    ("ffn_norm.weight", LayerTensor::MlpNorm),
    ("ffn_gate_inp.weight", LayerTensor::Router),
    ("ffn_gate_inp.bias", LayerTensor::RouterBias),
    ("ffn_gate.weight", LayerTensor::Gate),
    ("ffn_up.weight", LayerTensor::Up),
    ("ffn_down.weight", LayerTensor::Down),
    ("post_ffw_norm.weight", LayerTensor::MlpOutputNorm),
    ("attn_q_a.weight", LayerTensor::QueryDown),
    ("attn_q_a_norm.weight", LayerTensor::QueryDownNorm),
    ("attn_q_b.weight", LayerTensor::QueryUp),
    ("attn_kv_a_mqa.weight", LayerTensor::KvDown),
    ("attn_kv_a_norm.weight", LayerTensor::KvDownNorm),
    ("attn_kv_b.weight", LayerTensor::KvUp),
    ("exp_probs_b.bias", LayerTensor::ChoiceBias),
    ("ffn_gate_shexp.weight", LayerTensor::SharedGate),
    ("ffn_up_shexp.weight", LayerTensor::SharedUp),
    ("ffn_down_shexp.weight", LayerTensor::SharedDown),
    ("attn_qkv.weight", LayerTensor::DeltaQkv),
    ("attn_gate.weight", LayerTensor::DeltaZ),
    ("ssm_beta.weight", LayerTensor::DeltaB),
    ("ssm_alpha.weight", LayerTensor::DeltaA),
    ("ssm_conv1d.weight", LayerTensor::DeltaConv),
    ("ssm_a", LayerTensor::DeltaDecay),
    ("ssm_dt.bias", LayerTensor::DeltaDecayBias),
    ("ssm_norm.weight", LayerTensor::DeltaNorm),
    ("ssm_out.weight", LayerTensor::DeltaOutput),
];

/// Names of tensors that hold one matrix or bias of all experts of a layer, after `blk.N.`.
const EXPERTS: [(&str, ExpertTensor); ExpertTensor::ALL.len()] = [
    ("ffn_gate_exps.weight", ExpertTensor::Gate),
    ("ffn_up_exps.weight", ExpertTensor::Up),
    ("ffn_down_exps.weight", ExpertTensor::Down),
    ("ffn_gate_exps.bias", ExpertTensor::GateBias),
    ("ffn_up_exps.bias", ExpertTensor::UpBias),
    ("ffn_down_exps.bias", ExpertTensor::DownBias),
];

/// What a family calls a layer's tensor.
fn layer_names(family: &GgufFamily) -> impl Iterator<Item = (&'static str, LayerTensor)> {
    // A name of its own takes the place of the tensor's common name, and of what others call by that name.
    let own = family.names;
    let common = LAYER.into_iter();
    let common = common.filter(move |(name, tensor)| !own.iter().any(|(of, its)| of == name || its == tensor));
    let fused = family.fused;
    let common =
        common.filter(move |(name, tensor)| !fused.iter().any(|(of, parts)| of == name || parts.contains(tensor)));
    own.iter().copied().chain(common)
}

/// The layer of a tensor, if it is of one.
pub(super) fn layer(name: &str) -> Option<usize> {
    layer_index(name.strip_prefix("blk.")?.split_once('.')?.0)
}

/// Layer and tensor, if this is a tensor of all experts.
pub(super) fn of_experts(name: &str) -> Option<(usize, ExpertTensor)> {
    let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
    let (_, tensor) = EXPERTS.into_iter().find(|(name, _)| *name == tensor)?;
    Some((layer_index(layer)?, tensor))
}

/// Layer and tensor, if this is several matrices.
pub(super) fn fused(family: &GgufFamily, name: &str) -> Option<(usize, FusedTensor)> {
    let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
    let fused = family.fused.iter().find(|(name, _)| *name == tensor)?;
    Some((layer_index(layer)?, *fused))
}

/// Layer and part, if this is a part of the matrix that makes keys and values out of latents.
pub(super) fn of_latents(name: &str) -> Option<(usize, Part)> {
    let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
    let part = match tensor {
        "attn_k_b.weight" => Part::Keys,
        "attn_v_b.weight" => Part::Values,
        _ => return None,
    };
    Some((layer_index(layer)?, part))
}

/// The canonical name, if this is a tensor that some decoder has.
pub(super) fn canonical(family: &GgufFamily, name: &str) -> Option<TensorName> {
    match name {
        "token_embd.weight" => return Some(TensorName::Embedding),
        "output_norm.weight" => return Some(TensorName::FinalNorm),
        "output.weight" => return Some(TensorName::Output),
        _ => {}
    }
    let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
    let (_, tensor) = layer_names(family).find(|(name, _)| *name == tensor)?;
    Some(TensorName::Layer(layer_index(layer)?, tensor))
}

/// Inverse of [`canonical`], for messages about a file.
pub(super) fn spelled(family: &GgufFamily, name: TensorName) -> String {
    match name {
        TensorName::Embedding => "token_embd.weight".into(),
        TensorName::FinalNorm => "output_norm.weight".into(),
        TensorName::Output => "output.weight".into(),
        TensorName::Layer(layer, tensor) => {
            let fused = family.fused.iter().find(|(_, parts)| parts.contains(&tensor)).map(|(name, _)| *name);
            let own = || layer_names(family).find(|(_, known)| *known == tensor).map(|(name, _)| name);
            of_layer(layer, fused.or_else(own).unwrap_or("?"))
        }
        TensorName::Expert(layer, expert, tensor) => {
            let spelling = EXPERTS.into_iter().find(|(_, known)| *known == tensor);
            format!("blk.{layer}.{} (expert {expert})", spelling.map_or("?", |(name, _)| name))
        }
    }
}

/// A layer's tensor with this name behind the layer's number.
pub(super) fn of_layer(layer: usize, name: &str) -> String {
    format!("blk.{layer}.{name}")
}

/// The error about a tensor of a layer behind the last one.
pub(super) fn of_no_layer(config: &GgufConfig<'_, '_>, name: &str) -> WeightsError {
    config.damaged(format!("tensor {name} is of no layer that {} knows", config.key("block_count")))
}
