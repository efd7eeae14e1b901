//! OLMo 2: Llama with the norms behind attention and MLP instead of before them, and one norm of all queries and one of all keys.
//!
//! "2 OLMo 2 Furious" (arXiv:2501.00656); the names of tensors: `modeling_olmo2.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily};
use super::{DecoderSpec, LayerNorms, LayerTensor, QueryKeyNorm};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Olmo2ForCausalLM",
        model_type: "olmo2",
        names: &[
            (LayerTensor::AttentionOutputNorm, "post_attention_layernorm.weight"),
            (LayerTensor::MlpOutputNorm, "post_feedforward_layernorm.weight"),
        ],
        read: |_, spec| {
            norms(spec);
            Ok(())
        },
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "olmo2",
        read: |_, spec| {
            norms(spec);
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};

fn norms(spec: &mut DecoderSpec) {
    for layer in &mut spec.layers {
        layer.norms = LayerNorms::Behind;
        layer.attention.query_key_norm = Some(QueryKeyNorm::OfAll);
    }
}
