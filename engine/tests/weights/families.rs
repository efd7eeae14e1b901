//! What each family's own keys and tensors make of the common decoder. That the result computes the family's logits is shown by the unit
//! tests of the forward pass, on the same fixtures.

use crate::folder::Folder;
use baton_engine::families::DecoderSpec;
use baton_engine::formats::{GgufModel, ModelSource};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(name)
}

fn open(family: &str, change: impl FnOnce(&mut Folder)) -> Result<DecoderSpec, String> {
    let mut folder = Folder::of(&fixture(family));
    change(&mut folder);
    folder.open().map(|model| model.spec().clone()).map_err(|error| error.to_string())
}

fn refused(family: &str, change: impl FnOnce(&mut Folder), parts: &[&str]) {
    let message = open(family, change).expect_err("it is not refused");
    assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} is not in: {message}");
}

fn windows(spec: &DecoderSpec) -> Vec<Option<u32>> {
    spec.layers.iter().map(|layer| layer.attention.window).collect()
}

/// Bits of every tensor.
fn tensors(source: &dyn ModelSource) -> Vec<Vec<u32>> {
    let bits = |name| source.tensor(name).unwrap().into_iter().map(f32::to_bits).collect();
    source.spec().tensor_names().map(bits).collect()
}

#[test]
fn mistral_has_one_window_or_none() {
    assert_eq!(windows(&open("mistral", |_| ()).unwrap()), [Some(7); 2]);
    let none = open("mistral", |f| f.config("sliding_window", json!(null))).unwrap();
    assert_eq!(windows(&none), [None; 2]);
    let unset = |f: &mut Folder| f.edit("config.json", |c| drop(c.as_object_mut().unwrap().remove("sliding_window")));
    refused("mistral", unset, &["MistralForCausalLM", "sliding_window"]);
    refused("mistral", |f| f.config("sliding_window", json!(0)), &["window is 0"]);
    refused("mistral", |f| f.config("sliding_window", json!(1u64 << 32)), &["sliding_window is no number of tokens"]);
    refused("mistral", |f| f.config("num_key_value_heads", json!(null)), &["num_key_value_heads is missing"]);
    refused("mistral", |f| f.config("use_sliding_window", json!(true)), &["use_sliding_window", "not supported"]);
}

#[test]
fn qwen2_has_biases_and_windows_by_layer() {
    let spec = open("qwen2", |_| ()).unwrap();
    assert_eq!(windows(&spec), [None, Some(7), Some(7)]);
    assert!(spec.layers.iter().all(|layer| layer.attention.qkv_bias && !layer.attention.head_norm));
    assert!(spec.tied);

    let with = |pairs: &[(&str, Value)]| {
        open("qwen2", |f| pairs.iter().for_each(|(key, value)| f.config(key, value.clone()))).map(|spec| windows(&spec))
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    assert_eq!(with(&[("layer_types", json!(null))]).unwrap(), [None, Some(7), Some(7)], "from max_window_layers on");
    let from_2 = [("layer_types", json!(null)), ("max_window_layers", json!(2))];
    assert_eq!(with(&from_2).unwrap(), [None, None, Some(7)]);
    let listed = [("layer_types", json!([sliding, full, full]))];
    assert_eq!(with(&listed).unwrap(), [Some(7), None, None], "the list counts more than max_window_layers");
    let off = [("layer_types", json!(null)), ("use_sliding_window", json!(false))];
    assert_eq!(with(&off).unwrap(), [None; 3]);
    let no_size = [("layer_types", json!(null)), ("sliding_window", json!(null))];
    assert_eq!(with(&no_size).unwrap(), [None; 3]);

    for (pairs, part) in [
        (vec![("use_sliding_window", json!(false))], "layer_types has a window"),
        (vec![("layer_types", json!([full]))], "no list of 3 layers"),
        (vec![("layer_types", json!(full))], "no list of 3 layers"),
        (vec![("layer_types", json!([full, full, "chunked_attention"]))], "chunked_attention"),
        (vec![("layer_types", json!(null)), ("max_window_layers", json!(null))], "max_window_layers is missing"),
        (vec![("num_key_value_heads", json!(null))], "num_key_value_heads is missing"),
        (vec![("model_type", json!("mistral"))], "model_type"),
        (vec![("attention_bias", json!(true))], "attention_bias"),
    ] {
        let message = with(&pairs).unwrap_err();
        assert!(message.contains(part), "{part} is not in: {message}");
    }
    let unset = |f: &mut Folder| f.edit("config.json", |c| drop(c.as_object_mut().unwrap().remove("sliding_window")));
    refused("qwen2", unset, &["sliding_window is missing"]);
    refused(
        "qwen2",
        |f| f.drop_tensor("model.layers.1.self_attn.v_proj.bias"),
        &["1.self_attn.v_proj.bias is missing"],
    );
    let shorter = |f: &mut Folder| {
        f.drop_tensor("model.layers.1.self_attn.k_proj.bias");
        f.add("model.layers.1.self_attn.k_proj.bias", "F32", &[8], &[0; 32]);
    };
    refused("qwen2", shorter, &["k_proj.bias has shape [8]", "[16]"]);
}

#[test]
fn a_gguf_file_of_qwen2_has_the_same_tensors_and_no_windows() {
    let gguf = GgufModel::open(&fixture("qwen2.gguf"), None).unwrap();
    let folder = Folder::of(&fixture("qwen2")).open().unwrap();
    let mut spec = folder.spec().clone();
    spec.layers.iter_mut().for_each(|layer| layer.attention.window = None);
    assert_eq!(gguf.spec(), &spec);
    assert_eq!(tensors(&gguf), tensors(&folder));
}

#[test]
fn qwen3_has_norms_of_heads_and_heads_of_any_size() {
    let spec = open("qwen3", |_| ()).unwrap();
    for layer in &spec.layers {
        assert!(layer.attention.head_norm && !layer.attention.qkv_bias);
        assert_eq!((spec.hidden, layer.attention.heads, layer.attention.head_dim), (32, 4, 16));
    }
    assert_eq!(windows(&spec), [None; 2]);
    refused("qwen3", |f| f.config("head_dim", json!(null)), &["head_dim is missing"]);
    refused("qwen3", |f| f.config("attention_bias", json!(true)), &["attention_bias", "not supported"]);
    let window = open("qwen3", |f| {
        f.config("use_sliding_window", json!(true));
        f.config("sliding_window", json!(9));
        f.config("layer_types", json!(["full_attention", "sliding_attention"]));
    });
    assert_eq!(windows(&window.unwrap()), [None, Some(9)]);
    refused("qwen3", |f| f.drop_tensor("model.layers.0.self_attn.q_norm.weight"), &["q_norm.weight is missing"]);
    refused("qwen3", |f| f.add("model.layers.0.self_attn.q_proj.bias", "F32", &[64], &[0; 256]), &["q_proj.bias"]);
}

#[test]
fn a_gguf_file_of_qwen3_is_the_same_model() {
    let gguf = GgufModel::open(&fixture("qwen3.gguf"), None).unwrap();
    let folder = Folder::of(&fixture("qwen3")).open().unwrap();
    assert_eq!(gguf.spec(), folder.spec());
    assert_eq!(tensors(&gguf), tensors(&folder));
}
