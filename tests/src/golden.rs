//! Reference outputs of the default model.

use serde::Deserialize;
use std::path::PathBuf;

/// One reference prompt with its greedy continuation in float32.
#[derive(Clone, Debug, Deserialize)]
pub struct Golden {
    /// Text of the prompt; control tokens are spelled out.
    pub prompt: String,
    /// Its tokens.
    pub prompt_ids: Vec<u32>,
    /// 64 greedy tokens.
    pub out_ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Log-probability of each chosen token.
    pub logprob: Vec<f64>,
    /// Distance of the two best logits at each step.
    pub margin: Vec<f64>,
}

/// All reference outputs.
pub fn all() -> anyhow::Result<Vec<Golden>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden/smollm2_greedy.jsonl");
    let text = std::fs::read_to_string(path)?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}
