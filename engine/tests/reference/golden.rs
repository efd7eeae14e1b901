//! The reference file.

use baton_types::TokenId;
use serde::Deserialize;
use std::path::Path;

/// Tokens generated after each prompt.
pub(crate) const GENERATED: usize = 64;

/// One prompt and what the reference made of it.
#[derive(Deserialize)]
pub(crate) struct Golden {
    pub(crate) prompt: String,
    pub(crate) prompt_ids: Vec<TokenId>,
    pub(crate) out_ids: Vec<TokenId>,
    /// Natural log-probability of each token of `out_ids`.
    pub(crate) logprob: Vec<f64>,
    /// Best minus second-best logit at each step.
    pub(crate) margin: Vec<f32>,
}

impl Golden {
    /// The prompt and all but the last generated token: what the model has seen when each of them is due.
    pub(crate) fn forced(&self) -> Vec<TokenId> {
        [&self.prompt_ids, &self.out_ids[..GENERATED - 1]].concat()
    }
}

/// All cases.
pub(crate) fn load() -> Vec<Golden> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/smollm2_greedy.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let cases: Vec<Golden> = text.lines().map(|line| serde_json::from_str(line).expect("a case a line")).collect();
    assert_eq!(cases.len(), 24);
    for case in &cases {
        assert_eq!([case.out_ids.len(), case.logprob.len(), case.margin.len()], [GENERATED; 3]);
    }
    cases
}
