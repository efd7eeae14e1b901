//! Quantized linears of Hugging Face folders: in which format they are loaded, and what is refused. That their values are right is shown by the
//! unit tests of the forward pass, on the same fixtures.

use crate::folder::Folder;
use baton_engine::families::{LayerTensor, TensorName};
use baton_engine::formats::{HuggingFaceModel, ModelSource};
use baton_kernels::storage::StorageFormat;
use serde_json::{Value, json};
use std::path::Path;

const QUERY: &str = "model.layers.0.self_attn.q_proj";

fn changed(name: &str, change: impl FnOnce(&mut Folder)) -> Folder {
    let mut folder = Folder::of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(name));
    change(&mut folder);
    folder
}

/// Changes a key of `quantization_config`.
fn set(folder: &mut Folder, key: &str, value: Value) {
    folder.edit("config.json", |config| config["quantization_config"][key] = value);
}

fn query(model: &HuggingFaceModel) -> Result<StorageFormat, String> {
    let stored = model.stored(TensorName::Layer(0, LayerTensor::Query));
    stored.map(|stored| stored.format).map_err(|error| error.to_string())
}

fn format(name: &str, change: impl FnOnce(&mut Folder)) -> Result<StorageFormat, String> {
    query(&changed(name, change).open().unwrap())
}

/// Replaces a tensor of the first query by one of this type, shape and content.
fn part(folder: &mut Folder, part: &str, dtype: &str, shape: &[usize], bytes: &[u8]) {
    let name = format!("{QUERY}.{part}");
    folder.drop_tensor(&name);
    folder.add(&name, dtype, shape, bytes);
}

#[test]
fn integers_are_kept_where_a_format_holds_them_exactly() {
    assert_eq!(format("gptq", |_| ()), Ok(StorageFormat::Q4_0));
    // Without the implied zero point.
    let uneven = |f: &mut Folder| part(f, "qzeros", "I32", &[2, 8], &[0x75; 64]);
    assert_eq!(format("gptq", uneven), Ok(StorageFormat::Q8_0));
    assert_eq!(format("gptq", |f| f.drop_tensor(&format!("{QUERY}.g_idx"))), Ok(StorageFormat::Q4_0));
    assert_eq!(format("gptq_order", |_| ()), Ok(StorageFormat::F32));
    // 1.0 is a number of f16, 2^-100 is none.
    for (exponent, expected) in [(127u32, StorageFormat::Q4_0), (27, StorageFormat::F32)] {
        let scales = (exponent << 23).to_le_bytes().repeat(2 * 64);
        assert_eq!(format("gptq", |f| part(f, "scales", "F32", &[2, 64], &scales)), Ok(expected));
    }
    let halves = |f: &mut Folder| {
        set(f, "group_size", json!(16));
        for tensor in ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"] {
            for layer in 0..2 {
                let name = |part: &str| format!("model.layers.{layer}.{tensor}_proj.{part}");
                for (part, dtype) in [("qzeros", "I32"), ("scales", "F16")] {
                    let bytes = f.tensor_bytes(&name(part)).repeat(2);
                    let columns = f.tensor_bytes(&name("bias")).len() / if part == "qzeros" { 16 } else { 2 };
                    let each = if part == "qzeros" { 4 } else { 2 };
                    f.drop_tensor(&name(part));
                    f.add(&name(part), dtype, &[bytes.len() / columns / each, columns], &bytes);
                }
                f.drop_tensor(&name("g_idx"));
            }
        }
    };
    assert_eq!(format("gptq", halves), Ok(StorageFormat::F32), "groups of 16");
    for fp8 in ["fp8_block", "fp8_tensor", "compressed_fp8"] {
        let model = changed(fp8, |_| ()).open().unwrap();
        assert!(query(&model) == Ok(StorageFormat::F32) && !model.is_quantized(), "{fp8}");
    }
    assert!(changed("gptq", |_| ()).open().unwrap().is_quantized());
}

#[test]
fn schemes_that_are_not_implemented_are_refused_by_name() {
    let cases: [(&str, &str, Value); 24] = [
        ("gptq", "quant_method", json!("bitsandbytes")),
        ("gptq", "bits", json!(8)),
        ("gptq", "checkpoint_format", json!("marlin")),
        ("gptq", "is_marlin_format", json!(true)),
        ("gptq", "pack_dtype", json!("int64")),
        ("gptq", "dynamic", json!({"-:.*": {}})),
        ("gptq", "group_size", json!(0)),
        ("gptq", "group_size", json!("many")),
        ("gptq", "group_size", Value::Null),
        ("gptq", "quant_method", Value::Null),
        ("gptq", "quant_method", json!("awq")),
        ("fp8_block", "fmt", json!("e5m2")),
        ("fp8_block", "weight_block_size", json!([32])),
        ("fp8_block", "weight_block_size", json!([0, 32])),
        ("fp8_block", "expert_dtype", json!("fp4")),
        ("fp8_tensor", "kv_cache_scheme", json!("static")),
        ("compressed_fp8", "format", json!("pack-quantized")),
        ("compressed_fp8", "kv_cache_scheme", json!({"num_bits": 8})),
        ("compressed_fp8", "quantization_status", json!("frozen")),
        ("compressed_fp8", "sparsity_config", json!({"format": "sparse-24-bitmask"})),
        ("compressed_fp8", "config_groups", Value::Null),
        ("compressed_fp8", "config_groups", json!({})),
        ("compressed_fp8", "config_groups", json!({"group_0": {"weights": {"num_bits": 4, "type": "float"}}})),
        ("compressed_fp8", "config_groups", json!({"group_0": {"weights": {"num_bits": 8, "type": "int"}}})),
    ];
    for (name, key, value) in cases {
        let folder = changed(name, |f| set(f, key, value.clone()));
        let told = folder.open().map(drop).unwrap_err().to_string();
        assert_eq!(HuggingFaceModel::read_spec(folder.path()).unwrap_err().to_string(), told, "without weights");
        let named = match key {
            "quant_method" if value == json!("awq") => "damp_percent",
            "config_groups" if value == json!({}) => "config_groups",
            "config_groups" if value.is_object() => "weights",
            other => other,
        };
        assert!(told.contains("config.json: quantization_config") && told.contains(named), "{key} = {value}: {told}");
    }
    for (key, value) in
        [("bits", json!(8)), ("version", json!("gemv")), ("zero_point", json!(false)), ("group_size", json!(null))]
    {
        let mut awq =
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm"});
        awq[key] = value;
        let told = changed("gptq", |f| f.config("quantization_config", awq)).open().map(drop).unwrap_err().to_string();
        assert!(told.contains(key), "{told}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let refused = |name: &str, change: &dyn Fn(&mut Folder), says: &str| {
        let told = changed(name, change).open().map(drop).unwrap_err().to_string();
        assert!(told.contains(&format!("{QUERY}.")) && told.contains(says), "{says:?} is not in: {told}");
    };
    let without = |part: &'static str| move |f: &mut Folder| f.drop_tensor(&format!("{QUERY}.{part}"));
    refused("gptq", &without("scales"), "scales are missing");
    refused("gptq", &without("qzeros"), "zero points are missing");
    refused("gptq", &without("qweight"), "no quantized weight");
    refused("fp8_block", &without("weight_scale_inv"), "scales are missing");
    refused("fp8_block", &without("weight"), "no quantized weight");
    refused("gptq", &|f| part(f, "qweight", "F32", &[8, 64], &[0; 2048]), "F32");
    refused("gptq", &|f| part(f, "qweight", "I32", &[8, 32], &[0; 1024]), "scales have shape [2, 64]");
    refused("gptq", &|f| part(f, "qweight", "I32", &[512], &[0; 2048]), "weight has shape [512]");
    refused("gptq", &|f| part(f, "scales", "F16", &[1, 64], &[0; 128]), "[2, 64] is needed");
    refused("gptq", &|f| part(f, "scales", "I32", &[2, 64], &[0; 512]), "scales are of type I32");
    refused("gptq", &|f| part(f, "qzeros", "I32", &[2, 4], &[0; 32]), "I32 of [2, 8] is needed");
    refused("gptq", &|f| part(f, "g_idx", "I32", &[32], &[0; 128]), "I32 of [64] is needed");
    refused("gptq", &|f| part(f, "bias", "F16", &[64], &[1; 128]), "q_proj.bias is not supported");
    refused("fp8_block", &|f| part(f, "weight_scale_inv", "F32", &[3, 2], &[0; 24]), "[3, 2]");
    let wide = |f: &mut Folder| {
        part(f, "weight", "F8_E4M3", &[96, 48], &[0; 96 * 48]);
        part(f, "weight_scale_inv", "F32", &[3, 1], &[0; 12]);
    };
    refused("fp8_block", &wide, "config.json asks for [64, 64]");
    let norm = |f: &mut Folder| f.add("model.norm.weight_scale", "F32", &[1], &[0; 4]);
    let told = changed("fp8_block", norm).open().map(drop).unwrap_err().to_string();
    assert!(told.contains("model.norm.weight") && told.contains("no quantized weight"), "{told}");
}

#[test]
fn values_that_are_no_numbers_are_refused_when_they_are_read() {
    let refused = |name: &str, change: &dyn Fn(&mut Folder), says: &str| {
        let told = format(name, change).unwrap_err();
        assert!(told.contains(&format!("{QUERY}.weight")) && told.contains(says), "{says:?} is not in: {told}");
    };
    refused("fp8_block", &|f| part(f, "weight", "F8_E4M3", &[64, 64], &[0x7f; 4096]), "not finite");
    refused("gptq", &|f| part(f, "scales", "F16", &[2, 64], &[0x7c; 256]), "not finite");
    refused("gptq", &|f| part(f, "qzeros", "I32", &[2, 8], &[0xff; 64]), "gptq_v2");
    refused("gptq", &|f| part(f, "g_idx", "I32", &[64], &[2, 0, 0, 0].repeat(64)), "group 2 of 2");
    let v2 = |f: &mut Folder| {
        set(f, "checkpoint_format", json!("gptq_v2"));
        part(f, "qzeros", "I32", &[2, 8], &[0xff; 64]);
    };
    assert_eq!(format("gptq", v2), Ok(StorageFormat::Q8_0));
}
