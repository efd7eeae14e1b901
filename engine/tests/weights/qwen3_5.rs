//! What the keys and tensors of Qwen3.5 make of the common decoder, alone and inside a model of images.

use crate::families::{fixture, open, refused};
use crate::folder::Folder;
use baton_engine::families::{GatedDeltaSpec, QueryKeyNorm, RopeScaling};
use baton_engine::formats::HuggingFaceModel;
use baton_types::{Dtype, GroupKind};
use serde_json::{Value, json};

const DELTA: GatedDeltaSpec =
    GatedDeltaSpec { key_heads: 2, value_heads: 4, key_dim: 6, value_dim: 5, taps: 4, length_eps: 1e-6 };

fn edit(change: impl FnOnce(&mut Value)) -> impl FnOnce(&mut Folder) {
    move |folder| folder.edit("config.json", change)
}

fn without(key: &str) -> impl FnOnce(&mut Folder) {
    edit(move |config| drop(config.as_object_mut().unwrap().remove(key)))
}

#[test]
fn three_of_four_layers_are_recurrent() {
    let spec = open("qwen3_5", |_| ()).unwrap();
    for (number, layer) in (1usize..).zip(&spec.layers) {
        assert_eq!(layer.delta, (!number.is_multiple_of(4)).then_some(DELTA));
        let attention = &layer.attention;
        assert!(attention.output_gate && attention.query_key_norm == Some(QueryKeyNorm::OfHeads));
        let rope = attention.rope.as_ref().unwrap();
        assert_eq!((attention.head_dim, rope.dim, &rope.scaling), (12, 6, &RopeScaling::None));
    }
    let layout = spec.kv_layout(16, Dtype::Bf16).unwrap();
    let groups: Vec<_> = layout.groups().iter().map(|group| (group.kind, group.layers.clone())).collect();
    assert_eq!(groups, [(GroupKind::Full, vec![3, 7]), (GroupKind::State, vec![0, 1, 2, 4, 5, 6])]);
    // The same without the list.
    let interval = edit(|config| {
        config["layer_types"] = Value::Null;
        config["full_attention_interval"] = json!(4);
    });
    assert_eq!(open("qwen3_5", interval).unwrap(), spec);
}

#[test]
fn lengths_of_queries_and_keys_have_an_epsilon_of_their_own() {
    let spec = open("qwen3_5", edit(|config| config["rms_norm_eps"] = json!(1e-5))).unwrap();
    assert_eq!((spec.final_rms_eps, spec.layers[0].delta), (1e-5, Some(DELTA)));
}

/// The keys of published folders.
#[test]
fn published_configurations_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248_056, "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 248_044,
            "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
            "intermediate_size": 9216, "layer_types": [], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144, "mlp_only_layers": [],
            "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
            "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true, "use_cache": true, "vocab_size": 248_320,
            "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10_000_000, "rope_type": "default"},
        },
        "tie_word_embeddings": true, "transformers_version": "4.57.0.dev0", "video_token_id": 248_057,
        "vision_config": {"depth": 24, "hidden_size": 1024}, "vision_end_token_id": 248_054, "vision_start_token_id": 248_053,
    });
    let kinds = (1..=32).map(|layer| if layer % 4 == 0 { "full_attention" } else { "linear_attention" });
    config["text_config"]["layer_types"] = kinds.collect();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let spec = HuggingFaceModel::read_spec(folder.path()).unwrap();
    assert_eq!((spec.tied, spec.layers[3].attention.rotated()), (true, 64));
    let layout = spec.kv_layout(16, Dtype::Bf16).unwrap();
    let [full, state] = layout.groups() else { panic!("{layout}") };
    assert_eq!((full.layers.len(), full.token_bytes()), (8, 2 * 2 * 4 * 256));
    // A state is 2 MiB of matrices and 3 inputs of 8192 channels.
    assert_eq!((state.layers.len(), state.token_bytes()), (24, 4 * (32 * 128 * 128 + 3 * 8192)));
}

#[test]
fn what_is_absent_or_not_implemented_is_refused_by_name() {
    for key in [
        "head_dim",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "num_key_value_heads",
    ] {
        refused("qwen3_5", without(key), &[&format!("{key} is missing")]);
    }
    for key in ["partial_rotary_factor", "rope_theta"] {
        let change = edit(|config| drop(config["rope_parameters"].as_object_mut().unwrap().remove(key)));
        refused("qwen3_5", change, &[&format!("{key} is missing")]);
    }
    let set = |key: &'static str, value: Value| edit(move |config| config[key] = value);
    refused("qwen3_5", set("attn_output_gate", json!(false)), &["attn_output_gate = false"]);
    refused("qwen3_5", set("attention_bias", json!(true)), &["attention_bias", "not implemented"]);
    refused("qwen3_5", set("layer_types", json!(["full_attention"])), &["layer_types is no list of 8 layers"]);
    refused(
        "qwen3_5",
        set("layer_types", json!(vec!["sliding_attention"; 8])),
        &["sliding_attention", "linear_attention"],
    );
    refused("qwen3_5", set("linear_num_key_heads", json!(3)), &["4 value heads do not divide among 3 key heads"]);
    refused("qwen3_5", set("linear_conv_kernel_dim", json!(3)), &["conv1d.weight", "[44, 1, 4]", "[44, 1, 3]"]);
    let sections = edit(|config| config["rope_parameters"]["mrope_kind"] = json!(1));
    refused("qwen3_5", sections, &["mrope_kind with rope_type `default`"]);
}

#[test]
fn a_model_of_images_around_it_is_left_out() {
    let spec = open("qwen3_5_images", |_| ()).unwrap();
    assert_eq!(spec.layers.iter().map(|layer| layer.delta).collect::<Vec<_>>(), [None, Some(DELTA)]);
    assert_eq!(HuggingFaceModel::read_spec(&fixture("qwen3_5_images")).unwrap(), spec);
    let set = |key: &'static str, value: Value| edit(move |config| config[key] = value);
    let inner = |key: &'static str, value: Value| edit(move |config| config["text_config"][key] = value);
    refused("qwen3_5_images", without("text_config"), &["text_config is missing"]);
    refused("qwen3_5_images", set("model_type", json!("qwen3_5_text")), &["model_type `qwen3_5_text`"]);
    refused("qwen3_5_images", inner("model_type", json!("qwen3_5")), &["model_type `qwen3_5`"]);
    refused("qwen3_5_images", set("tie_word_embeddings", json!(true)), &["tie_word_embeddings is true", "false"]);
    refused("qwen3_5_images", set("audio_config", json!({"depth": 1})), &["audio_config"]);
    refused("qwen3_5_images", inner("audio_config", json!({"depth": 1})), &["audio_config"]);
    // A decoder alone has none of its keys.
    let alone = set("architectures", json!(["Qwen3_5ForCausalLM"]));
    refused("qwen3_5_images", alone, &["image_token_id"]);
}
