//! Llama 1 to 3, and the many models that share its class: every layer attends to all tokens; no biases.
//!
//! Touvron et al., "LLaMA" (arXiv:2302.13971).

use super::family::{ConfigFamily, Family, GgufFamily, RotaryRows};
use super::mixtral::{GGUF_KEYS, read_experts};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily { class: "LlamaForCausalLM", model_type: "llama", ..ConfigFamily::LLAMA },
    gguf: Some(GgufFamily {
        architecture: "llama",
        rotary_rows: RotaryRows::Neighbours,
        // Files of Mixtral have this architecture too.
        keys: GGUF_KEYS,
        read: |config, spec| read_experts(config, spec, true),
        ..GgufFamily::COMMON
    }),
};
