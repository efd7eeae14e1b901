//! What workers and routers report: usage, timings, log-probabilities, why a sequence ended.

use super::ConvertError;
use super::error::bounded;
use crate::v1;
use baton_types::{FinishReason, PhaseTimings, PromptLogprob, PromptLogprobs, SamplingParams, TokenLogprobs, Usage};

impl From<Usage> for v1::Usage {
    /// Without a cost: the caller that has prices adds it.
    fn from(u: Usage) -> Self {
        Self {
            prompt_tokens: u.prompt_tokens,
            completion_tokens: u.completion_tokens,
            cached_tokens: u.cached_tokens,
            cache_write_tokens: u.cache_write_tokens,
            recomputed_tokens: u.recomputed_tokens,
            cost: None,
        }
    }
}

impl From<v1::Usage> for Usage {
    fn from(u: v1::Usage) -> Self {
        Self {
            prompt_tokens: u.prompt_tokens,
            completion_tokens: u.completion_tokens,
            cached_tokens: u.cached_tokens,
            cache_write_tokens: u.cache_write_tokens,
            recomputed_tokens: u.recomputed_tokens,
        }
    }
}

impl From<PhaseTimings> for v1::Timings {
    fn from(t: PhaseTimings) -> Self {
        Self {
            queue_us: t.queue_us,
            prefill_us: t.prefill_us,
            transfer_us: t.transfer_us,
            exposed_us: t.exposed_us,
            transfer_bytes: t.transfer_bytes,
            ttft_us: t.ttft_us,
            decode_us: t.decode_us,
        }
    }
}

impl From<v1::Timings> for PhaseTimings {
    fn from(t: v1::Timings) -> Self {
        Self {
            queue_us: t.queue_us,
            prefill_us: t.prefill_us,
            transfer_us: t.transfer_us,
            exposed_us: t.exposed_us,
            transfer_bytes: t.transfer_bytes,
            ttft_us: t.ttft_us,
            decode_us: t.decode_us,
        }
    }
}

impl From<TokenLogprobs> for v1::Logprobs {
    fn from(l: TokenLogprobs) -> Self {
        let top = l.top.into_iter().map(|(token_id, logprob)| v1::TopLogprob { token_id, logprob }).collect();
        Self { chosen: l.chosen, top }
    }
}

impl TryFrom<v1::Logprobs> for TokenLogprobs {
    type Error = ConvertError;

    fn try_from(l: v1::Logprobs) -> Result<Self, ConvertError> {
        bounded("top", l.top.len(), SamplingParams::LOGPROBS_MAX as usize, "alternatives")?;
        Ok(Self { chosen: l.chosen, top: l.top.into_iter().map(|t| (t.token_id, t.logprob)).collect() })
    }
}

impl From<PromptLogprob> for v1::PromptLogprob {
    fn from(l: PromptLogprob) -> Self {
        Self { token_id: l.token, rank: l.rank, logprobs: Some(l.logprobs.into()) }
    }
}

impl TryFrom<v1::PromptLogprob> for PromptLogprob {
    type Error = ConvertError;

    fn try_from(l: v1::PromptLogprob) -> Result<Self, ConvertError> {
        let logprobs = l.logprobs.ok_or_else(|| ConvertError::missing("logprobs"))?;
        Ok(Self { token: l.token_id, rank: l.rank, logprobs: logprobs.try_into()? })
    }
}

impl From<PromptLogprobs> for v1::PromptLogprobs {
    fn from(l: PromptLogprobs) -> Self {
        Self { first: l.first, tokens: l.tokens.into_iter().map(Into::into).collect() }
    }
}

impl TryFrom<v1::PromptLogprobs> for PromptLogprobs {
    type Error = ConvertError;

    fn try_from(l: v1::PromptLogprobs) -> Result<Self, ConvertError> {
        bounded("tokens", l.tokens.len(), Self::TOKENS_MAX, "tokens")?;
        if l.first == 0 {
            return Err(ConvertError::invalid("first", "the first token of a prompt has no log-probabilities"));
        }
        Ok(Self { first: l.first, tokens: l.tokens.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()? })
    }
}

impl From<FinishReason> for v1::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
        }
    }
}

/// The field `finish_reason` of a message; `None` while the sequence runs.
pub fn finish_reason(code: i32) -> Result<Option<FinishReason>, ConvertError> {
    match v1::FinishReason::try_from(code) {
        Ok(v1::FinishReason::Unspecified) => Ok(None),
        Ok(v1::FinishReason::Stop) => Ok(Some(FinishReason::Stop)),
        Ok(v1::FinishReason::Length) => Ok(Some(FinishReason::Length)),
        Ok(v1::FinishReason::Cancelled) => Ok(Some(FinishReason::Cancelled)),
        Err(_) => Err(ConvertError::new("finish_reason", format!("has the unknown value {code}"))),
    }
}

/// The inverse of [`finish_reason`].
pub fn finish_reason_code(reason: Option<FinishReason>) -> i32 {
    reason.map_or(v1::FinishReason::Unspecified, v1::FinishReason::from) as i32
}
