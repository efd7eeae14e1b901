//! ERNIE 4.5, dense: Llama whose files have rotary partners as neighbours.
//!
//! "ERNIE 4.5 Technical Report" (Baidu, 2025); the meaning of the keys: `configuration_ernie4_5.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily, RotaryRows};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Ernie4_5ForCausalLM",
        model_type: "ernie4_5",
        rotary_rows: RotaryRows::Neighbours,
        read: |config, _| {
            // If absent, transformers uses its class defaults: others than Llama's.
            for key in ["head_dim", "num_key_value_heads", "tie_word_embeddings"] {
                config.need(key, config.get(key))?;
            }
            config.need_theta()
        },
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily { architecture: "ernie4_5", rotary_rows: RotaryRows::Neighbours, ..GgufFamily::COMMON }),
};
