//! A writer of small GGUF files, so that tests can damage them one field at a time.
#![allow(dead_code, reason = "each test binary uses its own part")]

use baton_engine::formats::{GgufModel, WeightsError};
use std::path::{Path, PathBuf};

/// Where the committed fixtures lie.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/weights/fixtures").join(name)
}

/// A metadata value.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'static str),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    /// Type number and the bytes that follow it.
    Raw(u32, Vec<u8>),
}

/// A tensor of F32 (kind 0) or any other kind with its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
    /// Overrides the offset that the writer would choose.
    pub(crate) offset: Option<u64>,
}

/// A GGUF file to be.
#[derive(Clone, Debug)]
pub(crate) struct File {
    pub(crate) version: u32,
    pub(crate) meta: Vec<(String, Meta)>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) meta_count: Option<u64>,
}

pub(crate) const HIDDEN: usize = 8;
pub(crate) const HEADS: usize = 2;
pub(crate) const FFN: usize = 6;
pub(crate) const VOCAB: usize = 5;

impl File {
    /// One layer, hidden 8, 2 heads of 4, 1 KV head, vocabulary of 5, tied.
    pub(crate) fn llama() -> Self {
        let meta = [
            ("general.architecture", Meta::Text("llama")),
            ("llama.block_count", Meta::U32(1)),
            ("llama.context_length", Meta::U32(64)),
            ("llama.embedding_length", Meta::U32(HIDDEN as u32)),
            ("llama.feed_forward_length", Meta::U32(FFN as u32)),
            ("llama.attention.head_count", Meta::U32(HEADS as u32)),
            ("llama.attention.head_count_kv", Meta::U32(1)),
            ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
        ];
        let mut file = Self {
            version: 3,
            meta: meta.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            tensors: Vec::new(),
            tensor_count: None,
            meta_count: None,
        };
        file.add("token_embd.weight", &[HIDDEN, VOCAB]);
        for (name, dims) in [
            ("attn_norm", &[HIDDEN][..]),
            ("attn_q", &[HIDDEN, HIDDEN]),
            ("attn_k", &[HIDDEN, HIDDEN / HEADS]),
            ("attn_v", &[HIDDEN, HIDDEN / HEADS]),
            ("attn_output", &[HIDDEN, HIDDEN]),
            ("ffn_norm", &[HIDDEN]),
            ("ffn_gate", &[HIDDEN, FFN]),
            ("ffn_up", &[HIDDEN, FFN]),
            ("ffn_down", &[FFN, HIDDEN]),
        ] {
            file.add(&format!("blk.0.{name}.weight"), dims);
        }
        file.add("output_norm.weight", &[HIDDEN]);
        file
    }

    /// Adds an F32 tensor that counts up from 1.
    pub(crate) fn add(&mut self, name: &str, dims: &[usize]) {
        let data = (1..=dims.iter().product::<usize>()).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let dims = dims.iter().map(|&d| d as u64).collect();
        self.tensors.push(Tensor { name: name.to_owned(), dims, kind: 0, data, offset: None });
    }

    pub(crate) fn set(&mut self, key: &str, value: Meta) {
        self.meta.retain(|(known, _)| known != key);
        self.meta.push((key.to_owned(), value));
    }

    pub(crate) fn unset(&mut self, key: &str) {
        self.meta.retain(|(known, _)| known != key);
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).expect("a tensor of the small model")
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.meta_count.unwrap_or(self.meta.len() as u64).to_le_bytes());
        for (key, value) in &self.meta {
            text(&mut out, key);
            write_value(&mut out, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
            offset = (offset + tensor.data.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.data);
        }
        out
    }

    /// Writes the file to a fresh folder and opens it.
    pub(crate) fn open(&self) -> Result<GgufModel, WeightsError> {
        open_bytes(&self.bytes())
    }
}

/// Opens these bytes as a GGUF file.
pub(crate) fn open_bytes(bytes: &[u8]) -> Result<GgufModel, WeightsError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("small.gguf");
    std::fs::write(&path, bytes).expect("room for a small file");
    GgufModel::open(&path, None)
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Meta) {
    let kind = |out: &mut Vec<u8>, kind: u32| out.extend(kind.to_le_bytes());
    match value {
        Meta::U32(n) => {
            kind(out, 4);
            out.extend(n.to_le_bytes());
        }
        Meta::F32(x) => {
            kind(out, 6);
            out.extend(x.to_le_bytes());
        }
        Meta::Bool(b) => {
            kind(out, 7);
            out.push(u8::from(*b));
        }
        Meta::Text(s) => {
            kind(out, 8);
            text(out, s);
        }
        Meta::Texts(list) => {
            kind(out, 9);
            kind(out, 8);
            out.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|s| text(out, s));
        }
        Meta::I32s(list) => {
            kind(out, 9);
            kind(out, 5);
            out.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Meta::Raw(number, bytes) => {
            kind(out, *number);
            out.extend(bytes);
        }
    }
}
