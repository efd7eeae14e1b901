//! Sampling parameters: the part of a request that, with the tokens and the seed, decides the next token.

use crate::TokenId;
use serde::{Deserialize, Serialize};

/// Checked sampling parameters. `Default` is greedy without penalties and ends at the model's end tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it. 0 to 2 (OpenAI's range).
    pub temperature: f32,
    /// Nucleus: keep the smallest set of tokens whose probability reaches this. (0, 1].
    pub top_p: f32,
    /// Keep the `k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Subtracted once from the logit of every token already *generated*. -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted per earlier occurrence from the logit of every token already *generated*. -2 to 2.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858). (0, 10].
    pub repetition_penalty: f32,
    /// Seed of the counter-based random numbers; the router draws one if the client gave none.
    pub seed: u64,
    /// Most tokens to generate, at least 1.
    pub max_tokens: u32,
    /// Continue generating after the model's end tokens.
    pub ignore_eos: bool,
    /// Further token ids that end the sequence.
    pub stop_token_ids: Vec<TokenId>,
    /// Report the log-probability of each chosen token and of this many most likely ones.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            max_tokens: 16,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}

/// A parameter out of its range.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} must be {expected}, got {got}")]
pub struct SamplingError {
    /// Field name, as in the API.
    pub name: &'static str,
    /// Values that are accepted, in words.
    pub expected: &'static str,
    pub got: String,
}

impl SamplingParams {
    /// Most alternatives per token in `logprobs` (OpenAI's limit).
    pub const LOGPROBS_MAX: u32 = 20;
    /// Most stop token ids.
    pub const STOP_TOKEN_IDS_MAX: usize = 64;

    /// Checks every field and returns the parameters, or the first field out of range.
    pub fn try_new(self) -> Result<Self, SamplingError> {
        fn in_range(name: &'static str, expected: &'static str, value: f32, ok: bool) -> Result<(), SamplingError> {
            if ok { Ok(()) } else { Err(SamplingError { name, expected, got: value.to_string() }) }
        }
        let (t, p, r) = (self.temperature, self.top_p, self.repetition_penalty);
        let (pp, fp) = (self.presence_penalty, self.frequency_penalty);
        in_range("temperature", "0 to 2", t, (0.0..=2.0).contains(&t))?;
        in_range("top_p", "over 0 and at most 1", p, p > 0.0 && p <= 1.0)?;
        in_range("presence_penalty", "-2 to 2", pp, (-2.0..=2.0).contains(&pp))?;
        in_range("frequency_penalty", "-2 to 2", fp, (-2.0..=2.0).contains(&fp))?;
        in_range("repetition_penalty", "over 0 and at most 10", r, r > 0.0 && r <= 10.0)?;
        let refuse = |name, expected, got: String| Err(SamplingError { name, expected, got });
        if self.max_tokens == 0 {
            return refuse("max_tokens", "at least 1", "0".into());
        }
        if let Some(n) = self.logprobs.filter(|&n| n > Self::LOGPROBS_MAX) {
            return refuse("logprobs", "at most 20", n.to_string());
        }
        if self.stop_token_ids.len() > Self::STOP_TOKEN_IDS_MAX {
            return refuse("stop_token_ids", "at most 64 ids", self.stop_token_ids.len().to_string());
        }
        Ok(self)
    }

    /// Whether the most likely token is always taken. Temperatures below 1e-5 count as 0, as in other servers.
    pub fn is_greedy(&self) -> bool {
        self.temperature < 1e-5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_is_refused_by_name() {
        let check = |name: &str, change: fn(&mut SamplingParams)| {
            let mut params = SamplingParams::default();
            change(&mut params);
            assert_eq!(params.try_new().unwrap_err().name, name);
        };
        check("temperature", |p| p.temperature = f32::NAN);
        check("temperature", |p| p.temperature = 2.5);
        check("top_p", |p| p.top_p = 0.0);
        check("presence_penalty", |p| p.presence_penalty = -2.1);
        check("frequency_penalty", |p| p.frequency_penalty = 3.0);
        check("repetition_penalty", |p| p.repetition_penalty = 0.0);
        check("max_tokens", |p| p.max_tokens = 0);
        check("logprobs", |p| p.logprobs = Some(21));
        assert!(SamplingParams::default().try_new().is_ok());
    }
}
