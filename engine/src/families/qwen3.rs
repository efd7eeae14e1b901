//! Qwen3: Llama with an RMSNorm on each head of queries and keys, heads of any size, and Qwen2's windows.
//!
//! "Qwen3 Technical Report" (arXiv:2505.09388); the meaning of the keys: `configuration_qwen3.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily, RotaryRows};
use super::qwen2::{WINDOW_KEYS, read_windows};
use super::{DecoderSpec, QueryKeyNorm};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Qwen3ForCausalLM",
        model_type: "qwen3",
        keys: WINDOW_KEYS,
        read: |config, spec| {
            // If absent, transformers uses its class default: heads of 128.
            config.need("head_dim", config.get("head_dim"))?;
            head_norms(spec);
            read_windows(config, spec)
        },
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "qwen3",
        rotary_rows: RotaryRows::Halves,
        keys: &[],
        read: |_, spec| {
            head_norms(spec);
            Ok(())
        },
    }),
};

pub(super) fn head_norms(spec: &mut DecoderSpec) {
    spec.layers.iter_mut().for_each(|layer| layer.attention.query_key_norm = Some(QueryKeyNorm::OfHeads));
}
