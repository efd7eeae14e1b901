//! Events of sequences and load reports that workers send to routers.

use super::ConvertError;
use super::report::{finish_reason, finish_reason_code};
use crate::v1;
use baton_types::{BlockCounts, DecodeEvent, GeneratedToken, LoadReport, PrefillEvent, TokenLogprobs, TransferReport};

impl From<GeneratedToken> for v1::Token {
    fn from(t: GeneratedToken) -> Self {
        Self {
            id: t.id,
            logprobs: t.logprobs.map(Into::into),
            finish_reason: finish_reason_code(t.finish),
            prefill_us: t.prefill_us,
            cached_tokens: t.cached_tokens,
            cache_write_tokens: t.cache_write_tokens,
        }
    }
}

impl From<DecodeEvent> for v1::DecodeEvent {
    fn from(e: DecodeEvent) -> Self {
        use v1::decode_event::Event;
        let event = match e {
            DecodeEvent::Claimed => Event::Claimed(v1::DecodeClaimed {}),
            DecodeEvent::Started { queue_us } => Event::Started(v1::PrefillStarted { queue_us }),
            DecodeEvent::Adopted { bytes, await_us } => Event::Adopted(v1::KvAdopted { bytes, await_us }),
            DecodeEvent::Waits => Event::Waits(v1::KvWaits {}),
            DecodeEvent::Prompt(logprobs) => Event::Prompt(logprobs.into()),
            DecodeEvent::Token(token) => Event::Token(token.into()),
        };
        Self { event: Some(event) }
    }
}

impl From<PrefillEvent> for v1::PrefillEvent {
    fn from(e: PrefillEvent) -> Self {
        use v1::prefill_event::Event;
        let event = match e {
            PrefillEvent::Started { queue_us } => Event::Started(v1::PrefillStarted { queue_us }),
            PrefillEvent::Prompt(logprobs) => Event::Prompt(logprobs.into()),
            PrefillEvent::Token(token) => Event::Token(token.into()),
            PrefillEvent::Done(done) => Event::Done(v1::PrefillDone {
                prefill_us: done.prefill_us,
                transfer_us: done.transfer_us,
                exposed_us: done.exposed_us,
                transfer_bytes: done.transfer_bytes,
                transport: done.transport,
            }),
        };
        Self { event: Some(event) }
    }
}

impl From<LoadReport> for v1::LoadReport {
    /// Without the party and the sequence number in the stream: the sender adds them.
    fn from(r: LoadReport) -> Self {
        Self {
            party: None,
            sequence: 0,
            waiting: r.waiting,
            waiting_tokens: r.waiting_tokens,
            running: r.running,
            running_tokens: r.running_tokens,
            blocks: r.blocks.map(v1::BlockCounts::from),
            prefill_tokens_per_s: r.prefill_tokens_per_s,
            decode_steps_per_s: r.decode_steps_per_s,
            claimed_tokens: r.claimed_tokens,
            healthy: r.healthy,
            draining: r.draining,
            steps: r.steps,
            generated_tokens: r.generated_tokens,
            prefilled_tokens: r.prefilled_tokens,
            cache: None,
            kv_bytes: r.kv_bytes,
            still_ms: r.still_ms,
            lacks_blocks: r.lacks_blocks,
            adapters: None,
        }
    }
}

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
            Event::Prompt(part) => Self::Prompt(part.try_into().map_err(|e: ConvertError| e.within("prompt"))?),
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
            Event::Prompt(part) => Self::Prompt(part.try_into().map_err(|e: ConvertError| e.within("prompt"))?),
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

impl From<BlockCounts> for v1::BlockCounts {
    fn from(b: BlockCounts) -> Self {
        Self { total: b.total, free: b.free, referenced: b.referenced, cached: b.cached, quarantined: b.quarantined }
    }
}

impl From<v1::BlockCounts> for BlockCounts {
    fn from(b: v1::BlockCounts) -> Self {
        Self { total: b.total, free: b.free, referenced: b.referenced, cached: b.cached, quarantined: b.quarantined }
    }
}

impl From<v1::LoadReport> for LoadReport {
    /// Only the load: the receiver has already read which worker it is from, and the cache update.
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
