//! Sequences on their way to a worker, and the parties that a handoff names.

use super::ConvertError;
use super::error::{bounded, required};
use crate::v1;
use baton_types::{Incarnation, InstanceId, Party, RequestId, SequenceSpec};

/// Most tokens of one sequence on the wire: beyond any context served, and 5 MiB of varints at most.
pub const TOKENS_MAX: usize = 1 << 20;

impl From<SequenceSpec> for v1::Sequence {
    fn from(s: SequenceSpec) -> Self {
        Self {
            request_id: s.request_id.into(),
            prompt_len: s.prompt_len as u32,
            tokens: s.tokens,
            sampling: Some(s.sampling.into()),
            sample_index: s.sample_index,
            priority: s.priority,
        }
    }
}

impl TryFrom<v1::Sequence> for SequenceSpec {
    type Error = ConvertError;

    fn try_from(s: v1::Sequence) -> Result<Self, ConvertError> {
        bounded("tokens", s.tokens.len(), TOKENS_MAX, "tokens")?;
        let prompt_len = s.prompt_len as usize;
        if prompt_len == 0 || prompt_len > s.tokens.len() {
            let problem = format!("must be 1 to the number of tokens ({}), got {prompt_len}", s.tokens.len());
            return Err(ConvertError::new("prompt_len", problem));
        }
        Ok(Self {
            request_id: RequestId::try_new(s.request_id).map_err(|e| ConvertError::invalid("request_id", e))?,
            tokens: s.tokens,
            prompt_len,
            sampling: required("sampling", s.sampling)?,
            sample_index: s.sample_index,
            priority: s.priority,
        })
    }
}

impl From<Party> for v1::Party {
    fn from(p: Party) -> Self {
        Self { instance: p.instance.into(), incarnation: p.incarnation.0 }
    }
}

impl TryFrom<v1::Party> for Party {
    type Error = ConvertError;

    fn try_from(p: v1::Party) -> Result<Self, ConvertError> {
        let instance = InstanceId::try_new(p.instance).map_err(|e| ConvertError::invalid("instance", e))?;
        Ok(Self { instance, incarnation: Incarnation(p.incarnation) })
    }
}
