//! llama.cpp's tensor names.

use crate::formats::{LayerTensor, TensorName, layer_index};

/// Per-frequency rotary divisors: configuration stored as a tensor.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

/// Names of the layers' tensors, between `blk.N.` and `.weight`.
const LAYER: [(&str, LayerTensor); 9] = [
    ("attn_norm", LayerTensor::AttentionNorm),
    ("attn_q", LayerTensor::Query),
    ("attn_k", LayerTensor::Key),
    ("attn_v", LayerTensor::Value),
    ("attn_output", LayerTensor::AttentionOutput),
    ("ffn_norm", LayerTensor::MlpNorm),
    ("ffn_gate", LayerTensor::Gate),
    ("ffn_up", LayerTensor::Up),
    ("ffn_down", LayerTensor::Down),
];

/// The canonical name, if this is a tensor of a Llama-family decoder.
pub(super) fn canonical(name: &str) -> Option<TensorName> {
    let name = name.strip_suffix(".weight")?;
    match name {
        "token_embd" => return Some(TensorName::Embedding),
        "output_norm" => return Some(TensorName::FinalNorm),
        "output" => return Some(TensorName::Output),
        _ => {}
    }
    let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
    let (_, tensor) = LAYER.into_iter().find(|(name, _)| *name == tensor)?;
    Some(TensorName::Layer(layer_index(layer)?, tensor))
}

/// Inverse of [`canonical`], for messages about a file.
pub(super) fn spelled(name: TensorName) -> String {
    match name {
        TensorName::Embedding => "token_embd.weight".into(),
        TensorName::FinalNorm => "output_norm.weight".into(),
        TensorName::Output => "output.weight".into(),
        TensorName::Layer(layer, tensor) => {
            let spelling = LAYER.into_iter().find(|(_, known)| *known == tensor);
            format!("blk.{layer}.{}.weight", spelling.map_or("?", |(name, _)| name))
        }
    }
}
