//! Hugging Face folders: what is read from them, and that everything else is refused by name.

use crate::folder::Folder;
use crate::support::fixture;
use baton_engine::families::{RopeScaling, TensorName};
use baton_engine::formats::{GgufModel, HuggingFaceModel, ModelSource, TextSource};
use serde_json::{Value, json};

/// The error of opening the tiny folder after `damage`; its message must contain every part.
pub(crate) fn refused(damage: impl FnOnce(&mut Folder), parts: &[&str]) {
    let mut folder = Folder::tiny();
    damage(&mut folder);
    let message = match folder.open() {
        Ok(_) => panic!("opened in spite of {parts:?}"),
        Err(error) => error.to_string(),
    };
    assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} is not in: {message}");
}

pub(crate) fn open(change: impl FnOnce(&mut Folder)) -> HuggingFaceModel {
    let mut folder = Folder::tiny();
    change(&mut folder);
    folder.open().unwrap()
}

#[test]
fn the_folder_and_the_gguf_file_are_the_same_model() {
    let gguf = GgufModel::open(&fixture("tiny.gguf"), None).unwrap();
    let folder = HuggingFaceModel::open(&fixture("tiny"), None).unwrap();
    assert_eq!(gguf.spec(), folder.spec());
    for name in gguf.spec().tensor_names() {
        let bits = |source: &dyn ModelSource| -> Vec<u32> {
            source.tensor(name).unwrap().into_iter().map(f32::to_bits).collect()
        };
        assert_eq!(bits(&gguf), bits(&folder), "{name}");
    }
    assert_eq!(folder.name(), "tiny");
    assert_eq!(folder.end_tokens(), [2]);
    assert!(matches!(folder.text(), TextSource::None));
    assert!(folder.tensor(TensorName::Output).is_err(), "it is tied");
}

#[test]
fn half_precision_types_expand() {
    for (kind, bytes, expected) in [("F16", [0x00u8, 0x3e], 1.5f32), ("BF16", [0xc0, 0x3f], 1.5)] {
        let model = open(|f| f.replace("model.norm.weight", kind, &bytes.repeat(32)));
        assert_eq!(model.tensor(TensorName::FinalNorm).unwrap(), [expected; 32], "{kind}");
    }
}

#[test]
fn shards() {
    let whole = open(|_| ());
    let split = open(Folder::split);
    for name in whole.spec().tensor_names() {
        assert_eq!(whole.tensor(name).unwrap(), split.tensor(name).unwrap(), "{name}");
    }
    assert_ne!(whole.fingerprint(), split.fingerprint(), "the files differ");
    let split_and = |damage: fn(&mut Value)| {
        move |folder: &mut Folder| {
            folder.split();
            folder.edit("model.safetensors.index.json", damage);
        }
    };
    let norm = "model.norm.weight";
    for bad in
        ["../b.safetensors", "/etc/passwd", "..", ".b.safetensors", "x/b.safetensors", "b.bin", "b\\.safetensors"]
    {
        refused(
            |folder| {
                folder.split();
                folder.edit("model.safetensors.index.json", |index| {
                    index["weight_map"]["model.norm.weight"] = json!(bad)
                });
            },
            &[norm, "no plain"],
        );
    }
    let missing = split_and(|index| index["weight_map"]["model.norm.weight"] = json!("c.safetensors"));
    refused(missing, &["c.safetensors"]);
    refused(
        split_and(|index| index["weight_map"]["ghost"] = json!("model-00001-of-2.safetensors")),
        &["ghost", "missing"],
    );
    refused(split_and(|index| drop(index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight"))), &[norm]);
    refused(split_and(|index| index["weight_map"] = json!({})), &["weight_map", "0 files"]);
    refused(split_and(|index| index["weight_map"] = json!(7)), &["weight_map is no object"]);
}

#[test]
fn tied_models_may_repeat_the_embedding() {
    let embedding = |folder: &Folder| folder.tensor_bytes("model.embed_tokens.weight");
    let model = open(|f| f.add("lm_head.weight", "F32", &[12, 32], &embedding(f)));
    assert!(model.spec().tied && model.tensor(TensorName::Output).is_err());
    refused(|f| f.add("lm_head.weight", "F32", &[12, 32], &[0; 12 * 32 * 4]), &["lm_head.weight differs"]);
    let untied = open(|f| {
        f.config("tie_word_embeddings", json!(false));
        f.add("lm_head.weight", "F32", &[12, 32], &[0; 12 * 32 * 4]);
    });
    assert_eq!(untied.tensor(TensorName::Output).unwrap(), [0.0; 12 * 32]);
    refused(|f| f.config("tie_word_embeddings", json!(false)), &["lm_head.weight is missing"]);
}

#[test]
fn rope() {
    let check = |change: Value, expected: RopeScaling, theta: f32| {
        let model = open(|f| change.as_object().unwrap().iter().for_each(|(key, value)| f.config(key, value.clone())));
        let rope = model.spec().layers[0].attention.rope.as_ref().unwrap();
        assert_eq!((&rope.scaling, rope.theta), (&expected, theta), "{change}");
    };
    let llama3 = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64});
    let with = |mut rope: Value, key: &str, value: Value| {
        rope[key] = value;
        rope
    };
    let expected =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64 };
    check(json!({"rope_scaling": with(llama3.clone(), "rope_type", json!("llama3"))}), expected.clone(), 5e4);
    check(json!({"rope_scaling": with(llama3.clone(), "type", json!("llama3"))}), expected.clone(), 5e4);
    check(json!({"rope_scaling": {"type": "linear", "factor": 2}}), RopeScaling::Linear { factor: 2.0 }, 5e4);
    check(json!({"rope_scaling": {"rope_type": "default"}}), RopeScaling::None, 5e4);
    check(json!({"rope_theta": null}), RopeScaling::None, 1e4);
    let new = with(with(llama3.clone(), "rope_type", json!("llama3")), "rope_theta", json!(5e5));
    check(json!({"rope_theta": null, "rope_parameters": new}), expected, 5e5);

    let yarn = |more: Value| {
        let mut rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        rope.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        rope
    };
    let of = |truncate, amplitude| RopeScaling::Yarn {
        factor: 4.0,
        original_context: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate,
        amplitude,
    };
    let scaled = |amplitude| of(true, amplitude);
    // 1 + 0.1 ln 4
    check(json!({"rope_scaling": yarn(json!({}))}), scaled(1.138_629_4), 5e4);
    check(json!({"rope_scaling": yarn(json!({"attention_factor": 1.25, "truncate": true}))}), scaled(1.25), 5e4);
    check(json!({"rope_scaling": yarn(json!({"attention_factor": 1.0, "truncate": false}))}), of(false, 1.0), 5e4);
    check(json!({"rope_scaling": yarn(json!({"mscale": 0.7, "mscale_all_dim": 0.7}))}), scaled(1.0), 5e4);

    let bad = |rope: Value, parts: &[&str]| refused(|f| f.config("rope_scaling", rope), parts);
    bad(json!({"rope_type": "yarn", "factor": 4.0}), &["original_max_position_embeddings is missing"]);
    bad(yarn(json!({"truncate": 1})), &["truncate is no boolean"]);
    bad(yarn(json!({"beta_fast": 1, "beta_slow": 32})), &["beta_fast"]);
    bad(yarn(json!({"long_factor": [1.0]})), &["long_factor"]);
    bad(json!({"type": "dynamic", "factor": 0.5}), &["dynamic", "at least 1"]);
    bad(json!({"type": "dynamic"}), &["factor is missing"]);
    bad(json!({"type": "ntk", "factor": 2}), &["rope_type `ntk`"]);
    let long = json!({"type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0], "long_factor": [2.0]});
    bad(long.clone(), &["1 rope factors"]);
    bad(with(long.clone(), "short_factor", json!(["a"])), &["short_factor is no list of numbers"]);
    bad(
        with(long.clone(), "original_max_position_embeddings", json!(null)),
        &["original_max_position_embeddings is missing"],
    );
    bad(with(long, "original_max_position_embeddings", json!(1)), &["attention_factor"]);
    bad(json!({"factor": 4.0}), &["rope_type is missing"]);
    bad(json!({"rope_type": "linear"}), &["factor is missing"]);
    bad(json!({"rope_type": "linear", "factor": 0}), &["factor is 0"]);
    bad(json!({"rope_type": "linear", "factor": 2, "attention_factor": 1.2}), &["attention_factor"]);
    bad(json!({"rope_type": "linear", "type": "llama3", "factor": 2}), &["rope_type is `linear` and type `llama3`"]);
    bad(with(with(llama3, "rope_type", json!("llama3")), "low_freq_factor", json!(4.0)), &["high_freq_factor"]);
    refused(
        |f| {
            f.config("rope_scaling", json!({"rope_type": "default"}));
            f.config("rope_parameters", json!({"rope_type": "default"}));
        },
        &["both rope_scaling and rope_parameters"],
    );
    refused(
        |f| f.config("rope_parameters", json!({"rope_type": "default", "rope_theta": 7.0})),
        &["rope_theta is 50000"],
    );
}

#[test]
fn keys_that_change_the_mathematics_are_refused() {
    for (key, value) in [
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("is_causal", json!(false)),
        ("use_rope", json!(null)),
        ("sliding_window", json!(4096)),
        ("hidden_act", json!("gelu")),
        ("quantization_config", json!({"quant_method": "bitsandbytes"})),
        ("partial_rotary_factor", json!(0.5)),
        ("partial_rotary_factor", json!(0)),
        ("rope_interleaved", json!(true)),
        ("logits_scaling", json!(8.0)),
        ("num_local_experts", json!(8)),
        ("auto_map", json!({"AutoModelForCausalLM": "modeling.Model"})),
        ("a_new_idea", json!("on")),
        ("model_type", json!("gemma")),
        ("model_type", json!("mistral")),
        ("architectures", json!(["FalconForCausalLM"])),
        ("architectures", json!(["LlamaForCausalLM", "MistralForCausalLM"])),
    ] {
        refused(|f| f.config(key, value.clone()), &["config.json", key, "not supported"]);
    }
    for (key, value) in [
        ("sliding_window", json!(null)),
        ("is_causal", json!(true)),
        ("rope_interleaved", json!(false)),
        ("pruned_heads", json!({})),
        ("partial_rotary_factor", json!(1.0)),
        ("transformers_version", json!("4.99")),
        ("hidden_act", json!("swish")),
        ("model_type", json!("llama")),
        ("model_type", json!(null)),
    ] {
        open(|f| f.config(key, value.clone()));
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    refused(|f| f.config("hidden_size", json!(null)), &["hidden_size is missing"]);
    refused(|f| f.config("hidden_size", json!(-32)), &["hidden_size is no whole number"]);
    refused(|f| f.config("num_hidden_layers", json!(1u64 << 40)), &["layers is 1099511627776"]);
    refused(|f| f.config("num_hidden_layers", json!(3)), &["model.layers.2.input_layernorm.weight is missing"]);
    refused(|f| f.config("num_hidden_layers", json!(1)), &["model.layers.1.", "num_hidden_layers"]);
    refused(|f| f.config("num_attention_heads", json!(5)), &["head_dim is missing"]);
    refused(|f| f.config("num_attention_heads", json!(0)), &["head"]);
    refused(|f| f.config("vocab_size", json!(13)), &["model.embed_tokens.weight has shape [12, 32]", "[13, 32]"]);
    refused(|f| f.config("rms_norm_eps", json!(0)), &["rms_eps is 0"]);
    refused(|f| f.config("eos_token_id", json!([2, 12])), &["eos_token_id 12 is no token"]);
    refused(|f| f.write("config.json", "[]"), &["config.json", "no JSON object"]);
    refused(|f| f.write("config.json", "{"), &["config.json", "no JSON"]);
    refused(|f| f.remove("config.json"), &["no config.json"]);
    refused(|f| f.remove("model.safetensors"), &["model.safetensors"]);
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let norm = "model.norm.weight";
    for name in ["q_proj.bias", "k_norm.weight"] {
        let add = |f: &mut Folder| f.add(&format!("model.layers.0.self_attn.{name}"), "F32", &[32], &[0; 128]);
        refused(add, &[name, "not supported"]);
    }
    refused(|f| f.add("model.layers.00.input_layernorm.weight", "F32", &[32], &[0; 128]), &["layers.00."]);
    refused(|f| f.replace(norm, "F64", &[0; 256]), &[norm, "F64"]);
    refused(|f| f.replace(norm, "I8", &[0; 32]), &[norm, "I8"]);
    refused(|f| f.drop_tensor(norm), &[norm, "is missing"]);
    refused(|f| f.cut("model.safetensors", 10), &["model.safetensors", norm, "truncated"]);
    refused(|f| f.cut("model.safetensors", usize::MAX), &["model.safetensors", "no valid safetensors"]);
    let header = |length: u64| move |f: &mut Folder| f.write("model.safetensors", length.to_le_bytes());
    refused(header(u64::MAX), &["model.safetensors"]);
    refused(header(1 << 26), &["model.safetensors"]);
    refused(header(0), &["model.safetensors"]);
    open(|f| f.add("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", &[8], &[0; 32]));
}

#[test]
fn generation_config() {
    let generation = |value: Value| {
        let model = open(|f| f.write("generation_config.json", value.to_string()));
        let d = model.sampling_defaults();
        (model.end_tokens().to_vec(), d.temperature, d.top_p, d.top_k, d.repetition_penalty)
    };
    let full =
        json!({"eos_token_id": [7, 3], "temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1});
    assert_eq!(generation(full), (vec![3, 7], Some(0.6), Some(0.9), Some(40), Some(1.1)));
    assert_eq!(generation(json!({})), (vec![2], None, None, None, None));
    assert_eq!(generation(json!({"do_sample": true, "temperature": null})), (vec![2], None, None, None, None));
    assert_eq!(generation(json!({"do_sample": false, "temperature": 0.7})).1, Some(0.0));
    refused(|f| f.write("generation_config.json", r#"{"temperature": 9}"#), &["generation_config.json", "temperature"]);
    refused(|f| f.write("generation_config.json", r#"{"top_p": "x"}"#), &["generation_config.json", "top_p"]);
}

#[test]
fn tokenizer_files() {
    let tokenizer = json!({"added_tokens": [{"id": 5, "content": "</s>"}, {"id": 4, "content": "<s>"}],
        "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}]}});
    let bundle = |config: Value, change: fn(&mut Folder)| {
        let model = open(|f| {
            f.write("tokenizer.json", tokenizer.to_string());
            f.write("tokenizer_config.json", config.to_string());
            change(f);
        });
        let TextSource::Bundle(bundle) = model.text() else { panic!("there is a tokenizer") };
        (*bundle, model.end_tokens().to_vec())
    };
    let plain = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "T"});
    let (text, ends) = bundle(plain.clone(), |_| ());
    assert_eq!((text.bos_token.as_deref(), text.eos_token.as_deref()), (Some("<s>"), Some("</s>")));
    assert_eq!((text.chat_template.as_deref(), text.add_bos), (Some("T"), true), "the post-processor adds <s>");
    assert_eq!(text.tokenizer_json, tokenizer.to_string());
    assert_eq!(ends, [2, 5], "the tokenizer's end token counts too");

    assert_eq!(bundle(json!({}), |f| f.remove("tokenizer_config.json")).0.chat_template, None);
    let list = json!({"chat_template": [{"name": "tool", "template": "A"}, {"name": "default", "template": "B"}]});
    assert_eq!(bundle(list, |_| ()).0.chat_template.as_deref(), Some("B"));
    let list =
        json!({"chat_template": [{"name": "default", "template": "\nB\n"}, {"name": "tool_use", "template": "T\n"}]});
    let both = "{% if tools %}{{ '' }}T{% else %}{{ '' }}\nB{% endif %}";
    assert_eq!(bundle(list, |_| ()).0.chat_template.as_deref(), Some(both));
    let file = bundle(plain, |f| f.write("chat_template.jinja", "J"));
    assert_eq!(file.0.chat_template.as_deref(), Some("J"));
    let files = bundle(json!({}), |f| {
        f.write("chat_template.jinja", "\nB\n");
        f.write("additional_chat_templates/tool_use.jinja", "T\n");
    });
    assert_eq!(files.0.chat_template.as_deref(), Some(both));

    let bad = |config: &'static str, part: &str| {
        let damage = |f: &mut Folder| {
            f.write("tokenizer.json", "{}");
            f.write("tokenizer_config.json", config);
        };
        refused(damage, &["tokenizer_config.json", part]);
    };
    bad(r#"{"bos_token": 7}"#, "bos_token is no token");
    bad(r#"{"chat_template": [{"name": "rag", "template": "A"}]}"#, "`default`");
    refused(|f| f.write("tokenizer.json", "nonsense"), &["tokenizer.json"]);
    refused(|f| f.write("tokenizer.model", "x"), &["tokenizer.model"]);
}

#[test]
fn the_fingerprint_covers_configuration_and_weights() {
    let base = open(|_| ()).fingerprint();
    assert_eq!(base, HuggingFaceModel::open(&fixture("tiny"), None).unwrap().fingerprint(), "the place does not count");
    assert_ne!(base, open(|f| f.config("rope_theta", json!(1e4))).fingerprint());
    assert_ne!(base, open(|f| f.replace("model.norm.weight", "F32", &[0; 128])).fingerprint());
}

/// Its KV has other bits.
#[test]
fn a_model_of_another_rotary_embedding_has_another_fingerprint() {
    let served = |rope: Value, context: usize| open(|f| f.config("rope_scaling", rope)).serving(context).fingerprint();
    let long = || json!({"type": "longrope", "original_max_position_embeddings": 64, "short_factor": vec![1; 8], "long_factor": vec![2; 8]});
    assert_eq!(served(long(), 0), served(long(), 128));
    assert_eq!(served(long(), 1), served(long(), 64));
    assert_ne!(served(long(), 0), served(long(), 64));
    let dynamic = || json!({"type": "dynamic", "factor": 4});
    assert_eq!(served(dynamic(), 0), served(dynamic(), 512));
    assert_eq!(served(dynamic(), 1), served(dynamic(), 128));
    assert_ne!(served(dynamic(), 300), served(dynamic(), 301));
    let yarn = || json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": 64});
    assert_eq!(served(yarn(), 0), served(yarn(), 64));
}
