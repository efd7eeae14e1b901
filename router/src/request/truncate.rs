//! The part of a long prompt that is kept: its end.

use super::Sampling;
use baton_types::{RequestError, TokenId};
use std::num::NonZeroU32;

/// How much of a prompt's end is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncate {
    /// So many tokens.
    Last(NonZeroU32),
    /// What the context leaves beside the answer.
    ToContext,
}

impl Truncate {
    /// A number of tokens; -1 is [`Truncate::ToContext`].
    ///
    /// # Errors
    /// Any other number that is not positive.
    pub(crate) fn try_new(tokens: i64) -> Result<Self, RequestError> {
        match u32::try_from(tokens).ok().and_then(NonZeroU32::new) {
            Some(tokens) => Ok(Self::Last(tokens)),
            None if tokens == -1 => Ok(Self::ToContext),
            None => {
                let message = format!("truncate_prompt_tokens must be -1 or 1 to {}, got {tokens}", u32::MAX);
                Err(RequestError::invalid("truncate_prompt_tokens", message))
            }
        }
    }

    /// Drops the beginning of a prompt, if prompt and answer may have `context_max` tokens together. The answer keeps
    /// room for what it may have at most, or for a token if that is not stated.
    pub(crate) fn apply(self, tokens: &mut Vec<TokenId>, sampling: &Sampling, context_max: u64) {
        let kept = match self {
            Self::Last(kept) => u64::from(kept.get()),
            Self::ToContext => {
                let answer = sampling.max_tokens.or(sampling.max_tokens_default).unwrap_or(1).max(1);
                context_max.saturating_sub(u64::from(answer)).max(1)
            }
        };
        let dropped = (tokens.len() as u64).saturating_sub(kept);
        tokens.drain(..usize::try_from(dropped).unwrap_or(tokens.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_prompt_is_kept() {
        let cut = |truncate: i64, max_tokens, context_max| {
            let (mut tokens, sampling) = (vec![1, 2, 3, 4], Sampling { max_tokens, ..Sampling::default() });
            Truncate::try_new(truncate).unwrap().apply(&mut tokens, &sampling, context_max);
            tokens
        };
        assert_eq!(cut(1, None, 100), [4]);
        assert_eq!(cut(3, None, 100), [2, 3, 4]);
        for all in [4, 5, i64::from(u32::MAX)] {
            assert_eq!(cut(all, None, 100), [1, 2, 3, 4]);
        }
        assert_eq!(cut(-1, None, 100), [1, 2, 3, 4]);
        assert_eq!(cut(-1, None, 4), [2, 3, 4], "a token of answer");
        assert_eq!(cut(-1, Some(2), 4), [3, 4]);
        assert_eq!(cut(-1, Some(9), 4), [4], "max_tokens are refused");
        for wrong in [0, -2, 1 << 32] {
            assert_eq!(Truncate::try_new(wrong).unwrap_err().param.as_deref(), Some("truncate_prompt_tokens"));
        }
    }
}
