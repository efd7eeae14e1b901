//! Every storage type expands to the same bits as in PyPI `gguf` (fixture made by `fixtures/generate.py`).

use crate::support::{File, Meta, fixture};
use baton_engine::families::TensorName;
use baton_engine::formats::ModelSource;

/// Takes `count` bytes off the front.
fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (front, back) = bytes.split_at(count);
    *bytes = back;
    front
}

#[test]
fn types_expand_to_the_reference_bits() {
    let file = std::fs::read(fixture("quant.bin")).unwrap();
    let mut rest = &file[..];
    let mut kinds = Vec::new();
    while !rest.is_empty() {
        let mut number = || u32::from_le_bytes(take(&mut rest, 4).try_into().unwrap());
        let (kind, size, count) = (number(), number() as usize, number() as usize);
        let blocks = take(&mut rest, size).to_vec();
        let expected: Vec<u32> =
            take(&mut rest, 4 * count).chunks(4).map(|v| u32::from_le_bytes(v.try_into().unwrap())).collect();
        // The final norm of a model as wide as there are values, so that one tensor holds the blocks.
        let mut model = File::llama();
        model.tensors.clear();
        model.set("llama.embedding_length", Meta::U32(count as u32));
        model.set("llama.attention.key_length", Meta::U32(4));
        let hidden = count;
        model.add("token_embd.weight", &[hidden, 1]);
        for (name, dims) in [
            ("attn_norm", &[hidden][..]),
            ("attn_q", &[hidden, 8]),
            ("attn_k", &[hidden, 4]),
            ("attn_v", &[hidden, 4]),
            ("attn_output", &[8, hidden]),
            ("ffn_norm", &[hidden]),
            ("ffn_gate", &[hidden, 6]),
            ("ffn_up", &[hidden, 6]),
            ("ffn_down", &[6, hidden]),
        ] {
            model.add(&format!("blk.0.{name}.weight"), dims);
        }
        model.add("output_norm.weight", &[hidden]);
        let norm = model.tensor("output_norm.weight");
        (norm.kind, norm.data) = (kind, blocks);
        let values = model.open().unwrap().tensor(TensorName::FinalNorm).unwrap();
        let bits: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits, expected, "GGML type {kind}");
        kinds.push(kind);
    }
    assert_eq!(kinds, [0, 1, 30, 8, 2, 3, 12, 13, 14, 6, 7, 10, 11, 20, 23, 39, 39]);
}
