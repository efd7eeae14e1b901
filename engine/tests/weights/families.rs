//! What each family's own keys and tensors make of the common decoder. That the result computes the family's logits is shown by the unit
//! tests of the forward pass, on the same fixtures.

use crate::folder::Folder;
use baton_engine::families::{
    Activation, DecoderSpec, ExpertTensor, ExpertsSpec, LayerNorms, QueryKeyNorm, RopeScaling, TensorName,
};
use baton_engine::formats::{GgufModel, ModelSource};
use baton_kernels::storage::StorageFormat;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(name)
}

pub(crate) fn open(family: &str, change: impl FnOnce(&mut Folder)) -> Result<DecoderSpec, String> {
    let mut folder = Folder::of(&fixture(family));
    change(&mut folder);
    folder.open().map(|model| model.spec().clone()).map_err(|error| error.to_string())
}

pub(crate) fn refused(family: &str, change: impl FnOnce(&mut Folder), parts: &[&str]) {
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
    assert!(spec.layers.iter().all(|layer| layer.attention.qkv_bias && layer.attention.query_key_norm.is_none()));
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
        assert!(layer.attention.query_key_norm == Some(QueryKeyNorm::OfHeads) && !layer.attention.qkv_bias);
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
fn gguf_files_are_the_same_models() {
    for family in [
        "ernie4_5",
        "gemma2",
        "gemma3",
        "granite",
        "mixtral",
        "olmo2",
        "phi3",
        "phi4_long",
        "phi4_mini",
        "qwen3",
        "qwen3_moe",
    ] {
        let gguf = GgufModel::open(&fixture(&format!("{family}.gguf")), None).unwrap();
        let folder = Folder::of(&fixture(family)).open().unwrap();
        assert_eq!(gguf.spec(), folder.spec(), "{family}");
        assert_eq!(tensors(&gguf), tensors(&folder), "{family}");
    }
}

/// Files have the divisors of the frequencies in place of what they are computed from.
#[test]
fn a_gguf_file_of_llama_3_has_the_same_tensors_and_its_divisors() {
    let gguf = GgufModel::open(&fixture("llama3.gguf"), None).unwrap();
    let folder = Folder::of(&fixture("llama3")).open().unwrap();
    let scaling = |source: &dyn ModelSource| source.spec().layers[0].attention.rope.as_ref().unwrap().scaling.clone();
    assert!(matches!(scaling(&folder), RopeScaling::Llama3 { .. }));
    let RopeScaling::Factors(divisors) = scaling(&gguf) else { panic!("no divisors") };
    // One stays, one is between, the others are divided by 8.
    assert!(divisors.first().unwrap() == &1.0 && (divisors.last().unwrap() - 8.0).abs() < 1e-5, "{divisors:?}");
    assert!(divisors.iter().any(|divisor| (1.1..7.9).contains(divisor)), "{divisors:?}");
    assert_eq!(tensors(&gguf), tensors(&folder));
}

#[test]
fn a_gguf_file_of_longrope_is_another_model_for_a_short_context() {
    let open = |context: usize| GgufModel::open(&fixture("phi4_long.gguf"), None).unwrap().serving(context);
    let (whole, long, short) = (open(0), open(40), open(24));
    assert_eq!(whole.spec(), long.spec());
    assert_ne!(long.spec(), short.spec());
    let prints = [&whole, &long, &short].map(|model| model.fingerprint());
    assert!(prints[1] != prints[2] && prints[0] != prints[2], "their KV differs");
    // Other families have one fingerprint for every context.
    let qwen = |context: usize| GgufModel::open(&fixture("qwen3.gguf"), None).unwrap().serving(context).fingerprint();
    assert_eq!(qwen(0), qwen(24));
}

/// Files do not say the limit of the gated unit: all published models have one.
#[test]
fn a_gguf_file_of_gpt_oss_has_the_same_tensors_and_the_published_limit() {
    let gguf = GgufModel::open(&fixture("gpt_oss.gguf"), None).unwrap();
    let mut folder = Folder::of(&fixture("gpt_oss"));
    folder.config("swiglu_limit", json!(7.0));
    let folder = folder.open().unwrap();
    assert_eq!(gguf.spec(), folder.spec());
    assert_eq!(tensors(&gguf), tensors(&folder));
}

#[test]
fn granite_has_factors() {
    let spec = open("granite", |_| ()).unwrap();
    assert_eq!((spec.embedding_factor, spec.logit_factor), (6.0, 1.0 / 3.0));
    assert!(spec.layers.iter().all(|layer| (layer.residual_factor, layer.attention.scale) == (0.6, 0.2)));
    let spec = open("granite", |f| f.config("residual_multiplier", json!(null))).unwrap();
    assert_eq!(spec.layers[0].residual_factor, 1.0);
    refused("granite", |f| f.config("logits_scaling", json!(0)), &["logit factor is inf"]);
    refused("granite", |f| f.config("attention_multiplier", json!(0)), &["factor of the scores is 0"]);
    // Llama computes no factor.
    refused(
        "mistral",
        |f| f.config("residual_multiplier", json!(0.5)),
        &["residual_multiplier = 0.5", "not supported"],
    );
}

#[test]
fn olmo2_has_its_norms_behind_the_parts_of_a_layer() {
    let spec = open("olmo2", |_| ()).unwrap();
    for layer in &spec.layers {
        assert_eq!((layer.norms, layer.attention.query_key_norm), (LayerNorms::Behind, Some(QueryKeyNorm::OfAll)));
    }
    // The name of Llama's norm before the MLP is that of the norm behind attention.
    let name = "model.layers.1.post_attention_layernorm.weight";
    refused("olmo2", |f| f.drop_tensor(name), &[name, "is missing"]);
    let before = "model.layers.0.input_layernorm.weight";
    refused("olmo2", |f| f.add(before, "F32", &[32], &[0; 128]), &[before, "not supported"]);
    let shorter = |f: &mut Folder| {
        f.drop_tensor("model.layers.0.self_attn.q_norm.weight");
        f.add("model.layers.0.self_attn.q_norm.weight", "F32", &[8], &[0; 32]);
    };
    refused("olmo2", shorter, &["q_norm.weight has shape [8]", "[32]"]);
}

#[test]
fn gemma2_has_caps_windows_and_gains_less_one() {
    let spec = open("gemma2", |_| ()).unwrap();
    assert_eq!(windows(&spec), [Some(7), None, Some(7), None]);
    assert_eq!((spec.logit_soft_cap, spec.tied), (Some(20.0), true));
    assert_eq!(spec.embedding_factor, 32f32.sqrt());
    for layer in &spec.layers {
        assert_eq!((layer.norms, layer.activation), (LayerNorms::Both, Activation::GeluTanh));
        assert_eq!((layer.attention.soft_cap, layer.attention.scale), (Some(4.0), 0.25));
    }
    // Gains that are stored lie around 0.
    let model = Folder::of(&fixture("gemma2")).open().unwrap();
    let gain = model.tensor(TensorName::FinalNorm).unwrap();
    let mean = gain.iter().sum::<f32>() / gain.len() as f32;
    assert!((0.8..1.2).contains(&mean), "{mean}");

    let by_pattern = open("gemma2", |f| f.config("layer_types", json!(null))).unwrap();
    assert_eq!(windows(&by_pattern), windows(&spec));
    let without = open("gemma2", |f| f.config("attn_logit_softcapping", json!(null))).unwrap();
    assert_eq!(without.layers[0].attention.soft_cap, None);
    let scalar = open("gemma2", |f| f.config("query_pre_attn_scalar", json!(144))).unwrap();
    assert_eq!(scalar.layers[0].attention.scale, (1.0 / 12.0) as f32);
    let unset = |key: &'static str| {
        move |f: &mut Folder| f.edit("config.json", |c| drop(c.as_object_mut().unwrap().remove(key)))
    };
    for key in ["final_logit_softcapping", "head_dim", "hidden_activation", "query_pre_attn_scalar", "sliding_window"] {
        refused("gemma2", unset(key), &[key, "is missing"]);
    }
    refused("gemma2", |f| f.config("hidden_activation", json!("gelu")), &["hidden_activation `gelu`"]);
    refused("gemma2", |f| f.config("final_logit_softcapping", json!(0)), &["soft cap of logits is 0"]);
    refused("gemma2", |f| f.config("use_bidirectional_attention", json!(true)), &["use_bidirectional_attention"]);
}

#[test]
fn gemma3_has_a_rotary_embedding_for_windows() {
    let spec = open("gemma3", |_| ()).unwrap();
    assert_eq!(windows(&spec), [Some(7), Some(7), Some(7), Some(7), Some(7), None]);
    let thetas = |spec: &DecoderSpec| -> Vec<f32> {
        spec.layers.iter().map(|layer| layer.attention.rope.as_ref().unwrap().theta).collect()
    };
    assert_eq!(thetas(&spec), [1e4, 1e4, 1e4, 1e4, 1e4, 1e6]);
    assert!(spec.layers.iter().all(|layer| layer.attention.query_key_norm == Some(QueryKeyNorm::OfHeads)));

    // As the first files said it.
    let old = open("gemma3", |f| {
        f.config("rope_parameters", json!(null));
        f.config("layer_types", json!(null));
        f.config("sliding_window_pattern", json!(3));
        f.config("rope_theta", json!(2e6));
        f.config("rope_local_base_freq", json!(5e3));
        f.config("rope_scaling", json!({"rope_type": "linear", "factor": 8.0}));
    })
    .unwrap();
    assert_eq!(windows(&old), [Some(7), Some(7), None, Some(7), Some(7), None]);
    assert_eq!(thetas(&old), [5e3, 5e3, 2e6, 5e3, 5e3, 2e6]);
    let scaling = |layer: usize| old.layers[layer].attention.rope.as_ref().unwrap().scaling.clone();
    assert_eq!((scaling(0), scaling(2)), (RopeScaling::None, RopeScaling::Linear { factor: 8.0 }));
    let no_local = |f: &mut Folder| {
        f.config("rope_parameters", json!(null));
        f.config("rope_theta", json!(2e6));
    };
    refused("gemma3", no_local, &["rope_local_base_freq is missing"]);
    refused("gemma3", |f| f.config("attn_logit_softcapping", json!(50)), &["attn_logit_softcapping", "no soft caps"]);
    // Parameters by type of layer are read by this family alone.
    let by_type = json!({"full_attention": {"rope_type": "default", "rope_theta": 1e6}});
    refused("qwen3", |f| f.config("rope_parameters", by_type), &["rope_parameters", "rope_type is missing"]);
}

#[test]
fn parts_of_heads_are_rotated() {
    let spec = open("phi4_mini", |_| ()).unwrap();
    let rotated = |spec: &DecoderSpec| spec.layers[0].attention.rope.as_ref().unwrap().dim;
    assert_eq!((rotated(&spec), spec.layers[0].attention.head_dim), (6, 8));
    let outside = |factor: f32| {
        move |f: &mut Folder| {
            f.config("rope_parameters", json!(null));
            f.config("partial_rotary_factor", json!(factor));
        }
    };
    assert_eq!(rotated(&open("phi3", outside(0.5)).unwrap()), 4);
    refused("phi3", outside(0.4), &["3 elements of a head are rotated"]);
    refused("phi3", outside(1.5), &["rotated elements of a head is 12"]);
    let both = |f: &mut Folder| f.config("partial_rotary_factor", json!(0.5));
    refused("phi3", both, &["partial_rotary_factor is 0.5 and in rope_parameters 1"]);
    // Others rotate whole heads, whatever the key says in transformers.
    refused(
        "mistral",
        |f| f.config("partial_rotary_factor", json!(0.5)),
        &["partial_rotary_factor = 0.5", "not supported"],
    );
    let inside = json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5});
    refused("mistral", |f| f.config("rope_parameters", inside), &["partial_rotary_factor", "not supported"]);
}

#[test]
fn experts_take_the_place_of_mlps() {
    let experts = |spec: &DecoderSpec| spec.layers.iter().map(|layer| layer.experts).collect::<Vec<_>>();
    let of = |count, used, renormalize| Some(ExpertsSpec::softmax(count, used, renormalize));
    let spec = open("mixtral", |_| ()).unwrap();
    assert_eq!((experts(&spec), spec.layers[0].ffn), (vec![of(4, 2, true); 2], 24));
    refused("mixtral", |f| f.config("num_experts_per_tok", json!(5)), &["experts used is 5; 1 to 4"]);
    refused(
        "mixtral",
        |f| f.config("num_local_experts", json!(3)),
        &["tensor model.layers.0.block_sparse_moe.experts.3.w1.weight", "not supported"],
    );
    let name = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
    refused("mixtral", |f| f.drop_tensor(name), &[name, "is missing"]);

    let spec = open("qwen3_moe", |_| ()).unwrap();
    assert_eq!((experts(&spec), spec.layers[0].ffn), (vec![of(5, 2, true); 2], 24));
    let unnormed = open("qwen3_moe", |f| f.config("norm_topk_prob", json!(false))).unwrap();
    assert_eq!(experts(&unnormed)[0], of(5, 2, false));
    refused("qwen3_moe", |f| f.config("num_experts", json!(6)), &["num_experts is 6 and num_local_experts 5"]);
    refused("qwen3_moe", |f| f.config("mlp_only_layers", json!([0])), &["layers.0.mlp.", "not supported"]);
    open("qwen3_moe", |f| f.config("use_qk_norm", json!(true))).unwrap();
    refused("qwen3_moe", |f| f.config("use_qk_norm", json!(false)), &["use_qk_norm = false"]);
    refused("mixtral", |f| f.config("rope_parameters", json!(null)), &["rope_theta is missing"]);
    refused("qwen3_moe", |f| f.config("mlp_only_layers", json!(0)), &["mlp_only_layers is no list"]);
    refused("qwen3_moe", |f| f.config("decoder_sparse_step", json!(2)), &["layers.0.mlp.", "not supported"]);
}

#[test]
fn gpt_oss_has_sinks_biases_and_windows_in_every_other_layer() {
    let spec = open("gpt_oss", |_| ()).unwrap();
    assert_eq!(windows(&spec), [Some(7), None, Some(7), None]);
    for layer in &spec.layers {
        let attention = &layer.attention;
        assert!(attention.sinks && attention.qkv_bias && attention.output_bias);
        assert_eq!(layer.activation, Activation::ClampedSwiglu { alpha: 1.702, limit: 2.0 });
        assert_eq!(layer.experts, Some(ExpertsSpec { biases: true, ..ExpertsSpec::softmax(3, 2, true) }));
        let scaling = &attention.rope.as_ref().unwrap().scaling;
        assert!(matches!(scaling, RopeScaling::Yarn { truncate: false, .. }), "{scaling:?}");
    }
    // As the first files said it.
    let old = open("gpt_oss", |f| {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                          "original_max_position_embeddings": 64});
        for (key, value) in [
            ("rope_parameters", json!(null)),
            ("rope_scaling", yarn),
            ("rope_theta", json!(15e4)),
            ("layer_types", json!(null)),
            ("experts_per_token", json!(2)),
            ("initial_context_length", json!(64)),
        ] {
            f.config(key, value);
        }
    });
    assert_eq!(old.unwrap(), spec);
    let published = open("gpt_oss", |f| {
        f.config("swiglu_alpha", json!(null));
        f.config("swiglu_limit", json!(null));
    });
    assert_eq!(published.unwrap().layers[0].activation, Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 });

    let wrong = |key: &'static str, value: Value, parts: &[&str]| {
        refused("gpt_oss", |f| f.config(key, value), parts);
    };
    for key in ["head_dim", "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "sliding_window"] {
        wrong(key, json!(null), &[key, "is missing"]);
    }
    wrong("rope_parameters", json!(null), &["rope_theta is missing"]);
    wrong("hidden_act", json!("gelu_pytorch_tanh"), &["hidden_act", "not supported"]);
    wrong("experts_per_token", json!(3), &["num_experts_per_tok is 2 and experts_per_token 3"]);
    wrong("swiglu_limit", json!(0), &["bound of gate and up is 0"]);
    wrong("num_local_experts", json!(4), &["mlp.experts.down_proj has shape [3, 32, 32]", "[4, 32, 32]"]);
    wrong("attention_bias", json!(false), &["self_attn.k_proj.bias", "not supported"]);
    wrong("quantization_config", json!({"quant_method": "fp8"}), &["quantization_config", "`fp8`"]);
    wrong("quantization_config", json!({}), &["quantization_config", "`?`"]);
    let more = json!({"quant_method": "mxfp4", "activation_scheme": "dynamic"});
    wrong("quantization_config", more, &["quantization_config: activation_scheme", "not supported"]);
    // Of other families it is unknown.
    let other = |f: &mut Folder| f.config("quantization_config", json!({"quant_method": "mxfp4"}));
    refused("mixtral", other, &["quantization_config"]);
    for tensor in ["self_attn.sinks", "self_attn.o_proj.bias", "mlp.router.bias", "mlp.experts.down_proj_bias"] {
        let name = format!("model.layers.1.{tensor}");
        refused("gpt_oss", |f| f.drop_tensor(&name), &[&name, "is missing"]);
    }
    let alone = "model.layers.0.mlp.experts.0.gate_proj.weight";
    refused("gpt_oss", |f| f.add(alone, "F32", &[32, 32], &[0; 4096]), &[alone, "not supported"]);
}

/// The two forms of experts, of the same values.
#[test]
fn mxfp4_has_the_values_of_bf16() {
    use StorageFormat::{Bf16, Q8_0};
    let (folder, mut plain) = (Folder::of(&fixture("gpt_oss_mxfp4")), Folder::of(&fixture("gpt_oss_mxfp4")));
    let packed = folder.open().unwrap();
    let spec = packed.spec().clone();
    plain.config("quantization_config", json!(null));
    for layer in 0..spec.layers.len() {
        for (name, parts) in
            [("gate_up_proj", &[ExpertTensor::Gate, ExpertTensor::Up][..]), ("down_proj", &[ExpertTensor::Down])]
        {
            let name = format!("model.layers.{layer}.mlp.experts.{name}");
            plain.drop_tensor(&format!("{name}_blocks"));
            plain.drop_tensor(&format!("{name}_scales"));
            let [rows, columns] = spec.tensor_dims(TensorName::Expert(layer, 0, parts[0]));
            let count = spec.layers[layer].experts.unwrap().count;
            let mut bytes = Vec::new();
            for expert in 0..count {
                let of = |tensor: &ExpertTensor| packed.tensor(TensorName::Expert(layer, expert, *tensor)).unwrap();
                let values: Vec<Vec<f32>> = parts.iter().map(of).collect();
                let places = (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column));
                let turns = places.flat_map(|place| values.iter().map(move |values| values[place]));
                bytes.extend(turns.flat_map(|x| x.to_le_bytes()[2..].to_vec()));
            }
            plain.add(&name, "BF16", &[count, columns, parts.len() * rows], &bytes);
        }
    }
    let plain = plain.open().unwrap();
    assert_eq!(plain.spec(), packed.spec());
    assert_eq!(tensors(&plain), tensors(&packed));

    let wrong = |change: &dyn Fn(&mut Folder), parts: &[&str]| {
        refused("gpt_oss_mxfp4", change, parts);
    };
    let name = "model.layers.2.mlp.experts.down_proj";
    let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
    wrong(&|f| f.drop_tensor(&scales), &[&scales, "is missing"]);
    wrong(&|f| f.drop_tensor(&blocks), &[&blocks, "is missing"]);
    wrong(&|f| f.add(name, "BF16", &[3, 32, 32], &[0; 6144]), &[name, "both as elements and as MXFP4"]);
    let of_bf16 = |f: &mut Folder| {
        f.drop_tensor(&scales);
        f.add(&scales, "BF16", &[3, 32, 1], &[0; 192]);
    };
    wrong(&of_bf16, &[&scales, "BF16", "U8"]);
    // In the fixture all scales are those of Q8_0.
    let format = |folder: &Folder, layer| {
        let name = TensorName::Expert(layer, 1, ExpertTensor::Down);
        folder.open().unwrap().stored(name).unwrap().format
    };
    let mut small = Folder::of(&fixture("gpt_oss_mxfp4"));
    small.replace(&scales, "U8", &[90; 96]);
    assert_eq!([format(&folder, 2), format(&small, 1), format(&small, 2)], [Q8_0, Q8_0, Bf16]);
    let values = |folder: &Folder| folder.open().unwrap().tensor(TensorName::Expert(2, 1, ExpertTensor::Down)).unwrap();
    let powers =
        values(&folder).into_iter().zip(values(&small)).filter(|(x, _)| *x != 0.0).map(|(x, y)| (x / y).log2());
    // 122 to 125 in place of 90.
    assert!(powers.map(|power| power as i32).all(|power| (32..36).contains(&power)));
    let mut not_a_number = Folder::of(&fixture("gpt_oss_mxfp4"));
    not_a_number.drop_tensor(&scales);
    not_a_number.add(&scales, "U8", &[3, 32, 1], &[255; 96]);
    let error = not_a_number.open().unwrap().tensor(TensorName::Expert(2, 0, ExpertTensor::Down)).unwrap_err();
    assert!(error.to_string().contains("scale of 2^128"), "{error}");
}
