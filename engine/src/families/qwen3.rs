//! Qwen3: Llama with an RMSNorm on each head of queries and keys, heads of any size, and Qwen2's windows.
//!
//! "Qwen3 Technical Report" (arXiv:2505.09388); the meaning of the keys: `configuration_qwen3.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily};
use super::qwen2::read_windows;
use super::{DecoderSpec, QueryKeyNorm};
use crate::formats::{JsonObject, WeightsError};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Qwen3ForCausalLM",
        model_type: "qwen3",
        keys: KEYS,
        read: |config, spec| {
            need_norms(config)?;
            // If absent, transformers uses its class default: heads of 128.
            config.need("head_dim", config.get("head_dim"))?;
            head_norms(spec);
            read_windows(config, spec)
        },
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "qwen3",
        read: |_, spec| {
            head_norms(spec);
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};

/// In some configurations; the norms are always computed.
pub(super) const QK_NORM: &str = "use_qk_norm";
const KEYS: &[&str] = &["layer_types", "max_window_layers", "sliding_window", "use_sliding_window", QK_NORM];

/// Refuses a model without norms of heads.
pub(super) fn need_norms(config: &JsonObject) -> Result<(), WeightsError> {
    match config.bool(QK_NORM)? {
        Some(false) => Err(config.unsupported("use_qk_norm = false", "Qwen3 has norms of heads")),
        _ => Ok(()),
    }
}

pub(super) fn head_norms(spec: &mut DecoderSpec) {
    spec.layers.iter_mut().for_each(|layer| layer.attention.query_key_norm = Some(QueryKeyNorm::OfHeads));
}
