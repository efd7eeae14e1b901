//! Qwen3-MoE: Qwen3 with experts in place of most layers' MLPs.
//!
//! "Qwen3 Technical Report" (arXiv:2505.09388); the meaning of the keys: `configuration_qwen3_moe.py` of transformers 5.24.

use super::family::{ConfigFamily, Family, GgufFamily};
use super::mixtral::{GGUF_KEYS, read_experts};
use super::qwen2::read_windows;
use super::qwen3::{QK_NORM, head_norms, need_norms};
use super::{DecoderSpec, ExpertsSpec};
use crate::formats::{JsonObject, WeightsError};

const MLP_ONLY: &str = "mlp_only_layers";

pub(super) const FAMILY: Family = Family {
    config: ConfigFamily {
        class: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        keys: &[
            "decoder_sparse_step",
            "layer_types",
            "max_window_layers",
            MLP_ONLY,
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            // As transformers has called it since version 5.
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
            "sliding_window",
            "use_sliding_window",
            QK_NORM,
        ],
        read,
        ..ConfigFamily::LLAMA
    },
    gguf: Some(GgufFamily {
        architecture: "qwen3moe",
        keys: GGUF_KEYS,
        read: |config, spec| {
            head_norms(spec);
            read_experts(config, spec, true)
        },
        ..GgufFamily::COMMON
    }),
};

fn read(config: &JsonObject, spec: &mut DecoderSpec) -> Result<(), WeightsError> {
    // If absent, transformers uses its class default: heads of 128.
    config.need("head_dim", config.get("head_dim"))?;
    need_norms(config)?;
    head_norms(spec);
    let size = |key: &str| config.need(key, config.size(key)?);
    let (used, ffn) = (size("num_experts_per_tok")?, size("moe_intermediate_size")?);
    let count = match (config.size("num_experts")?, config.size("num_local_experts")?) {
        (Some(a), Some(b)) if a != b => {
            return Err(config.damaged(format!("num_experts is {a} and num_local_experts {b}")));
        }
        (a, b) => config.need("num_experts", a.or(b))?,
    };
    let renormalize = config.need("norm_topk_prob", config.bool("norm_topk_prob")?)?;
    let step = config.size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(config.damaged("decoder_sparse_step is 0"));
    }
    let dense = config.get(MLP_ONLY).map(|list| list.as_array().map(Vec::as_slice));
    let dense = dense.unwrap_or(Some(&[])).ok_or_else(|| config.damaged(format!("{MLP_ONLY} is no list")))?;
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        if (l + 1) % step == 0 && !dense.iter().any(|number| number.as_u64() == Some(l as u64)) {
            layer.ffn = ffn;
            layer.experts = Some(ExpertsSpec::softmax(count, used, renormalize));
        }
    }
    read_windows(config, spec)
}
