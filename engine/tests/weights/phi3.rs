//! GGUF files of Phi-3: matrices that are one, windows and LongRoPE; all else is refused by name.

use crate::support::{FFN, File, HEADS, HIDDEN, Meta};
use baton_engine::families::{LayerTensor, RopeScaling, TensorName};
use baton_engine::formats::ModelSource;

const QKV: usize = HIDDEN + 2 * HIDDEN / HEADS;

fn phi3() -> File {
    let mut file = File::llama();
    for (key, _) in &mut file.meta {
        *key = key.replace("llama.", "phi3.");
    }
    file.set("general.architecture", Meta::Text("phi3"));
    file.set("phi3.attention.sliding_window", Meta::U32(0));
    file.tensors.retain(|tensor| !["_q.", "_k.", "_v.", "gate", "up"].iter().any(|part| tensor.name.contains(part)));
    file.add("blk.0.attn_qkv.weight", &[HIDDEN, QKV]);
    file.add("blk.0.ffn_up.weight", &[HIDDEN, 2 * FFN]);
    file
}

fn long_rope(file: &mut File) {
    file.set("phi3.rope.scaling.original_context_length", Meta::U32(16));
    file.set("phi3.rope.scaling.attn_factor", Meta::F32(1.25));
    file.add("rope_factors_long.weight", &[HIDDEN / HEADS / 2]);
    file.add("rope_factors_short.weight", &[HIDDEN / HEADS / 2]);
}

#[test]
fn parts_lie_behind_one_another() {
    let model = phi3().open().unwrap();
    let attention = &model.spec().layers[0].attention;
    assert_eq!((attention.window, attention.rope.as_ref().unwrap().scaling.clone()), (None, RopeScaling::None));
    // The file's rows start with 1, 9, 17, ...
    for (tensor, rows) in [
        (LayerTensor::Query, 0..HIDDEN),
        (LayerTensor::Key, HIDDEN..HIDDEN + HIDDEN / HEADS),
        (LayerTensor::Value, HIDDEN + HIDDEN / HEADS..QKV),
        (LayerTensor::Gate, 0..FFN),
        (LayerTensor::Up, FFN..2 * FFN),
    ] {
        let values = model.tensor(TensorName::Layer(0, tensor)).unwrap();
        let expected: Vec<f32> = (rows.start * HIDDEN..rows.end * HIDDEN).map(|i| (i + 1) as f32).collect();
        assert_eq!(values, expected, "{tensor:?}");
    }
    let mut windowed = phi3();
    windowed.set("phi3.attention.sliding_window", Meta::U32(9));
    assert_eq!(windowed.open().unwrap().spec().layers[0].attention.window, Some(9));
}

#[test]
fn long_rope_is_two_tensors_and_two_keys() {
    let mut file = phi3();
    long_rope(&mut file);
    let scaling = |file: &File| file.open().unwrap().spec().layers[0].attention.rope.as_ref().unwrap().scaling.clone();
    let factors: std::sync::Arc<[f32]> = [1.0, 2.0].into();
    let expected = RopeScaling::Long {
        short: factors.clone(),
        long: factors,
        original_context: 16,
        amplitude: 1.25,
        served_context: 17,
    };
    assert_eq!(scaling(&file), expected);
    file.set("phi3.rope.scaling.type", Meta::Text("longrope"));
    assert_eq!(scaling(&file), expected);
}

#[test]
fn others_are_refused_by_name() {
    type Change = fn(&mut File);
    let cases: [(Change, &[&str]); 12] = [
        (|f| f.unset("phi3.attention.sliding_window"), &["phi3.attention.sliding_window is missing"]),
        (|f| f.add("blk.0.attn_q.weight", &[HIDDEN, HIDDEN]), &["blk.0.attn_q.weight", "not supported"]),
        (|f| f.add("blk.0.ffn_gate.weight", &[HIDDEN, FFN]), &["blk.0.ffn_gate.weight", "not supported"]),
        (|f| f.add("blk.1.attn_qkv.weight", &[HIDDEN, QKV]), &["blk.1.attn_qkv.weight", "no layer"]),
        (|f| f.tensors.retain(|t| t.name != "blk.0.ffn_up.weight"), &["blk.0.ffn_up.weight is missing"]),
        (
            |f| {
                f.tensors.retain(|t| t.name != "blk.0.attn_qkv.weight");
                f.add("blk.0.attn_qkv.weight", &[HIDDEN, QKV - 4]);
            },
            &["blk.0.attn_qkv.weight has dimensions [8, 12]", "[8, 16]"],
        ),
        (|f| f.set("phi3.rope.scaling.attn_factor", Meta::F32(1.25)), &["attn_factor", "rope_factors_long.weight"]),
        (
            |f| {
                long_rope(f);
                f.tensors.retain(|t| t.name != "rope_factors_short.weight");
            },
            &["rope_factors_short.weight", "belong together"],
        ),
        (
            |f| {
                long_rope(f);
                f.add("rope_freqs.weight", &[HIDDEN / HEADS / 2]);
            },
            &["rope_factors_long.weight", "without other scaling"],
        ),
        (
            |f| {
                long_rope(f);
                f.set("phi3.rope.scaling.factor", Meta::F32(2.0));
            },
            &["rope_factors_long.weight", "without other scaling"],
        ),
        (
            |f| {
                long_rope(f);
                f.unset("phi3.rope.scaling.original_context_length");
            },
            &["phi3.rope.scaling.original_context_length is missing"],
        ),
        (|f| f.set("phi3.rope.scaling.type", Meta::Text("longrope")), &["`longrope`", "not supported"]),
    ];
    for (change, parts) in cases {
        let mut file = phi3();
        change(&mut file);
        let message = file.open().err().unwrap_or_else(|| panic!("opened in spite of {parts:?}")).to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} is not in: {message}");
    }
}
