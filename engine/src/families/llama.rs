//! Llama 1 to 3, and the many models that share its class: every layer attends to all tokens; no biases.
//!
//! Touvron et al., "LLaMA" (arXiv:2302.13971).

use super::family::{ConfigFamily, Family, GgufFamily, RotaryRows};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily { class: "LlamaForCausalLM", model_type: "llama", ..ConfigFamily::LLAMA },
    gguf: Some(GgufFamily {
        architecture: "llama",
        rotary_rows: RotaryRows::Neighbours,
        keys: &[],
        read: |_, _| Ok(()),
    }),
};
