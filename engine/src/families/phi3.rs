//! Phi-3 and Phi-4: Llama whose files store query, key and value as one matrix, and gate and up as another; with an optional window for all
//! layers.
//!
//! "Phi-3 Technical Report" (arXiv:2404.14219); the meaning of the keys: `configuration_phi3.py` of transformers 5.24.

use super::LayerTensor::{Gate, Key, Query, Up, Value};
use super::family::{ConfigFamily, Family};
use crate::formats::JsonObject;

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Phi3ForCausalLM",
        model_type: "phi3",
        // `auto_map` names the code from before transformers had this class, and the original context matters to LongRoPE alone.
        keys: &["auto_map", "original_max_position_embeddings", "partial_rotary_factor", "sliding_window"],
        fused: &[("self_attn.qkv_proj.weight", &[Query, Key, Value]), ("mlp.gate_up_proj.weight", &[Gate, Up])],
        read: |config, spec| {
            let window = config.window("sliding_window")?;
            spec.layers.iter_mut().for_each(|layer| layer.attention.window = window);
            Ok(())
        },
        rope: JsonObject::partial_rope,
        ..ConfigFamily::LLAMA
    },
    gguf: None,
};
