//! `quantization_config`: what is implemented, and the refusal of everything else by name.

use super::super::json::{JsonObject, is_off};
use super::{Component, int4::Packing};
use crate::families::ConfigFamily;
use crate::formats::WeightsError;
use safetensors::Dtype;
use serde_json::Value;

/// The key of `config.json`.
const CONFIG: &str = "quantization_config";
const METHODS: &str = "`fp8`, `compressed-tensors` of FP8, `gptq` and `awq` of 4 bits are implemented";

/// How a folder stores its quantized linears.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum Scheme {
    /// E4M3, with one scale, or one for each row, or one for each of these blocks of rows and columns.
    Fp8 {
        /// Of rows and columns.
        block: Option<[usize; 2]>,
    },
    /// Integers of 4 bits with a scale and a zero point for so many input features; for all if there is no number.
    Int4 {
        /// Input features of a group.
        group: Option<usize>,
        /// Order of the integers.
        packing: Packing,
    },
}

impl Scheme {
    /// The scheme of `config.json`; `None` if no linear is quantized.
    pub(in super::super) fn read(config: &JsonObject, family: &ConfigFamily) -> Result<Option<Self>, WeightsError> {
        let Some(config) = config.object(CONFIG)? else { return Ok(None) };
        let method = config.need("quant_method", config.text("quant_method")?)?;
        Ok(Some(match method {
            // Tensors of experts, which name themselves; the family checks the rest.
            "mxfp4" if !family.stacked.is_empty() => return Ok(None),
            "fp8" => fp8(&config)?,
            "compressed-tensors" => compressed_tensors(&config)?,
            "gptq" => gptq(&config)?,
            "awq" => awq(&config)?,
            other => return Err(config.unsupported(format!("quant_method `{other}`"), METHODS)),
        }))
    }

    /// The linear's weight that a tensor is a part of, and which; `None` if it is an ordinary tensor.
    pub(in super::super) fn component(self, name: &str, dtype: Dtype) -> Option<(String, Component)> {
        let (base, suffix) = name.rsplit_once('.')?;
        let component = match (self, suffix) {
            (Self::Fp8 { .. }, "weight") if dtype == Dtype::F8_E4M3 => Component::Weight,
            (Self::Fp8 { .. }, "weight_scale_inv" | "weight_scale") => Component::Scales,
            (Self::Fp8 { .. }, "input_scale" | "activation_scale") => Component::Unused,
            (Self::Int4 { .. }, "qweight") => Component::Weight,
            (Self::Int4 { .. }, "scales") => Component::Scales,
            (Self::Int4 { .. }, "qzeros") => Component::ZeroPoints,
            (Self::Int4 { packing: Packing::Gptq { .. }, .. }, "g_idx") => Component::Groups,
            _ => return None,
        };
        Some((format!("{base}.weight"), component))
    }
}

/// Refuses the first key that is neither one of these nor switched off.
fn check_keys(config: &JsonObject, known: &[&str]) -> Result<(), WeightsError> {
    for (key, value) in config.keys() {
        if !known.contains(&key.as_str()) && !is_off(value) {
            let hint = "it may change what the weights mean, so the model is refused rather than computed wrongly";
            return Err(config.unsupported(format!("{key} = {value}"), hint));
        }
    }
    Ok(())
}

/// A value that must be the one that is implemented, where it is given.
fn only(config: &JsonObject, key: &str, implemented: &[Value]) -> Result<(), WeightsError> {
    match config.get(key) {
        Some(value) if !implemented.contains(value) => {
            let hint = format!("{} is implemented", Value::from(implemented));
            Err(config.unsupported(format!("{key} = {value}"), hint))
        }
        _ => Ok(()),
    }
}

fn block(config: &JsonObject, key: &str) -> Result<Option<[usize; 2]>, WeightsError> {
    let Some(value) = config.get(key) else { return Ok(None) };
    let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
    let sizes: Option<Vec<usize>> = value.as_array().and_then(|sizes| sizes.iter().map(size).collect());
    match sizes.as_deref() {
        Some(&[rows, columns]) => Ok(Some([rows, columns])),
        _ => Err(config.damaged(format!("{key} is not two sizes"))),
    }
}

fn fp8(config: &JsonObject) -> Result<Scheme, WeightsError> {
    let known = [
        "quant_method",
        "activation_scheme",
        "weight_block_size",
        "fmt",
        "scale_fmt",
        "dequantize",
        "modules_to_not_convert",
        "ignored_layers",
    ];
    check_keys(config, &known)?;
    only(config, "fmt", &["e4m3".into()])?;
    Ok(Scheme::Fp8 { block: block(config, "weight_block_size")? })
}

fn compressed_tensors(config: &JsonObject) -> Result<Scheme, WeightsError> {
    let known = [
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "quantization_status",
        "global_compression_ratio",
        "version",
        "sparsity_config",
        "transform_config",
    ];
    check_keys(config, &known)?;
    only(config, "format", &["float-quantized".into()])?;
    only(config, "quantization_status", &["compressed".into()])?;
    for key in ["sparsity_config", "transform_config"] {
        only(config, key, &[Value::Object(Default::default())])?;
    }
    let groups = config.need("config_groups", config.object("config_groups")?)?;
    let mut blocks = Vec::new();
    for name in groups.keys().keys() {
        let group = groups.need(name, groups.object(name)?)?;
        let weights = group.need("weights", group.object("weights")?)?;
        only(&group, "format", &["float-quantized".into()])?;
        only(&weights, "num_bits", &[8.into()])?;
        only(&weights, "type", &["float".into()])?;
        only(&weights, "symmetric", &[true.into()])?;
        only(&weights, "dynamic", &[false.into()])?;
        only(&weights, "strategy", &["tensor".into(), "channel".into(), "block".into()])?;
        blocks.push(block(&weights, "block_structure")?);
    }
    match blocks.split_first() {
        Some((first, others)) if others.iter().all(|other| other == first) => Ok(Scheme::Fp8 { block: *first }),
        _ => {
            Err(groups.unsupported(format!("block_structure of {} groups", blocks.len()), "one for all is implemented"))
        }
    }
}

/// Input features of a group; -1 means all.
fn group_size(config: &JsonObject, key: &str) -> Result<Option<usize>, WeightsError> {
    match config.need(key, config.whole(key)?)? {
        -1 => Ok(None),
        size if size > 0 => Ok(Some(size as usize)),
        size => Err(config.damaged(format!("{key} is {size}"))),
    }
}

fn gptq(config: &JsonObject) -> Result<Scheme, WeightsError> {
    let known = [
        "quant_method",
        "bits",
        "group_size",
        "sym",
        "desc_act",
        "checkpoint_format",
        "pack_dtype",
        "is_marlin_format",
        "lm_head",
        // How the integers were found.
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "exllama_config",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "pad_token_id",
        "quantizer",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
        "batch_size",
        "backend",
    ];
    check_keys(config, &known)?;
    only(config, "bits", &[4.into()])?;
    only(config, "pack_dtype", &["int32".into()])?;
    only(config, "is_marlin_format", &[false.into()])?;
    only(config, "checkpoint_format", &["gptq".into(), "gptq_v2".into()])?;
    let less_one = config.text("checkpoint_format")?.unwrap_or("gptq") == "gptq";
    Ok(Scheme::Int4 { group: group_size(config, "group_size")?, packing: Packing::Gptq { less_one } })
}

fn awq(config: &JsonObject) -> Result<Scheme, WeightsError> {
    let known = [
        "quant_method",
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "version",
        "zero_point",
        "modules_to_not_convert",
        "backend",
    ];
    check_keys(config, &known)?;
    for key in ["bits", "w_bit"] {
        only(config, key, &[4.into()])?;
    }
    only(config, "version", &["gemm".into(), "GEMM".into()])?;
    only(config, "zero_point", &[true.into()])?;
    let size = if config.get("q_group_size").is_some() { "q_group_size" } else { "group_size" };
    Ok(Scheme::Int4 { group: group_size(config, size)?, packing: Packing::Awq })
}
