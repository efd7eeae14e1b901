//! Sequences on their way to a worker, and the parties that a handoff names.

use super::ConvertError;
use super::error::{bounded, required};
use super::record::digest;
use crate::v1;
use baton_types::{CacheUse, Incarnation, InstanceId, Party, RequestId, SequenceSpec, Share, TenantLabel, Weight};
use std::time::Duration;

/// Most tokens of one sequence on the wire: more than any served context, and at most 5 MiB of varints.
pub const TOKENS_MAX: usize = 1 << 20;
/// Longest time that a cached prefix may be kept or pinned, in milliseconds: a week. More is taken for a mistake.
const CACHE_MS_MAX: u64 = 7 * 24 * 3_600_000;

impl From<SequenceSpec> for v1::Sequence {
    fn from(s: SequenceSpec) -> Self {
        Self {
            request_id: s.request_id.into(),
            prompt_len: s.prompt_len as u32,
            tokens: s.tokens,
            sampling: Some(s.sampling.into()),
            sample_index: s.sample_index,
            priority: s.priority,
            cache: s.cache.map(Into::into),
            share: Some(s.share.into()),
            adapter: s.adapter.map(|digest| digest.0.to_vec().into()).unwrap_or_default(),
        }
    }
}

impl From<Share> for v1::Share {
    fn from(s: Share) -> Self {
        Self { tenant: s.tenant.0, weight: s.weight.get() }
    }
}

impl TryFrom<v1::Share> for Share {
    type Error = ConvertError;

    fn try_from(s: v1::Share) -> Result<Self, ConvertError> {
        let weight = Weight::try_new(s.weight).map_err(|e| ConvertError::invalid("weight", e))?;
        Ok(Self { tenant: TenantLabel(s.tenant), weight })
    }
}

impl From<CacheUse> for v1::CacheUse {
    fn from(c: CacheUse) -> Self {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self { salt: c.salt.into(), ttl_ms: c.ttl.map(millis), pin_ms: c.pin.map(millis), cold: c.cold }
    }
}

impl TryFrom<v1::CacheUse> for CacheUse {
    type Error = ConvertError;

    fn try_from(c: v1::CacheUse) -> Result<Self, ConvertError> {
        bounded("salt", c.salt.len(), Self::SALT_BYTES_MAX, "bytes")?;
        let time = |field, ms: Option<u64>| match ms {
            Some(ms) if ms > CACHE_MS_MAX => {
                Err(ConvertError::new(field, format!("must be at most {CACHE_MS_MAX}, got {ms}")))
            }
            ms => Ok(ms.map(Duration::from_millis)),
        };
        let (ttl, pin) = (time("ttl_ms", c.ttl_ms)?, time("pin_ms", c.pin_ms)?);
        Ok(Self { salt: c.salt.to_vec(), ttl, pin, cold: c.cold })
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
            cache: s.cache.map(CacheUse::try_from).transpose().map_err(|e| e.within("cache"))?,
            // A router of an earlier release does not send it: it treats all requests as of one tenant.
            share: s.share.map(Share::try_from).transpose().map_err(|e| e.within("share"))?.unwrap_or_default(),
            adapter: (!s.adapter.is_empty()).then(|| digest("adapter", &s.adapter)).transpose()?,
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
