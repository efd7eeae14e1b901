//! `generation_config.json`: end tokens and sampling defaults.

use super::json::Object;
use crate::weights::{WeightsError, check_sampling};
use baton_types::{SamplingDefaults, TokenId};
use serde_json::Value;

/// End tokens, ascending: those of `generation_config.json` or else of `config.json`, and the tokenizer's own.
pub(super) fn end_tokens(
    config: &Object,
    generation: Option<&Object>,
    tokenizer_eos: Option<TokenId>,
    vocab: usize,
) -> Result<Vec<TokenId>, WeightsError> {
    let source = generation.filter(|generation| generation.get("eos_token_id").is_some()).unwrap_or(config);
    let mut ends = match source.get("eos_token_id") {
        None => Vec::new(),
        Some(Value::Array(list)) => list.iter().map(|id| token(source, id, vocab)).collect::<Result<_, _>>()?,
        Some(id) => vec![token(source, id, vocab)?],
    };
    ends.extend(tokenizer_eos.filter(|&id| (id as usize) < vocab));
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

fn token(source: &Object, id: &Value, vocab: usize) -> Result<TokenId, WeightsError> {
    let known = id.as_u64().filter(|&id| id < vocab as u64);
    known.map(|id| id as TokenId).ok_or_else(|| source.damaged(format!("eos_token_id {id} is no token")))
}

/// Sampling defaults. `do_sample: false` asks for greedy decoding whatever else stands there; where the key is absent the
/// stated parameters count, as in other servers.
pub(super) fn sampling(generation: &Object) -> Result<SamplingDefaults, WeightsError> {
    let greedy = generation.bool("do_sample")? == Some(false);
    let top_k = generation.size("top_k")?.map(|k| u32::try_from(k).unwrap_or(u32::MAX));
    let defaults = SamplingDefaults {
        temperature: if greedy { Some(0.0) } else { generation.float("temperature")? },
        top_p: generation.float("top_p")?,
        top_k,
        repetition_penalty: generation.float("repetition_penalty")?,
    };
    check_sampling(defaults).map_err(|reason| generation.damaged(reason))?;
    Ok(defaults)
}
