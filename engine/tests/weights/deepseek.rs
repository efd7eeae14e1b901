//! What the keys and tensors of DeepSeek's families make of the common decoder. That the result computes their logits is shown by the unit tests of
//! the forward pass, on the same fixtures.

use crate::families::{fixture, open, refused};
use crate::folder::Folder;
use baton_engine::families::{Choice, ExpertGroups, ExpertsSpec, LatentSpec, RopeScaling, Scoring};
use baton_engine::formats::{GgufModel, ModelSource, RandomModel};
use baton_types::{Dtype, GroupKind};
use serde_json::{Value, json};

fn without(key: &str) -> impl FnOnce(&mut Folder) {
    move |folder| folder.edit("config.json", |config| drop(config.as_object_mut().unwrap().remove(key)))
}

#[test]
fn latents_and_experts_are_read() {
    let check = |family: &str, query_rank, experts: ExpertsSpec, log_multiplier: f64, amplitude: f64| {
        let spec = open(family, |_| ()).unwrap();
        let latent = LatentSpec { query_rank, rank: 24, value_dim: 10, rms_eps: 1e-6 };
        for (l, layer) in spec.layers.iter().enumerate() {
            let attention = &layer.attention;
            assert_eq!((attention.latent, attention.head_dim, attention.kv_heads), (Some(latent), 20, 4), "{family}");
            let temperature = log_multiplier * 4f64.ln() + 1.0;
            let scale = temperature * temperature / 20f64.sqrt();
            assert!((f64::from(attention.scale) - scale).abs() < 1e-7, "{family}: {}", attention.scale);
            let rope = attention.rope.as_ref().unwrap();
            let RopeScaling::Yarn { amplitude: found, .. } = rope.scaling else { panic!("{rope:?}") };
            assert!(rope.dim == 8 && (f64::from(found) - amplitude).abs() < 1e-6, "{family}: {rope:?}");
            let expected = if l == 0 { (48, None) } else { (16, Some(experts)) };
            assert_eq!((layer.ffn, layer.experts), expected, "{family}");
        }
        let layout = spec.kv_layout(16, Dtype::Bf16).unwrap();
        let groups = layout.groups().iter().map(|group| (group.kind, group.planes.len())).collect::<Vec<_>>();
        // Latent and rotated key, two bytes each, in three layers.
        assert_eq!((groups, layout.bytes_per_token()), (vec![(GroupKind::Latent, 1)], 3 * (24 + 8) * 2));
    };
    let experts = |count, shared: usize, choice| ExpertsSpec {
        choice,
        shared_ffn: Some(shared * 16),
        ..ExpertsSpec::softmax(count, 3, false)
    };
    let groups = |best| Some(ExpertGroups { count: 4, used: 2, best });
    let m = |mscale: f64| 0.1 * mscale * 4f64.ln() + 1.0;
    check("deepseek_v2", None, experts(6, 2, Choice::softmax(3, false)), 0.0707, m(1.0) / m(0.707));
    let choice = Choice { groups: groups(1), factor: 4.0, ..Choice::softmax(3, false) };
    check("deepseek_v2_groups", Some(20), experts(8, 2, choice), 0.0707, 1.0);
    let choice = Choice { used: 3, scoring: Scoring::Sigmoid, groups: groups(2), renormalize: true, factor: 2.5 };
    check("deepseek_v3", Some(20), ExpertsSpec { choice_bias: true, ..experts(8, 1, choice) }, 0.1, 1.0);
}

/// Bits of every tensor.
fn tensors(source: &dyn ModelSource) -> Vec<Vec<u32>> {
    let bits = |name| source.tensor(name).unwrap().into_iter().map(f32::to_bits).collect();
    source.spec().tensor_names().map(bits).collect()
}

/// Keys and values out of latents as one tensor, and as two.
#[test]
fn gguf_files_are_the_same_models() {
    for family in ["deepseek_v2_groups", "deepseek_v3"] {
        let folder = Folder::of(&fixture(family)).open().unwrap();
        for form in ["", "_joined"] {
            let gguf = GgufModel::open(&fixture(&format!("{family}{form}.gguf")), None).unwrap();
            let mut spec = gguf.spec().clone();
            // The file has the temperature in f32.
            for (layer, of) in spec.layers.iter_mut().zip(&folder.spec().layers) {
                assert!((layer.attention.scale / of.attention.scale - 1.0).abs() < 1e-6);
                layer.attention.scale = of.attention.scale;
            }
            assert_eq!(&spec, folder.spec(), "{family}{form}");
            assert_eq!(tensors(&gguf), tensors(&folder), "{family}{form}");
        }
    }
}

/// A copy of a GGUF file with one key renamed to another of the same length.
pub(crate) fn renamed(file: &str, from: &str, to: &str) -> Result<(), String> {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(fixture(file)).unwrap();
    let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).expect(from);
    bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    GgufModel::open(&path, None).map(drop).map_err(|error| error.to_string())
}

#[test]
fn gguf_files_that_leave_something_open_are_refused() {
    for (from, to, part) in [
        ("deepseek2.expert_group_count", "deepseek2.tensor_data_layout", "expert_group_count"),
        ("blk.1.attn_k_b.weight", "blk.9.attn_k_b.weight", "attn_k_b.weight is missing beside its other part"),
        ("blk.1.attn_k_b.weight", "blk.1.attn_x_b.weight", "attn_x_b.weight is not supported"),
        ("deepseek2.attention.kv_lora_rank", "deepseek2.attention.kv_lora_ranx", "kv_lora_ran"),
    ] {
        let message = renamed("deepseek_v3.gguf", from, to).unwrap_err();
        assert!(message.contains(part), "{from}: {message}");
    }
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let with = |family: &str, key: &str, value: Value, parts: &[&str]| {
        refused(family, |folder| folder.config(key, value), parts);
    };
    for family in ["deepseek_v2", "deepseek_v3"] {
        for key in [
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "first_k_dense_replace",
            "moe_intermediate_size",
            "routed_scaling_factor",
        ] {
            refused(family, without(key), &[key, "is missing"]);
        }
        with(family, "num_key_value_heads", json!(2), &["num_key_value_heads 2 of 4 heads"]);
        with(family, "moe_layer_freq", json!(2), &["moe_layer_freq 2"]);
        with(family, "attention_bias", json!(true), &["attention_bias", "not supported"]);
        with(family, "qk_head_dim", json!(21), &["qk_head_dim is 21"]);
        with(family, "num_experts_per_tok", json!(9), &["experts used is 9"]);
        with(family, "kv_lora_rank", json!(25), &["kv_a_layernorm.weight has shape [24]"]);
        with(family, "kv_lora_rank", json!(0), &["rank of compressed keys and values is 0"]);
    }
    with("deepseek_v2", "scoring_func", json!("sigmoid"), &["scoring_func `sigmoid`"]);
    with("deepseek_v2", "topk_method", json!("noaux_tc"), &["topk_method `noaux_tc`"]);
    with("deepseek_v2", "norm_topk_prob", json!(true), &["norm_topk_prob"]);
    with("deepseek_v2_groups", "n_group", json!(3), &["8 experts do not divide among 3 groups"]);
    with("deepseek_v2_groups", "topk_group", json!(1), &["experts used is 3; 1 to 2"]);
    with("deepseek_v3", "scoring_func", json!("softmax"), &["scoring_func `softmax`"]);
    with("deepseek_v3", "topk_method", json!("greedy"), &["topk_method `greedy`"]);
    with("deepseek_v3", "rope_interleave", json!(false), &["rope_interleave `false`"]);
    with("deepseek_v3", "n_group", json!(8), &["experts by which a group is chosen is 2; 1 to 1"]);
    // All of it in one message.
    let several = |folder: &mut Folder| {
        folder.config("scoring_func", json!("softmax"));
        folder.config("rope_interleave", json!(false));
        folder.config("moe_layer_freq", json!(3));
    };
    refused("deepseek_v3", several, &["scoring_func `softmax`", "rope_interleave `false`", "moe_layer_freq 3"]);
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    refused("deepseek_v3", |folder| folder.drop_tensor(name), &[name, "is missing"]);
    // As the authors' files say it.
    let published = |folder: &mut Folder| {
        folder.config("scoring_func", json!("sigmoid"));
        folder.config("topk_method", json!("noaux_tc"));
        folder.config("moe_layer_freq", json!(1));
        folder.config("ep_size", json!(1));
        folder.config("auto_map", json!({"AutoConfig": "configuration_deepseek.DeepseekV3Config"}));
        folder.config("num_nextn_predict_layers", json!(1));
    };
    assert_eq!(open("deepseek_v3", published), open("deepseek_v3", |_| ()));
}

/// The layers that predict tokens after the next are behind the others, and no more of them than the configuration says.
#[test]
fn layers_for_later_tokens_are_left_out() {
    let extra = |layer: usize| {
        move |folder: &mut Folder| {
            folder.add(&format!("model.layers.{layer}.eh_proj.weight"), "F32", &[32, 64], &[0; 32 * 64 * 4]);
            folder.add(&format!("model.layers.{layer}.mlp.experts.7.up_proj.weight"), "F32", &[1], &[0; 4]);
        }
    };
    assert_eq!(open("deepseek_v3", extra(3)), open("deepseek_v3", |_| ()));
    refused("deepseek_v3", extra(4), &["model.layers.4."]);
    refused("deepseek_v3", extra(2), &["model.layers.2."]);
    refused("deepseek_v2", extra(3), &["model.layers.3."]);
    let none = |folder: &mut Folder| {
        folder.config("num_nextn_predict_layers", json!(0));
        extra(3)(folder);
    };
    refused("deepseek_v3", none, &["model.layers.3."]);
}

/// 70 KB a token where keys and values of all heads would take 5 MB.
#[test]
fn the_published_shape_of_v3_stores_576_numbers_a_layer() {
    let spec = "random:hidden=16,layers=61,heads=128,head_dim=192,rope_dim=64,latent=512,query_rank=16,value_dim=128,ffn=2,vocab=8";
    let model = RandomModel::parse(spec).unwrap();
    let layout = model.spec().kv_layout(64, Dtype::Bf16).unwrap();
    assert_eq!(layout.bytes_per_token(), 61 * 576 * 2);
}
