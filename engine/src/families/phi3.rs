//! Phi-3 and Phi-4: Llama whose files store query, key and value as one matrix, and gate and up as another; with an optional window for all
//! layers.
//!
//! "Phi-3 Technical Report" (arXiv:2404.14219); the meaning of the keys: `configuration_phi3.py` of transformers 5.24.

use super::LayerTensor::{Gate, Key, Query, Up, Value};
use super::family::{ConfigFamily, Family, GgufFamily};
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
    gguf: Some(GgufFamily {
        architecture: "phi3",
        fused: &[("attn_qkv.weight", &[Query, Key, Value]), ("ffn_up.weight", &[Gate, Up])],
        keys: &["attention.sliding_window", "rope.scaling.attn_factor"],
        read: |config, spec| {
            // Converters write 0 where there is no window. Files from before they wrote it are refused: some of the models have one.
            let window = Some(config.own_window("attention.sliding_window")?).filter(|window| *window > 0);
            spec.layers.iter_mut().for_each(|layer| layer.attention.window = window);
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};
