//! What workers say of sequences and of their load, as routers hear it.

use super::ConvertError;
use super::report::finish_reason;
use crate::v1;
use baton_types::events::TransferReport;
use baton_types::{BlockCounts, DecodeEvent, GeneratedToken, LoadReport, PrefillEvent, TokenLogprobs};

impl TryFrom<v1::Token> for GeneratedToken {
    type Error = ConvertError;

    fn try_from(t: v1::Token) -> Result<Self, ConvertError> {
        Ok(Self {
            id: t.id,
            logprobs: t.logprobs.map(TokenLogprobs::try_from).transpose().map_err(|e| e.within("logprobs"))?,
            finish: finish_reason(t.finish_reason)?,
            prefill_us: t.prefill_us,
            cached_tokens: t.cached_tokens,
            cache_write_tokens: t.cache_write_tokens,
        })
    }
}

impl TryFrom<v1::DecodeEvent> for DecodeEvent {
    type Error = ConvertError;

    fn try_from(e: v1::DecodeEvent) -> Result<Self, ConvertError> {
        use v1::decode_event::Event;
        Ok(match e.event.ok_or_else(|| ConvertError::missing("event"))? {
            Event::Claimed(v1::DecodeClaimed {}) => Self::Claimed,
            Event::Started(v1::PrefillStarted { queue_us }) => Self::Started { queue_us },
            Event::Adopted(v1::KvAdopted { bytes, await_us }) => Self::Adopted { bytes, await_us },
            Event::Waits(v1::KvWaits {}) => Self::Waits,
            Event::Token(token) => Self::Token(token.try_into().map_err(|e: ConvertError| e.within("token"))?),
        })
    }
}

impl TryFrom<v1::PrefillEvent> for PrefillEvent {
    type Error = ConvertError;

    fn try_from(e: v1::PrefillEvent) -> Result<Self, ConvertError> {
        use v1::prefill_event::Event;
        Ok(match e.event.ok_or_else(|| ConvertError::missing("event"))? {
            Event::Started(v1::PrefillStarted { queue_us }) => Self::Started { queue_us },
            Event::Token(token) => Self::Token(token.try_into().map_err(|e: ConvertError| e.within("token"))?),
            Event::Done(done) => Self::Done(TransferReport {
                prefill_us: done.prefill_us,
                transfer_us: done.transfer_us,
                exposed_us: done.exposed_us,
                transfer_bytes: done.transfer_bytes,
                transport: done.transport,
            }),
        })
    }
}

impl From<v1::BlockCounts> for BlockCounts {
    fn from(b: v1::BlockCounts) -> Self {
        Self { total: b.total, free: b.free, referenced: b.referenced, cached: b.cached, quarantined: b.quarantined }
    }
}

impl From<BlockCounts> for v1::BlockCounts {
    fn from(b: BlockCounts) -> Self {
        Self { total: b.total, free: b.free, referenced: b.referenced, cached: b.cached, quarantined: b.quarantined }
    }
}

impl From<v1::LoadReport> for LoadReport {
    /// Of the load alone: which worker it is of, and what is in its cache, is heard before.
    fn from(r: v1::LoadReport) -> Self {
        Self {
            waiting: r.waiting,
            waiting_tokens: r.waiting_tokens,
            running: r.running,
            running_tokens: r.running_tokens,
            blocks: r.blocks.map(BlockCounts::from),
            prefill_tokens_per_s: r.prefill_tokens_per_s,
            decode_steps_per_s: r.decode_steps_per_s,
            claimed_tokens: r.claimed_tokens,
            healthy: r.healthy,
            draining: r.draining,
            steps: r.steps,
            generated_tokens: r.generated_tokens,
            prefilled_tokens: r.prefilled_tokens,
            kv_bytes: r.kv_bytes,
            still_ms: r.still_ms,
            lacks_blocks: r.lacks_blocks,
        }
    }
}
