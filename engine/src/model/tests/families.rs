//! Every family against the logits that transformers recorded (`tests/families/generate.py`).
//!
//! The naive decoder computes them from what the readers make of the files, so the spec and the tensors are right, whatever the forward
//! pass computes.

use super::naive::forward;
use super::{Rig, Rows, reference};
use crate::formats::{GgufModel, HuggingFaceModel, ModelSource};
use baton_types::{Dtype, TokenId};
use std::path::{Path, PathBuf};

/// The folders of `tests/families`.
const FAMILIES: &[&str] = &[
    "deepseek_v2",
    "deepseek_v2_groups",
    "deepseek_v3",
    "ernie4_5",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "granite",
    "llama3",
    "llama_dynamic",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "phi4_long",
    "phi4_mini",
    "phi4_short",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_images",
    "qwen3_moe",
    "smollm3",
];

/// Of these the GGUF file is compared too, since it says something in another way: other scaling, or matrices that are one.
const GGUF: &[&str] = &["ernie4_5", "llama3", "phi3", "phi4_long", "phi4_mini"];

/// Folders of quantized models, whose logits are those of the dequantized weights (`tests/families/quantized.py`).
const QUANTIZED: &[&str] = &["awq", "compressed_fp8", "fp8_block", "fp8_tensor", "gptq", "gptq_order"];

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family)
}

/// All of them, for the context of the prompt: transformers scales by the length of what it computes.
fn all() -> impl Iterator<Item = (&'static str, Box<dyn ModelSource>)> {
    let length = |family: &str| {
        let tokens = std::fs::read(folder(family).join("tokens.json")).unwrap();
        serde_json::from_slice::<Vec<TokenId>>(&tokens).unwrap().len()
    };
    let folders = FAMILIES.iter().chain(QUANTIZED).map(move |family| {
        let model = HuggingFaceModel::open(&folder(family), None).unwrap().serving(length(family));
        (*family, Box::new(model) as Box<dyn ModelSource>)
    });
    let files = GGUF.iter().map(move |family| {
        let model = GgufModel::open(&folder(&format!("{family}.gguf")), None).unwrap().serving(length(family));
        (*family, Box::new(model) as Box<dyn ModelSource>)
    });
    folders.chain(files)
}

/// The prompt, and the logits of each of its positions.
fn recorded(family: &str, vocab: usize) -> (Vec<TokenId>, Vec<Vec<f64>>) {
    let tokens = std::fs::read(folder(family).join("tokens.json")).unwrap();
    let logits = std::fs::read(folder(family).join("logits.f32")).unwrap();
    let logits: Vec<f64> =
        logits.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).map(f64::from).collect();
    (serde_json::from_slice(&tokens).unwrap(), logits.chunks_exact(vocab).map(<[f64]>::to_vec).collect())
}

/// Largest difference of the two, relative to the largest recorded logit.
fn relative_difference(got: &[Vec<f64>], recorded: &[Vec<f64>]) -> f64 {
    assert_eq!(got.len(), recorded.len());
    let spread = recorded.iter().flatten().fold(0.0f64, |m, x| m.max(x.abs()));
    let differences = got.iter().flatten().zip(recorded.iter().flatten()).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f64::max) / spread
}

#[test]
fn what_is_read_computes_the_recorded_logits() {
    for (family, model) in all() {
        let (tokens, logits) = recorded(family, model.spec().vocab);
        assert!(tokens.len() >= 40);
        let difference = relative_difference(&forward(&*model, &tokens), &logits);
        // transformers computed in float32: 24 bits, and some hundred roundings.
        assert!(difference < 1e-5, "{family}: {difference}");
    }
}

/// The forward pass in f32 against the same logits.
#[test]
fn the_forward_pass_computes_the_recorded_logits() {
    for (family, model) in all() {
        let (tokens, logits) = recorded(family, model.spec().vocab);
        let mut rig = Rig::new(&*model, &*reference(Dtype::F32), Dtype::F32, 16);
        let got = rig.step(&[Rows { sequence: 0, from: 0, to: tokens.len() }], &tokens);
        let got: Vec<Vec<f64>> =
            (0..tokens.len()).map(|row| got.row(row).iter().map(|x| f64::from(*x)).collect()).collect();
        let difference = relative_difference(&got, &logits);
        assert!(difference < 2e-5, "{family}: {difference}");
    }
}
