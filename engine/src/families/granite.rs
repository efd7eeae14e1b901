//! Granite 3: Llama with factors of the embedding, of what each layer adds, of scores and of logits.
//!
//! "Granite 3.0 Language Models" (IBM, 2024); the meaning of the keys: `configuration_granite.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily, RotaryRows};

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "GraniteForCausalLM",
        model_type: "granite",
        keys: &["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"],
        read: |config, spec| {
            // If absent, transformers uses its class defaults: all 1.
            let factor = |key: &str| Ok(config.float(key)?.unwrap_or(1.0));
            spec.embedding_factor = factor("embedding_multiplier")?;
            spec.logit_factor = 1.0 / factor("logits_scaling")?;
            let (scale, residual) = (factor("attention_multiplier")?, factor("residual_multiplier")?);
            for layer in &mut spec.layers {
                layer.attention.scale = scale;
                layer.residual_factor = residual;
            }
            Ok(())
        },
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "granite",
        rotary_rows: RotaryRows::Neighbours,
        keys: &["attention.scale", "embedding_scale", "logit_scale", "residual_scale"],
        read: |config, spec| {
            // As in llama.cpp, 0 means none.
            let factor = |key: &str| Ok(config.own_float(key)?.filter(|factor| *factor != 0.0));
            spec.embedding_factor = factor("embedding_scale")?.unwrap_or(1.0);
            spec.logit_factor = 1.0 / factor("logit_scale")?.unwrap_or(1.0);
            let (scale, residual) = (factor("attention.scale")?, factor("residual_scale")?.unwrap_or(1.0));
            for layer in &mut spec.layers {
                layer.attention.scale = scale.unwrap_or(layer.attention.scale);
                layer.residual_factor = residual;
            }
            Ok(())
        },
        ..GgufFamily::COMMON
    }),
};
