//! `generation_config.json`: end tokens and sampling defaults.

use super::json::{JsonObject, is_off};
use crate::formats::{WeightsError, check_sampling};
use baton_types::{SamplingDefaults, TokenId};
use serde_json::Value;

/// End tokens, ascending: those of `generation_config.json` or else of `config.json`, and the tokenizer's own.
pub(super) fn end_tokens(
    config: &JsonObject,
    generation: Option<&JsonObject>,
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

fn token(source: &JsonObject, id: &Value, vocab: usize) -> Result<TokenId, WeightsError> {
    let known = id.as_u64().filter(|&id| id < vocab as u64);
    known.map(|id| id as TokenId).ok_or_else(|| source.damaged(format!("eos_token_id {id} is no token")))
}

/// Keys that change tokens and are not implemented, with the values besides `null`, zero, false and empty that have no effect.
const UNIMPLEMENTED: &[(&str, &[f64])] = &[
    ("bad_words_ids", &[]),
    ("begin_suppress_tokens", &[]),
    ("constraints", &[]),
    ("diversity_penalty", &[]),
    ("encoder_no_repeat_ngram_size", &[]),
    ("encoder_repetition_penalty", &[1.0]),
    ("epsilon_cutoff", &[]),
    ("eta_cutoff", &[]),
    ("exponential_decay_length_penalty", &[]),
    ("force_words_ids", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_decoder_ids", &[]),
    ("forced_eos_token_id", &[]),
    ("guidance_scale", &[1.0]),
    ("min_length", &[]),
    ("min_new_tokens", &[]),
    ("min_p", &[]),
    ("no_repeat_ngram_size", &[]),
    ("num_beams", &[1.0]),
    ("penalty_alpha", &[]),
    ("sequence_bias", &[]),
    ("suppress_tokens", &[]),
    ("top_h", &[]),
    ("typical_p", &[1.0]),
    ("watermarking_config", &[]),
];

/// Refuses the first key that requests something that is not implemented.
fn check(generation: &JsonObject) -> Result<(), WeightsError> {
    for (key, neutral) in UNIMPLEMENTED {
        let Some(value) = generation.get(key) else { continue };
        // Token 0 is a valid token, so for `forced_*` only null and empty lists mean off.
        let off = if key.starts_with("forced_") { value.as_array().is_some_and(Vec::is_empty) } else { is_off(value) };
        if !off && !value.as_f64().is_some_and(|value| neutral.contains(&value)) {
            let hint = "it changes tokens; if that is of no matter, delete the key";
            return Err(generation.unsupported(format!("{key} = {value}"), hint));
        }
    }
    Ok(())
}

/// Number of most likely tokens to draw from; -1 and 0 mean "no limit", as in requests.
fn top_k(generation: &JsonObject) -> Result<Option<u32>, WeightsError> {
    let Some(k) = generation.whole("top_k")? else { return Ok(None) };
    match k {
        -1 => Ok(Some(0)),
        0.. => Ok(Some(u32::try_from(k).unwrap_or(u32::MAX))),
        _ => Err(generation.damaged(format!("top_k is {k}; -1, 0 and positive numbers are possible"))),
    }
}

/// Sampling defaults. `do_sample: false` means greedy decoding, whatever the other keys say; if the key is absent the stated parameters
/// apply, as in other servers.
pub(super) fn sampling(generation: &JsonObject) -> Result<SamplingDefaults, WeightsError> {
    check(generation)?;
    let greedy = generation.bool("do_sample")? == Some(false);
    let defaults = SamplingDefaults {
        temperature: if greedy { Some(0.0) } else { generation.float("temperature")? },
        top_p: generation.float("top_p")?,
        top_k: top_k(generation)?,
        repetition_penalty: generation.float("repetition_penalty")?,
    };
    check_sampling(defaults).map_err(|reason| generation.damaged(reason))?;
    Ok(defaults)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<SamplingDefaults, String> {
        sampling(&JsonObject::parse(json.as_bytes()).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn top_k_of_minus_one_is_no_limit() {
        let top_k = |json| read(json).unwrap().top_k;
        assert_eq!(top_k(r#"{"top_k": -1}"#), Some(0));
        assert_eq!(top_k(r#"{"top_k": 0}"#), Some(0));
        assert_eq!(top_k(r#"{"top_k": 99999999999}"#), Some(u32::MAX));
        assert!(read(r#"{"top_k": -2}"#).unwrap_err().contains("top_k is -2"));
        assert!(read(r#"{"top_k": 1.5}"#).unwrap_err().contains("top_k is no whole number"));
    }

    #[test]
    fn what_changes_tokens_and_is_not_implemented_is_refused_by_key() {
        for (key, value) in [
            ("min_p", "0.05"),
            ("suppress_tokens", "[7]"),
            ("forced_bos_token_id", "0"),
            ("forced_eos_token_id", "[2]"),
            ("no_repeat_ngram_size", "3"),
            ("num_beams", "4"),
            ("typical_p", "0.9"),
            ("min_length", "5"),
        ] {
            let message = read(&format!(r#"{{"{key}": {value}}}"#)).unwrap_err();
            assert!(message.contains(&format!("{key} = {value} is not supported")), "{message}");
        }
        for neutral in [
            r#"{"min_p": 0.0, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "forced_bos_token_id": null}"#,
            r#"{"guidance_scale": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "max_length": 4096}"#,
        ] {
            assert_eq!(read(neutral), Ok(SamplingDefaults::default()));
        }
    }
}
