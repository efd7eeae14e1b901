//! What a worker reports of a running sequence and of its own load.
#![allow(missing_docs, reason = "most of these names say what they hold")]

use crate::{Digest, FinishReason, PromptLogprobs, TokenId, TokenLogprobs};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct GeneratedToken {
    pub id: TokenId,
    /// Set if they were requested.
    pub logprobs: Option<TokenLogprobs>,
    /// Set if the sequence ends with this token.
    pub finish: Option<FinishReason>,
    /// For the first token: microseconds of prefill compute up to it.
    pub prefill_us: Option<u64>,
    /// For the first token that this worker generates: as [`crate::Usage::cached_tokens`]. For a continued sequence it also counts the
    /// tokens
    /// generated before.
    pub cached_tokens: Option<u32>,
    /// The same for [`crate::Usage::cache_write_tokens`].
    pub cache_write_tokens: Option<u32>,
}

/// Events that a decode worker sends.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeEvent {
    /// First event of every sequence: the claim is booked.
    Claimed,
    /// The worker's own prefill left the queue, after this many microseconds.
    Started {
        queue_us: u64,
    },
    /// The KV is verified and adopted, this many microseconds after the claim.
    Adopted {
        bytes: u64,
        await_us: u64,
    },
    /// The KV is offered and there is no room for it yet. Repeated every second until there is.
    Waits,
    /// Part of what was asked for of the prompt, in order, before the first token.
    Prompt(PromptLogprobs),
    Token(GeneratedToken),
}

/// Events that a prefill worker sends.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillEvent {
    /// The sequence left the queue, after this many microseconds.
    Started {
        queue_us: u64,
    },
    /// Part of what was asked for of the prompt, in order, before the first token.
    Prompt(PromptLogprobs),
    Token(GeneratedToken),
    /// The decode worker acknowledged the commit, or the sequence ended with its first token (then all fields are zero).
    Done(TransferReport),
}

/// What a prefill and the transfer of its KV took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferReport {
    pub prefill_us: u64,
    pub transfer_us: u64,
    /// The part of the transfer that did not overlap with compute.
    pub exposed_us: u64,
    pub transfer_bytes: u64,
    /// Name of the transport that moved it.
    pub transport: String,
}

/// Blocks of a worker's pool by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub total: u64,
    pub free: u64,
    pub referenced: u64,
    pub cached: u64,
    pub quarantined: u64,
}

/// A low-rank adapter that a worker serves beside its model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AdapterCard {
    /// Name under which clients may ask for it.
    pub name: String,
    /// Digest of its matrices and factors. Equal digests compute equal bits.
    pub digest: Digest,
}

impl AdapterCard {
    /// Longest name, in bytes.
    pub const NAME_BYTES_MAX: usize = 256;
    /// Most adapters of one worker.
    pub const COUNT_MAX: usize = 4096;

    /// Whether a name is possible: visible characters without spaces, so that it is one word in logs and lists.
    pub fn is_name(name: &str) -> bool {
        let is_visible = |c: char| !c.is_whitespace() && !c.is_control();
        (1..=Self::NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(is_visible)
    }
}

/// What a worker reports of its load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadReport {
    /// Sequences without a place in the batch, claims included.
    pub waiting: u32,
    pub waiting_tokens: u64,
    pub running: u32,
    pub running_tokens: u64,
    pub blocks: Option<BlockCounts>,
    /// 0 while unmeasured, as is the field below.
    pub prefill_tokens_per_s: f32,
    pub decode_steps_per_s: f32,
    /// Claims booked and not yet turned into reservations, in tokens.
    pub claimed_tokens: u64,
    pub healthy: bool,
    pub draining: bool,
    pub steps: u64,
    /// Since the start of the worker, as all counts below; `None` from a worker of a release that does not report it.
    pub generated_tokens: Option<u64>,
    pub prefilled_tokens: Option<u64>,
    /// KV bytes sent to peers, and adopted from them.
    pub kv_bytes: Option<u64>,
    /// How long the engine's loop has made no progress although it had work.
    pub still_ms: Option<u64>,
    /// Whether a sequence, or KV that a peer offers, waits for blocks.
    pub lacks_blocks: Option<bool>,
}
