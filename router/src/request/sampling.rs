//! Sampling parameters of clients, and their resolution against a model card.

use super::BadWords;
use baton_types::{ErrorKind, Grammar, RequestError, SamplingDefaults, SamplingError, SamplingParams, TokenId};
use std::sync::Arc;

/// A grammar, and the field of the client that asks for it.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq)]
pub struct AskedGrammar {
    pub grammar: Arc<Grammar>,
    pub param: &'static str,
}

/// Sampling parameters of the client; for `None` the model card's default applies, then the server's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// See [`SamplingParams`], as for all fields below.
    pub temperature: Option<f32>,
    /// Over 0 and at most 1.
    pub top_p: Option<f32>,
    /// 0 keeps all tokens.
    pub top_k: Option<u32>,
    /// From 0 to 1; 0 keeps all tokens.
    pub min_p: Option<f32>,
    /// Over 0 and at most 1; 1 keeps all tokens.
    pub typical_p: Option<f32>,
    /// From -2 to 2.
    pub presence_penalty: Option<f32>,
    /// From -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// Over 0 and at most 10.
    pub repetition_penalty: Option<f32>,
    /// Drawn at random where absent.
    pub seed: Option<u64>,
    /// Most tokens to generate; more than fits the context is refused.
    pub max_tokens: Option<u32>,
    /// Used if `max_tokens` is absent, reduced to what fits; `None`: all that remains of the context.
    pub max_tokens_default: Option<u32>,
    /// Continue after the model's end tokens.
    pub ignore_eos: bool,
    /// Further token ids that end the sequence.
    pub stop_token_ids: Vec<TokenId>,
    /// Report log-probabilities, with this many alternatives.
    pub logprobs: Option<u32>,
    /// Report those of the prompt's tokens, with this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Whether `max_tokens` may be 0: the client asks something of its prompt.
    pub may_be_empty: bool,
    /// Before so many tokens, none is drawn that would end the answer.
    pub min_tokens: u32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The only tokens that are drawn; empty: all.
    pub allowed_token_ids: Vec<TokenId>,
    /// Words that the answer does not have.
    pub bad_words: BadWords,
    /// What the text of the answer must match.
    pub grammar: Option<AskedGrammar>,
}

/// Temperature if neither client nor model card sets one: OpenAI's default.
const TEMPERATURE_DEFAULT: f32 = 1.0;

/// A drawn seed must survive JSON readers that have doubles only, so that a client can send it again unchanged.
const DRAWN_SEED_BITS: u32 = 53;

impl Sampling {
    /// The complete parameters for a prompt of `prompt_tokens`, if prompt and answer may have `context_max` tokens
    /// together. The seed is drawn from `random`.
    pub(crate) fn resolve(
        &self,
        defaults: &SamplingDefaults,
        prompt_tokens: usize,
        context_max: u64,
        random: u64,
    ) -> Result<SamplingParams, RequestError> {
        let prompt = prompt_tokens as u64;
        let exceeded = |param: &str, what: String| {
            let message = format!(
                "This model's maximum context length is {context_max} tokens. {what}. Shorten the prompt or max_tokens"
            );
            RequestError::new(ErrorKind::ContextLengthExceeded, message).param(param)
        };
        if prompt >= context_max {
            let what = format!("The prompt has {prompt} tokens and leaves no room for an answer");
            return Err(exceeded("prompt", what));
        }
        let remaining = u32::try_from(context_max - prompt).unwrap_or(u32::MAX);
        let max_tokens = match (self.max_tokens, self.max_tokens_default) {
            (Some(asked), _) if asked > remaining => {
                let total = prompt + u64::from(asked);
                let what = format!("{prompt} prompt tokens and max_tokens {asked} make {total}");
                return Err(exceeded("max_tokens", what));
            }
            // A worker samples a token with the prompt in any case; `flow` leaves it out.
            (Some(0), _) if self.may_be_empty => 1,
            (Some(asked), _) => asked,
            (None, Some(default)) => default.min(remaining),
            (None, None) => remaining,
        };
        let params = SamplingParams {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(TEMPERATURE_DEFAULT),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(0),
            min_p: self.min_p.unwrap_or(0.0),
            typical_p: self.typical_p.unwrap_or(1.0),
            // A model's tokens: they come with its text.
            bad_words: Vec::new(),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            seed: self.seed.unwrap_or(random >> (u64::BITS - DRAWN_SEED_BITS)),
            max_tokens,
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
            logprobs: self.logprobs,
            min_tokens: self.min_tokens,
            logit_bias: self.logit_bias.clone(),
            allowed_token_ids: self.allowed_token_ids.clone(),
            grammar: self.grammar(),
            prompt_logprobs: self.prompt_logprobs,
        };
        Ok(params.try_new()?)
    }

    /// Checks the ranges of all given fields, before the request is queued.
    pub(crate) fn check(&self) -> Result<(), SamplingError> {
        let d = SamplingParams::default();
        if self.max_tokens == Some(0) && !self.may_be_empty {
            let expected = "at least 1, or 0 with echo or prompt_logprobs";
            return Err(SamplingError { name: "max_tokens", expected, got: "0".into() });
        }
        if self.max_tokens == Some(0) && self.min_tokens > 0 {
            let (expected, got) = ("at most max_tokens", self.min_tokens.to_string());
            return Err(SamplingError { name: "min_tokens", expected, got });
        }
        let given = SamplingParams {
            temperature: self.temperature.unwrap_or(d.temperature),
            top_p: self.top_p.unwrap_or(d.top_p),
            top_k: self.top_k.unwrap_or(d.top_k),
            min_p: self.min_p.unwrap_or(d.min_p),
            typical_p: self.typical_p.unwrap_or(d.typical_p),
            presence_penalty: self.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(d.frequency_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(d.repetition_penalty),
            // What it is by default depends on the context.
            max_tokens: self.max_tokens.unwrap_or(u32::MAX).max(1),
            stop_token_ids: self.stop_token_ids.clone(),
            logprobs: self.logprobs,
            min_tokens: self.min_tokens,
            logit_bias: self.logit_bias.clone(),
            allowed_token_ids: self.allowed_token_ids.clone(),
            grammar: self.grammar(),
            prompt_logprobs: self.prompt_logprobs,
            ..d
        };
        given.try_new().map(drop)
    }

    /// Whether nothing is to be generated.
    pub(crate) fn is_empty(&self) -> bool {
        self.may_be_empty && self.max_tokens == Some(0)
    }

    fn grammar(&self) -> Option<Arc<Grammar>> {
        self.grammar.as_ref().map(|asked| asked.grammar.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(sampling: Sampling, prompt: usize) -> Result<SamplingParams, ErrorKind> {
        let defaults = SamplingDefaults { temperature: Some(0.6), top_p: Some(0.9), ..SamplingDefaults::default() };
        sampling.resolve(&defaults, prompt, 100, u64::MAX).map_err(|e| e.kind)
    }

    #[test]
    fn max_tokens_is_bounded_by_the_context() {
        let cases = [
            (None, None, 10, Ok(90)),
            (None, Some(16), 10, Ok(16)),
            (None, Some(16), 90, Ok(10)),
            (Some(90), Some(16), 10, Ok(90)),
            (Some(91), None, 10, Err(ErrorKind::ContextLengthExceeded)),
            (Some(0), None, 10, Err(ErrorKind::InvalidRequest)),
            (None, None, 99, Ok(1)),
            (None, None, 100, Err(ErrorKind::ContextLengthExceeded)),
        ];
        for (max_tokens, max_tokens_default, prompt, expected) in cases {
            let sampling = Sampling { max_tokens, max_tokens_default, ..Sampling::default() };
            assert_eq!(resolve(sampling, prompt).map(|p| p.max_tokens), expected, "{max_tokens:?} {prompt}");
        }
    }

    #[test]
    fn client_then_card_then_server_decides() {
        let params = resolve(Sampling { temperature: Some(0.0), ..Sampling::default() }, 1).unwrap();
        assert_eq!((params.temperature, params.top_p, params.repetition_penalty), (0.0, 0.9, 1.0));
        assert_eq!(resolve(Sampling::default(), 1).unwrap().temperature, 0.6);
        let bare = Sampling::default().resolve(&SamplingDefaults::default(), 1, 100, 7 << 11).unwrap();
        assert_eq!(bare.temperature, 1.0);
        assert_eq!(
            (bare.seed, resolve(Sampling::default(), 1).unwrap().seed),
            (7, (1 << 53) - 1),
            "drawn where none is given"
        );
        assert_eq!(resolve(Sampling { seed: Some(u64::MAX), ..Sampling::default() }, 1).unwrap().seed, u64::MAX);
    }
}
