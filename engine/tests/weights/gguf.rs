//! GGUF files: what is read from them, and that everything else is refused by name.

use crate::support::{File, HIDDEN, Meta, VOCAB, fixture};
use baton_engine::families::{AttentionSpec, DecoderSpec, LayerSpec, LayerTensor, Rope, RopeScaling, TensorName};
use baton_engine::formats::{GgufModel, ModelSource, TextSource, WeightsError};

/// The error of opening a small model after `damage`; its message must contain every part.
fn refused(damage: impl FnOnce(&mut File), parts: &[&str]) -> WeightsError {
    let mut file = File::llama();
    damage(&mut file);
    let error = file.open().err().unwrap_or_else(|| panic!("opened in spite of {parts:?}"));
    let message = error.to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} is not in: {message}");
    error
}

#[test]
fn a_file_of_the_reference_writer_opens() {
    let model = GgufModel::open(&fixture("tiny.gguf"), None).unwrap();
    let rope = Rope { dim: 16, theta: 5e4, scaling: RopeScaling::None };
    let layer = LayerSpec::llama(AttentionSpec::llama(2, 1, 16, rope), 64, 1e-6);
    let expected = DecoderSpec {
        vocab: 12,
        hidden: 32,
        context: 128,
        layers: vec![layer; 2],
        final_rms_eps: 1e-6,
        tied: true,
        embedding_factor: 1.0,
        logit_factor: 1.0,
        logit_soft_cap: None,
    };
    assert_eq!(model.spec(), &expected);
    assert_eq!(model.name(), "tiny");
    // `<|endoftext|>` by its text, `<|im_end|>` by key and text.
    assert_eq!(model.end_tokens(), [0, 2]);
    let TextSource::Gguf(tokenizer) = model.text() else { panic!("it has a tokenizer") };
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_str()), ("gpt2", "smollm"));
    assert_eq!((tokenizer.tokens.len(), tokenizer.tokens[2].as_str(), tokenizer.token_types[3]), (12, "<|im_end|>", 1));
    assert_eq!(
        (tokenizer.merges.as_slice(), tokenizer.bos, tokenizer.eos),
        (&["a b".to_owned()][..], Some(1), Some(2))
    );
    assert_eq!(tokenizer.add_bos, Some(false));
    assert_eq!(tokenizer.chat_template.as_deref(), Some("{{ messages[0]['content'] }}"));
    let content = std::fs::read(fixture("tiny.gguf")).unwrap();
    assert_eq!(model.fingerprint().0, *blake3::hash(&content).as_bytes());
    assert_eq!(GgufModel::open(&fixture("tiny.gguf"), Some("other")).unwrap().name(), "other");
}

#[test]
fn rotary_partners_are_half_a_head_apart() {
    let model = File::llama().open().unwrap();
    let rows = |tensor| -> Vec<f32> {
        let values = model.tensor(TensorName::Layer(0, tensor)).unwrap();
        values.iter().step_by(HIDDEN).copied().collect()
    };
    // The file's rows start with 1, 9, 17, ...; pairs (0, 1), (2, 3) of each head of 4 become (0, 2), (1, 3).
    assert_eq!(rows(LayerTensor::Query), [1.0, 17.0, 9.0, 25.0, 33.0, 49.0, 41.0, 57.0]);
    assert_eq!(rows(LayerTensor::Key), [1.0, 17.0, 9.0, 25.0]);
    assert_eq!(rows(LayerTensor::Value), [1.0, 9.0, 17.0, 25.0]);
}

#[test]
fn tied_unless_there_is_an_output_matrix() {
    let mut file = File::llama();
    assert!(file.open().unwrap().spec().tied);
    file.add("output.weight", &[HIDDEN, VOCAB]);
    let model = file.open().unwrap();
    assert!(!model.spec().tied);
    assert_eq!(model.tensor(TensorName::Output).unwrap().len(), HIDDEN * VOCAB);
}

#[test]
fn rope_scaling() {
    let check = |change: fn(&mut File), expected: RopeScaling| {
        let mut file = File::llama();
        change(&mut file);
        assert_eq!(file.open().unwrap().spec().layers[0].attention.rope.as_ref().unwrap().scaling, expected);
    };
    let none = RopeScaling::None;
    check(|_| (), none.clone());
    check(|f| f.set("llama.rope.scaling.type", Meta::Text("none")), none.clone());
    check(|f| f.set("llama.rope.scaling.factor", Meta::F32(0.0)), none.clone());
    check(|f| f.set("llama.rope.scaling.factor", Meta::F32(4.0)), RopeScaling::Linear { factor: 4.0 });
    check(|f| f.set("llama.rope.scale_linear", Meta::F32(2.0)), RopeScaling::Linear { factor: 2.0 });
    check(
        |f| {
            f.set("llama.rope.scaling.type", Meta::Text("none"));
            f.set("llama.rope.scaling.factor", Meta::F32(4.0));
        },
        none,
    );
    check(
        |f| {
            f.set("llama.rope.scaling.type", Meta::Text("yarn"));
            f.set("llama.rope.scaling.factor", Meta::F32(4.0));
            f.set("llama.rope.scaling.original_context_length", Meta::U32(64));
            f.set("llama.rope.scaling.yarn_beta_slow", Meta::F32(2.0));
        },
        RopeScaling::Yarn {
            factor: 4.0,
            original_context: 64,
            beta_fast: 32.0,
            beta_slow: 2.0,
            truncate: true,
            amplitude: 1.138_629_4,
        },
    );
    check(|f| f.add("rope_freqs.weight", &[2]), RopeScaling::Factors([1.0, 2.0].into()));
    check(
        |f| {
            f.add("rope_freqs.weight", &[2]);
            f.set("llama.rope.scaling.factor", Meta::F32(8.0));
        },
        RopeScaling::Factors([8.0, 16.0].into()),
    );
}

#[test]
fn sampling_and_end_tokens() {
    let mut file = File::llama();
    let texts = ["a", "<|eot_id|>", "<|eot_id|>", "b", "c"].map(str::to_owned).to_vec();
    file.set("tokenizer.ggml.model", Meta::Text("gpt2"));
    file.set("tokenizer.ggml.tokens", Meta::Texts(texts));
    // Only the control token ends a turn; the same text as a normal token does not.
    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1, 1, 3, 1, 1]));
    file.set("tokenizer.ggml.eom_token_id", Meta::U32(4));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(u32::MAX));
    file.set("general.sampling.temp", Meta::F32(0.5));
    file.set("general.sampling.top_k", Meta::U32(20));
    let model = file.open().unwrap();
    assert_eq!(model.end_tokens(), [2, 4]);
    let sampling = model.sampling_defaults();
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (Some(0.5), Some(20), None));
}

#[test]
fn what_a_tokenizer_adds_to_a_text_is_read_or_refused() {
    let with = |key: &str, value: Meta| {
        let mut file = File::llama();
        file.set("tokenizer.ggml.model", Meta::Text("llama"));
        file.set("tokenizer.ggml.tokens", Meta::Texts(["a", "b", "c", "d", "e"].map(str::to_owned).to_vec()));
        file.set(key, value);
        file.open()
    };
    let added = |key, value| match with(key, value).unwrap().text() {
        TextSource::Gguf(tokenizer) => (tokenizer.add_bos, tokenizer.add_space_prefix),
        _ => panic!("there is a tokenizer"),
    };
    assert_eq!(added("tokenizer.ggml.add_bos_token", Meta::Bool(true)), (Some(true), None));
    assert_eq!(added("tokenizer.ggml.add_space_prefix", Meta::Bool(false)), (None, Some(false)));
    assert_eq!(added("tokenizer.ggml.add_eos_token", Meta::Bool(false)), (None, None));
    let error = |key: &str, value| with(key, value).map(drop).unwrap_err().to_string();
    for key in ["add_bos_token", "add_eos_token", "add_space_prefix"].map(|key| format!("tokenizer.ggml.{key}")) {
        let told = error(&key, Meta::Text("yes"));
        assert!(told.contains(&format!("{key} is no boolean")), "{told}");
    }
    let told = error("tokenizer.ggml.add_eos_token", Meta::Bool(true));
    assert!(told.contains("tokenizer.ggml.add_eos_token = true is not supported"), "{told}");
}

#[test]
fn settings_of_unigram_tokenizers_are_read() {
    let opened = |settings: &[(&str, Meta)]| {
        let mut file = File::llama();
        file.set("tokenizer.ggml.model", Meta::Text("t5"));
        file.set("tokenizer.ggml.tokens", Meta::Texts(["a", "b", "c", "d", "e"].map(str::to_owned).to_vec()));
        settings.iter().for_each(|(key, value)| file.set(&format!("tokenizer.ggml.{key}"), value.clone()));
        file.open()
    };
    let no_end = ("add_eos_token", Meta::Bool(false));
    let read =
        |settings: &[(&str, Meta)]| match opened(&[settings, std::slice::from_ref(&no_end)].concat()).unwrap().text() {
            TextSource::Gguf(tokenizer) => tokenizer,
            _ => panic!("there is a tokenizer"),
        };
    let bytes = |kind: u32, count: u64, bytes: &[u8]| {
        Meta::Raw(9, [&kind.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat())
    };
    let plain = read(&[]);
    assert_eq!((plain.remove_extra_whitespaces, plain.precompiled_charsmap), (None, vec![]));
    assert_eq!(read(&[("remove_extra_whitespaces", Meta::Bool(true))]).remove_extra_whitespaces, Some(true));
    for kind in [0, 1] {
        let charsmap = bytes(kind, 3, &[1, 0, 255]);
        assert_eq!(read(&[("precompiled_charsmap", charsmap)]).precompiled_charsmap, [1, 0, 255]);
    }
    let error = |settings: &[(&str, Meta)]| opened(settings).map(drop).unwrap_err().to_string();
    for (settings, says) in [
        (&[][..], "no tokenizer.ggml.add_eos_token is not supported"),
        (&[("add_eos_token", Meta::Bool(true))], "add_eos_token = true is not supported"),
        (&[no_end.clone(), ("remove_extra_whitespaces", Meta::U32(1))], "remove_extra_whitespaces is no boolean"),
        (&[no_end.clone(), ("precompiled_charsmap", Meta::I32s(vec![1]))], "elements of the wrong type"),
        (&[no_end.clone(), ("precompiled_charsmap", Meta::Text("a"))], "precompiled_charsmap is not an array"),
    ] {
        let told = error(settings);
        assert!(told.contains(says), "{told}");
    }
}

#[test]
fn keys_that_change_the_mathematics_are_refused() {
    for (key, value) in [
        ("llama.attention.sliding_window", Meta::U32(4096)),
        ("llama.expert_shared_count", Meta::U32(1)),
        ("llama.attention.causal", Meta::Bool(false)),
        ("llama.logit_scale", Meta::F32(0.5)),
        ("llama.attention.max_alibi_bias", Meta::F32(8.0)),
        ("llama.use_parallel_residual", Meta::Bool(true)),
        ("llama.something.new", Meta::Text("on")),
        ("llama.rope.scaling.type", Meta::Text("longrope")),
        ("llama.rope.scaling.yarn_ext_factor", Meta::F32(0.5)),
        ("llama.rope.scaling.attn_factor", Meta::F32(1.2)),
        ("llama.rope.dimension_count", Meta::U32(2)),
        ("llama.attention.value_length", Meta::U32(2)),
        ("llama.attention.head_count_kv", Meta::I32s(vec![1])),
    ] {
        let error = refused(|f| f.set(key, value), &[key]);
        assert!(matches!(error, WeightsError::Unsupported { .. }), "{error}");
    }
    refused(|f| f.set("general.architecture", Meta::Text("falcon")), &["falcon", "not supported"]);
    let mut off = File::llama();
    off.set("llama.attention.sliding_window", Meta::U32(0));
    off.set("llama.expert_count", Meta::U32(0));
    off.set("llama.attention.causal", Meta::Bool(true));
    off.set("llama.rope.scaling.attn_factor", Meta::F32(1.0));
    assert!(off.open().is_ok(), "keys that switch a feature off are harmless");
}

#[test]
fn metadata_that_does_not_fit_is_refused() {
    refused(|f| f.unset("general.architecture"), &["general.architecture"]);
    refused(|f| f.unset("llama.block_count"), &["llama.block_count is missing"]);
    refused(|f| f.unset("llama.attention.layer_norm_rms_epsilon"), &["layer_norm_rms_epsilon is missing"]);
    refused(|f| f.set("llama.attention.head_count", Meta::U32(0)), &["llama.attention.head_count is 0"]);
    refused(|f| f.set("llama.attention.head_count", Meta::Text("2")), &["llama.attention.head_count is no size"]);
    refused(|f| f.set("llama.block_count", Meta::U32(u32::MAX)), &["layers is 4294967295"]);
    refused(|f| f.set("llama.rope.freq_base", Meta::F32(f32::NAN)), &["rope theta is NaN"]);
    refused(|f| f.set("llama.vocab_size", Meta::U32(7)), &["llama.vocab_size"]);
    refused(|f| f.set("tokenizer.ggml.eos_token_id", Meta::U32(5)), &["tokenizer.ggml.eos_token_id"]);
    refused(|f| f.meta.push(("llama.block_count".into(), Meta::U32(1))), &["llama.block_count is given twice"]);
    refused(|f| f.set("odd", Meta::Raw(7, vec![2])), &["odd is a boolean of value 2"]);
    refused(|f| f.set("odd", Meta::Raw(77, vec![])), &["odd has unknown value type 77"]);
    refused(|f| f.set("general.alignment", Meta::U32(24)), &["general.alignment"]);
    let tokens = |count: usize| Meta::Texts(vec!["x".to_owned(); count]);
    refused(
        |f| {
            f.set("tokenizer.ggml.model", Meta::Text("gpt2"));
            f.set("tokenizer.ggml.tokens", tokens(4));
        },
        &["tokenizer.ggml.tokens has 4 entries"],
    );
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    for name in ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"] {
        let error = refused(|f| f.add(name, &[HIDDEN]), &[name]);
        assert!(matches!(error, WeightsError::Unsupported { .. }), "{error}");
    }
    refused(|f| f.add("blk.0.ffn_gate_inp.weight", &[HIDDEN]), &["blk.0.ffn_gate_inp.weight"]);
    refused(|f| f.add("blk.00.attn_q.weight", &[HIDDEN]), &["blk.00.attn_q.weight"]);
    refused(|f| f.add("blk.1.attn_norm.weight", &[HIDDEN]), &["blk.1.attn_norm.weight", "block_count"]);
    refused(|f| f.add("token_embd.weight", &[HIDDEN, VOCAB]), &["token_embd.weight is listed twice"]);
    refused(|f| f.tensors.retain(|t| !t.name.contains("ffn_up")), &["blk.0.ffn_up.weight is missing"]);
    refused(|f| f.tensors.retain(|t| !t.name.contains("token_embd")), &["token_embd.weight is missing"]);
    refused(|f| f.tensor("blk.0.ffn_down.weight").dims.reverse(), &["blk.0.ffn_down.weight has dim"]);
    refused(|f| f.tensor("blk.0.attn_norm.weight").dims = vec![2, 4], &["blk.0.attn_norm.weight has dimensions"]);
    refused(|f| f.add("rope_freqs.weight", &[3]), &["3 rope factors for 2 frequencies"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").kind = 34, &["blk.0.attn_q.weight of type ternary", "Q4_K"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").kind = 99, &["blk.0.attn_q.weight of type GGML type 99"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").kind = 8, &["blk.0.attn_q.weight", "block of 32"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").dims = vec![8; 5], &["blk.0.attn_q.weight has 5 dimensions"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").dims = vec![8, 0], &["blk.0.attn_q.weight", "absurd"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").dims = vec![8, 1 << 61], &["blk.0.attn_q.weight", "absurd"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").offset = Some(0), &["overlap", "blk.0.attn_q.weight"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").offset = Some(31), &["blk.0.attn_q.weight", "not aligned"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").offset = Some(1 << 40), &["blk.0.attn_q.weight", "truncated"]);
    refused(|f| f.tensor("blk.0.attn_q.weight").offset = Some(u64::MAX - 31), &["blk.0.attn_q.weight"]);
}

#[test]
fn absurd_headers_are_refused() {
    refused(|f| f.tensor_count = Some(u64::MAX), &["tensor count is 18446744073709551615"]);
    refused(|f| f.meta_count = Some(1 << 40), &["metadata count"]);
    refused(|f| f.version = 1, &["GGUF version 1"]);
    refused(|f| f.version = 3u32.swap_bytes(), &["big-endian"]);
    let huge_array = [8u32.to_le_bytes().to_vec(), (1u64 << 60).to_le_bytes().to_vec()].concat();
    refused(|f| f.set("list", Meta::Raw(9, huge_array)), &["list is 1152921504606846976"]);
    let huge_text = u64::MAX.to_le_bytes().to_vec();
    refused(|f| f.set("note", Meta::Raw(8, huge_text)), &["note needs 18446744073709551615 bytes"]);
    let nested = [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat();
    refused(|f| f.set("nested", Meta::Raw(9, nested)), &["nested is an array of unknown or nested type"]);
    for bytes in [&b""[..], b"GG", b"GGML\x03\0\0\0", b"GGUF\x03\0\0"] {
        assert!(crate::support::open_bytes(bytes).is_err());
    }
    assert!(matches!(GgufModel::open(std::path::Path::new("/none.gguf"), None), Err(WeightsError::Io { .. })));
}
