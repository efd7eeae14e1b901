//! Sampling parameters: the part of a request that, with the tokens and the seed, decides the next token.

use crate::{Grammar, TokenId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

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
    /// Keep tokens whose probability, after the temperature, is at least this part of the most likely one's; 0 keeps all. 0 to 1.
    pub min_p: f32,
    /// Keep, of what the other filters keep, the tokens whose information is nearest to the entropy and that together have this part of the
    /// probability (arXiv:2202.00666). (0, 1]; 1 keeps all.
    pub typical_p: f32,
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
    /// Fewest tokens to generate: before them, no token that would end the sequence is drawn. At most `max_tokens`.
    pub min_tokens: u32,
    /// Added to the logits of these tokens, before the penalties. -100 to 100, each token once.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The only tokens that are drawn; empty: all.
    pub allowed_token_ids: Vec<TokenId>,
    /// Words, as tokens, that the answer does not have: the last token of one is not drawn where the answer ends in its others.
    pub bad_words: Vec<Vec<TokenId>>,
    /// What the text of the answer must match.
    pub grammar: Option<Arc<Grammar>>,
    /// Report the log-probability of each chosen token and of this many most likely ones.
    pub logprobs: Option<u32>,
    /// Report them of the tokens of the prompt too, from the second on.
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            typical_p: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            max_tokens: 16,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            bad_words: Vec::new(),
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// Capability of workers that know `min_tokens`, `logit_bias` and `allowed_token_ids`. Others would ignore them.
pub const SAMPLING_CONSTRAINTS: &str = "sampling-constraints";

/// Capability of workers that know `min_p`.
pub const SAMPLING_MIN_P: &str = "sampling-min-p";

/// Capability of workers whose device knows `typical_p`.
pub const SAMPLING_TYPICAL_P: &str = "sampling-typical-p";

/// Capability of workers whose device knows `bad_words`.
pub const SAMPLING_BAD_WORDS: &str = "sampling-bad-words";

/// Capability of workers that know `prompt_logprobs`. Others would leave them out.
pub const PROMPT_LOGPROBS: &str = "prompt-logprobs";

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
    /// Most alternatives per token in `logprobs` (OpenAI's limit) and `prompt_logprobs`.
    pub const LOGPROBS_MAX: u32 = 20;
    /// Most stop token ids.
    pub const STOP_TOKEN_IDS_MAX: usize = 64;
    /// Most tokens with a bias (OpenAI's limit is 300).
    pub const LOGIT_BIAS_MAX: usize = 1024;
    /// Most tokens of `allowed_token_ids`.
    pub const ALLOWED_TOKEN_IDS_MAX: usize = 8192;
    /// Most token sequences of `bad_words`.
    pub const BAD_WORDS_MAX: usize = 256;
    /// Most tokens of one of them.
    pub const BAD_WORD_TOKENS_MAX: usize = 128;

    /// Checks every field and returns the parameters, or the first field out of range.
    pub fn try_new(self) -> Result<Self, SamplingError> {
        fn in_range(name: &'static str, expected: &'static str, value: f32, ok: bool) -> Result<(), SamplingError> {
            if ok { Ok(()) } else { Err(SamplingError { name, expected, got: value.to_string() }) }
        }
        let (t, p, r) = (self.temperature, self.top_p, self.repetition_penalty);
        let (pp, fp) = (self.presence_penalty, self.frequency_penalty);
        in_range("temperature", "0 to 2", t, (0.0..=2.0).contains(&t))?;
        in_range("top_p", "over 0 and at most 1", p, p > 0.0 && p <= 1.0)?;
        in_range("min_p", "0 to 1", self.min_p, (0.0..=1.0).contains(&self.min_p))?;
        let typical = self.typical_p;
        in_range("typical_p", "over 0 and at most 1", typical, typical > 0.0 && typical <= 1.0)?;
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
        if let Some(n) = self.prompt_logprobs.filter(|&n| n > Self::LOGPROBS_MAX) {
            return refuse("prompt_logprobs", "at most 20", n.to_string());
        }
        if self.stop_token_ids.len() > Self::STOP_TOKEN_IDS_MAX {
            return refuse("stop_token_ids", "at most 64 ids", self.stop_token_ids.len().to_string());
        }
        if self.min_tokens > self.max_tokens {
            return refuse("min_tokens", "at most max_tokens", self.min_tokens.to_string());
        }
        if self.logit_bias.len() > Self::LOGIT_BIAS_MAX {
            return refuse("logit_bias", "of at most 1024 tokens", self.logit_bias.len().to_string());
        }
        let mut biased: Vec<TokenId> = self.logit_bias.iter().map(|(token, _)| *token).collect();
        biased.sort_unstable();
        if let Some(pair) = biased.array_windows().find(|[a, b]| a == b) {
            return refuse("logit_bias", "of each token once", pair[0].to_string());
        }
        self.logit_bias
            .iter()
            .try_for_each(|&(_, bias)| in_range("logit_bias", "-100 to 100", bias, (-100.0..=100.0).contains(&bias)))?;
        if self.allowed_token_ids.len() > Self::ALLOWED_TOKEN_IDS_MAX {
            return refuse("allowed_token_ids", "at most 8192 ids", self.allowed_token_ids.len().to_string());
        }
        if self.bad_words.len() > Self::BAD_WORDS_MAX {
            return refuse("bad_words", "at most 256 sequences of tokens", self.bad_words.len().to_string());
        }
        if let Some(word) = self.bad_words.iter().find(|word| !(1..=Self::BAD_WORD_TOKENS_MAX).contains(&word.len())) {
            return refuse("bad_words", "words of 1 to 128 tokens", word.len().to_string());
        }
        if self.grammar.is_some() && !self.allowed_token_ids.is_empty() {
            return refuse("allowed_token_ids", "left out where the answer has a grammar", "both".into());
        }
        if self.grammar.is_some() && self.ignore_eos {
            return refuse("ignore_eos", "false where the answer has a grammar", "both".into());
        }
        Ok(self)
    }

    /// The tokens that end the sequence, if `end_tokens` are those of the model.
    pub fn ends<'a>(&'a self, end_tokens: &'a [TokenId]) -> impl Iterator<Item = TokenId> + 'a {
        let of_model = if self.ignore_eos { &[] } else { end_tokens };
        of_model.iter().chain(&self.stop_token_ids).copied()
    }

    /// Whether this token is one of [`SamplingParams::ends`].
    pub fn is_end(&self, token: TokenId, end_tokens: &[TokenId]) -> bool {
        self.ends(end_tokens).any(|end| end == token)
    }

    /// Refuses `min_tokens` where every allowed token ends the sequence.
    pub fn check_ends(&self, end_tokens: &[TokenId]) -> Result<(), SamplingError> {
        let allowed = &self.allowed_token_ids;
        if self.min_tokens > 0 && !allowed.is_empty() && allowed.iter().all(|token| self.is_end(*token, end_tokens)) {
            let expected = "0 where each of allowed_token_ids ends the answer";
            return Err(SamplingError { name: "min_tokens", expected, got: self.min_tokens.to_string() });
        }
        Ok(())
    }

    /// Whether it asks something of the logits that [`SAMPLING_CONSTRAINTS`] stands for.
    pub fn has_constraints(&self) -> bool {
        self.min_tokens > 0 || !self.logit_bias.is_empty() || !self.allowed_token_ids.is_empty()
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
        check("min_p", |p| p.min_p = 1.1);
        check("min_p", |p| p.min_p = f32::NAN);
        check("typical_p", |p| p.typical_p = 0.0);
        check("typical_p", |p| p.typical_p = 1.1);
        check("typical_p", |p| p.typical_p = f32::NAN);
        check("bad_words", |p| p.bad_words = vec![vec![1]; 257]);
        check("bad_words", |p| p.bad_words = vec![vec![]]);
        check("bad_words", |p| p.bad_words = vec![vec![1; 129]]);
        check("presence_penalty", |p| p.presence_penalty = -2.1);
        check("frequency_penalty", |p| p.frequency_penalty = 3.0);
        check("repetition_penalty", |p| p.repetition_penalty = 0.0);
        check("max_tokens", |p| p.max_tokens = 0);
        check("logprobs", |p| p.logprobs = Some(21));
        check("prompt_logprobs", |p| p.prompt_logprobs = Some(21));
        check("min_tokens", |p| p.min_tokens = 17);
        check("logit_bias", |p| p.logit_bias = vec![(1, 100.5)]);
        check("logit_bias", |p| p.logit_bias = vec![(1, f32::NAN)]);
        check("logit_bias", |p| p.logit_bias = vec![(7, 1.0), (8, 1.0), (7, 2.0)]);
        check("logit_bias", |p| p.logit_bias = (0..1025).map(|token| (token, 1.0)).collect());
        check("allowed_token_ids", |p| p.allowed_token_ids = vec![0; 8193]);
        check("allowed_token_ids", |p| {
            (p.allowed_token_ids, p.grammar) = (vec![0], Some(Arc::new(Grammar::Regex("a".into()))))
        });
        check("ignore_eos", |p| (p.ignore_eos, p.grammar) = (true, Some(Arc::new(Grammar::Regex("a".into())))));
        assert!(SamplingParams::default().try_new().is_ok());
    }

    #[test]
    fn min_tokens_needs_a_token_that_does_not_end() {
        let check = |allowed: &[TokenId], stop: &[TokenId], ignore_eos| {
            let (allowed_token_ids, stop_token_ids) = (allowed.to_vec(), stop.to_vec());
            let base = SamplingParams { ignore_eos, min_tokens: 1, ..SamplingParams::default() };
            SamplingParams { allowed_token_ids, stop_token_ids, ..base }.check_ends(&[2]).is_ok()
        };
        assert!(check(&[], &[], false) && check(&[2, 3], &[], false) && check(&[2], &[], true));
        assert!(!check(&[2], &[], false) && !check(&[2, 3], &[3], false) && !check(&[3], &[3], true));
    }
}
