//! The keys that `config.json` may contain.
//!
//! Every key is one of three: read by this crate (for every family, or for this one), known not to affect the computation, or switched off (null, false, zero, empty; features
//! that are on in a Llama must be on). Any other key is refused by name. A key that a newer model needs looks the same as one that has no
//! effect, and a plausible wrong answer is worse than having to delete a line.

use super::json::{JsonObject, is_off};
use crate::formats::WeightsError;

/// Read by `config.rs`, `rope.rs` and `quantized`, for every family.
const READ: &[&str] = &[
    "architectures",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Keys about training, the file's history, generation (determined by `generation_config.json`), and execution in Python.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "attention_dropout",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "mlp_dropout",
    "model_max_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    // Slices of a matrix product in training; the product is the same.
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Factors that have no effect at one.
const NEUTRAL_AT_ONE: &[&str] =
    &["attention_multiplier", "embedding_multiplier", "logits_scaling", "partial_rotary_factor", "residual_multiplier"];

/// On in a Llama: switching them off changes the computation.
const ON: &[&str] = &["causal", "is_causal", "rope", "use_causal_mask", "use_rms_norm", "use_rope"];

/// Advice for unsupported keys that occur in real models.
fn hint(key: &str) -> &'static str {
    match key {
        "sliding_window" => "this family has no sliding window",
        "attention_bias" | "mlp_bias" => "such biases are not implemented",
        "auto_map" => "the model brings its own code, which is never run",
        _ => {
            "it may change the mathematics, so the model is refused rather than computed wrongly; \
              if you know that it does not, delete the key"
        }
    }
}

/// Refuses the first key that is neither known, to every family or to the one that reads `own`, nor switched off.
pub(super) fn check(config: &JsonObject, own: &[&str]) -> Result<(), WeightsError> {
    for (key, value) in config.keys() {
        let known = [READ, HARMLESS, own].iter().any(|keys| keys.contains(&key.as_str()));
        let neutral = NEUTRAL_AT_ONE.contains(&key.as_str()) && value.as_f64() == Some(1.0);
        let on = ON.contains(&key.as_str()) && value.as_bool() == Some(true);
        let off = !NEUTRAL_AT_ONE.contains(&key.as_str()) && !ON.contains(&key.as_str()) && is_off(value);
        if !(known || neutral || on || off) {
            return Err(config.unsupported(format!("{key} = {}", shorten(&value.to_string())), hint(key)));
        }
    }
    Ok(())
}

/// Shortens a value for a message.
fn shorten(text: &str) -> String {
    const SHOWN_MAX: usize = 60;
    if text.chars().count() <= SHOWN_MAX {
        return text.to_owned();
    }
    text.chars().take(SHOWN_MAX).chain("...".chars()).collect()
}
