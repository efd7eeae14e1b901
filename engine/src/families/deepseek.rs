//! DeepSeek V2 and V3: latent attention, experts in all layers but the first, and an expert that all tokens use.
//!
//! "DeepSeek-V2" (arXiv:2405.04434) and "DeepSeek-V3 Technical Report" (arXiv:2412.19437); the meaning of the keys: `configuration_deepseek_v2.py` and
//! `configuration_deepseek_v3.py` of transformers 5.24, and of those of GGUF files llama.cpp's `deepseek2`.

use super::family::{ConfigFamily, Family, GgufFamily, RotaryRows};
use super::{
    Choice, DecoderSpec, ExpertGroups, ExpertsSpec, LatentSpec, Rope, RopeScaling, Scoring, YARN_LOG_MULTIPLIER,
    attention_scale, yarn_amplitude,
};
use crate::formats::{GgufConfig, JsonObject, WeightsError};

/// Epsilon of the norms of compressed vectors, whatever `rms_norm_eps` is: the default of the class in transformers.
const COMPRESSED_EPS: f32 = 1e-6;

/// Key of GGUF files: of the logarithm of YaRN's factor, for the temperature of attention.
const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

pub(super) const V2: Family = Family {
    config: ConfigFamily {
        class: "DeepseekV2ForCausalLM",
        model_type: "deepseek_v2",
        keys: KEYS,
        read: |config, spec| read(config, spec, Version::V2),
        rope,
        rotary_rows: RotaryRows::Neighbours,
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "deepseek2",
        rotary_rows: RotaryRows::Neighbours,
        reads_lengths: true,
        keys: &[
            "attention.key_length_mla",
            "attention.kv_lora_rank",
            "attention.q_lora_rank",
            "attention.value_length_mla",
            "expert_count",
            "expert_feed_forward_length",
            "expert_gating_func",
            "expert_group_count",
            "expert_group_used_count",
            "expert_shared_count",
            "expert_used_count",
            "expert_weights_norm",
            "expert_weights_scale",
            "leading_dense_block_count",
            LOG_MULTIPLIER,
        ],
        read: read_gguf,
        ..GgufFamily::COMMON
    }),
};

/// V3, V3.1 and R1. Its GGUF files have the architecture of V2.
pub(super) const V3: Family = Family {
    config: ConfigFamily {
        class: "DeepseekV3ForCausalLM",
        model_type: "deepseek_v3",
        keys: KEYS,
        read: |config, spec| read(config, spec, Version::V3),
        rope,
        rotary_rows: RotaryRows::Neighbours,
        extra_layers: &["num_nextn_predict_layers", "num_mtp_layers"],
        ..ConfigFamily::LLAMA
    },
    gguf: None,
};

const KEYS: &[&str] = &[
    // The code from before transformers had this class.
    "auto_map",
    "aux_loss_alpha",
    // How training and serving in Python divided experts.
    "ep_size",
    "first_k_dense_replace",
    "kv_lora_rank",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_router_logits",
    "q_lora_rank",
    // The sum of the next two.
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "routed_scaling_factor",
    "scoring_func",
    "seq_aux",
    "topk_group",
    "topk_method",
    "v_head_dim",
];

#[derive(Clone, Copy, PartialEq)]
enum Version {
    V2,
    V3,
}

fn rope(config: &JsonObject, _head_dim: usize) -> Result<Rope, WeightsError> {
    config.rope(config.need("qk_rope_head_dim", config.size("qk_rope_head_dim")?)?)
}

fn read(config: &JsonObject, spec: &mut DecoderSpec, version: Version) -> Result<(), WeightsError> {
    check_variant(config, version)?;
    let size = |key: &str| config.need(key, config.size(key)?);
    // If absent, transformers uses its class default, and null says that queries are not compressed.
    if !config.keys().contains_key("q_lora_rank") {
        return Err(config.damaged("q_lora_rank is missing; null if queries are not compressed"));
    }
    let latent = LatentSpec {
        query_rank: config.size("q_lora_rank")?,
        rank: size("kv_lora_rank")?,
        value_dim: size("v_head_dim")?,
        rms_eps: COMPRESSED_EPS,
    };
    let head_dim = size("qk_nope_head_dim")?.saturating_add(size("qk_rope_head_dim")?);
    if let Some(other) = config.size("qk_head_dim")?.filter(|other| *other != head_dim) {
        return Err(config.damaged(format!("qk_head_dim is {other}, its parts together are {head_dim}")));
    }
    let scaling = config.object("rope_scaling")?.or(config.object("rope_parameters")?);
    let all_dim = scaling.map(|scaling| scaling.float("mscale_all_dim")).transpose()?.flatten();
    set_attention(spec, latent, head_dim, YARN_LOG_MULTIPLIER * f64::from(all_dim.unwrap_or(0.0)));

    let float = |key: &str| config.need(key, config.float(key)?);
    let (count, ffn) = (size("n_routed_experts")?, size("moe_intermediate_size")?);
    let groups = |best| -> Result<Option<ExpertGroups>, WeightsError> {
        Ok(some_groups(size("n_group")?, size("topk_group")?, best))
    };
    let (scoring, groups, renormalize) = match version {
        Version::V2 => match config.text("topk_method")? {
            Some("group_limited_greedy") => (Scoring::Softmax, groups(1)?, false),
            _ => (Scoring::Softmax, None, false),
        },
        Version::V3 => (Scoring::Sigmoid, groups(2)?, config.need("norm_topk_prob", config.bool("norm_topk_prob")?)?),
    };
    let factor = float("routed_scaling_factor")?;
    let experts = ExpertsSpec {
        count,
        choice: Choice { used: size("num_experts_per_tok")?, scoring, groups, renormalize, factor },
        choice_bias: version == Version::V3,
        shared_ffn: shared(size("n_shared_experts")?, ffn),
        biases: false,
    };
    for layer in spec.layers.iter_mut().skip(size("first_k_dense_replace")?) {
        (layer.ffn, layer.experts) = (ffn, Some(experts));
    }
    Ok(())
}

/// Refuses what is not implemented, all of it in one message.
fn check_variant(config: &JsonObject, version: Version) -> Result<(), WeightsError> {
    let mut refused = Vec::new();
    let mut text = |key: &str, known: &[&str]| -> Result<(), WeightsError> {
        if let Some(value) = config.text(key)?.filter(|value| !known.contains(value)) {
            refused.push(format!("{key} `{value}` ({} is implemented)", known.join(" and ")));
        }
        Ok(())
    };
    match version {
        Version::V2 => {
            text("scoring_func", &["softmax"])?;
            text("topk_method", &["greedy", "group_limited_greedy"])?;
            // The authors' code leaves the factor out then, transformers does not renormalize.
            if config.bool("norm_topk_prob")? == Some(true) {
                refused.push("norm_topk_prob `true`, which has two meanings in V2".into());
            }
        }
        Version::V3 => {
            text("scoring_func", &["sigmoid"])?;
            text("topk_method", &["noaux_tc"])?;
        }
    }
    if config.bool("rope_interleave")? == Some(false) {
        refused.push("rope_interleave `false`".into());
    }
    if let Some(step) = config.size("moe_layer_freq")?.filter(|step| *step != 1) {
        refused.push(format!("moe_layer_freq {step} (1 is implemented)"));
    }
    if let (Some(heads), Some(kv)) = (config.size("num_attention_heads")?, config.size("num_key_value_heads")?)
        && heads != kv
    {
        refused.push(format!("num_key_value_heads {kv} of {heads} heads (all heads share one latent)"));
    }
    if refused.is_empty() {
        return Ok(());
    }
    Err(config.unsupported(refused.join(", "), "the published models of DeepSeek V2, V3 and R1 have other values"))
}

/// `log_multiplier`: of the logarithm of YaRN's factor, for the scores.
fn set_attention(spec: &mut DecoderSpec, latent: LatentSpec, head_dim: usize, log_multiplier: f64) {
    for layer in &mut spec.layers {
        let attention = &mut layer.attention;
        (attention.kv_heads, attention.head_dim, attention.latent) = (attention.heads, head_dim, Some(latent));
        // YaRN's temperature of attention, once for the query and once for the key.
        let temperature = match &attention.rope {
            Some(Rope { scaling: RopeScaling::Yarn { factor, .. }, .. }) => yarn_amplitude(*factor, log_multiplier),
            _ => 1.0,
        };
        attention.scale = (f64::from(attention_scale(head_dim)) * temperature * temperature) as f32;
    }
}

/// All experts in one group are in none.
fn some_groups(count: usize, used: usize, best: usize) -> Option<ExpertGroups> {
    (count != 1).then_some(ExpertGroups { count, used, best })
}

fn shared(count: usize, ffn: usize) -> Option<usize> {
    (count > 0).then(|| count.saturating_mul(ffn))
}

fn read_gguf(config: &GgufConfig<'_, '_>, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    let heads_of = |key: &str, without: &str| match config.own_size_or(key, 0)? {
        // Files from before llama.cpp absorbed the products have a head's own lengths.
        0 => config.own_size(without),
        length => Ok(length),
    };
    let head_dim = heads_of("attention.key_length_mla", "attention.key_length")?;
    let query_rank = Some(config.own_size_or("attention.q_lora_rank", 0)?).filter(|rank| *rank > 0);
    let latent = LatentSpec {
        query_rank,
        rank: config.own_size("attention.kv_lora_rank")?,
        value_dim: heads_of("attention.value_length_mla", "attention.value_length")?,
        rms_eps: spec.final_rms_eps,
    };
    let log_multiplier = config.own_float(LOG_MULTIPLIER)?.unwrap_or(0.0);
    // Files of other models with this architecture have ten times the number.
    if !(0.0..=0.5).contains(&log_multiplier) {
        let what = format!("{LOG_MULTIPLIER} of {log_multiplier}");
        return Err(config.unsupported(what, "a tenth of mscale_all_dim is needed, as in files of DeepSeek"));
    }
    set_attention(spec, latent, head_dim, f64::from(log_multiplier));
    // Their temperature of attention is a factor of the scores alone.
    for rope in spec.layers.iter_mut().filter_map(|layer| layer.attention.rope.as_mut()) {
        if let RopeScaling::Yarn { amplitude, .. } = &mut rope.scaling {
            *amplitude = 1.0;
        }
    }

    let (count, ffn) = (config.own_size("expert_count")?, config.own_size("expert_feed_forward_length")?);
    let scoring = match config.own_size_or("expert_gating_func", 1)? {
        1 => Scoring::Softmax,
        2 => Scoring::Sigmoid,
        other => return Err(config.unsupported(format!("expert_gating_func {other}"), "1 and 2 are implemented")),
    };
    let group_count = config.own_size_or("expert_group_count", 0)?;
    if group_count == 0 && query_rank.is_some() {
        let hint =
            "files from before llama.cpp wrote it do not say which experts a token may use; convert the model again";
        return Err(config.unsupported("a file without expert_group_count", hint));
    }
    let best = if scoring == Scoring::Sigmoid { 2 } else { 1 };
    let groups = some_groups(group_count.max(1), config.own_size_or("expert_group_used_count", 1)?, best);
    let factor = config.own_float("expert_weights_scale")?.filter(|factor| *factor != 0.0).unwrap_or(1.0);
    let renormalize = config.own_bool_or("expert_weights_norm", false)?;
    let experts = ExpertsSpec {
        count,
        choice: Choice { used: config.own_size("expert_used_count")?, scoring, groups, renormalize, factor },
        choice_bias: scoring == Scoring::Sigmoid,
        shared_ffn: shared(config.own_size_or("expert_shared_count", 0)?, ffn),
        biases: false,
    };
    for layer in spec.layers.iter_mut().skip(config.own_size_or("leading_dense_block_count", 0)?) {
        (layer.ffn, layer.experts) = (ffn, Some(experts));
    }
    Ok(())
}
