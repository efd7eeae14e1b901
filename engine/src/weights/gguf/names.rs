//! llama.cpp's tensor names.

use crate::weights::{LayerTensor, TensorName, layer_index};

/// Per-frequency rotary divisors; metadata that is spelled as a tensor.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

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
    let tensor = match tensor {
        "attn_norm" => LayerTensor::AttentionNorm,
        "attn_q" => LayerTensor::Query,
        "attn_k" => LayerTensor::Key,
        "attn_v" => LayerTensor::Value,
        "attn_output" => LayerTensor::AttentionOutput,
        "ffn_norm" => LayerTensor::MlpNorm,
        "ffn_gate" => LayerTensor::Gate,
        "ffn_up" => LayerTensor::Up,
        "ffn_down" => LayerTensor::Down,
        _ => return None,
    };
    Some(TensorName::Layer(layer_index(layer)?, tensor))
}
