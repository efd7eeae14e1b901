//! A sequence as it travels to a worker, and what is reported of it: why it ended, its usage, and its timings.

use crate::{Digest, RequestId, SamplingParams, Share, TokenId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// A sequence to run, as a router sends it to a worker; the deadline is sent separately.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceSpec {
    /// For logs and spans.
    pub request_id: RequestId,
    /// The prompt, followed by the tokens generated so far if a sequence is continued. Never empty.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt: 1 to `tokens.len()`.
    pub prompt_len: usize,
    /// Sampling parameters, which the router has checked.
    pub sampling: SamplingParams,
    /// Index among the samples of one request, an input of the random numbers.
    pub sample_index: u32,
    /// Higher is preempted later.
    pub priority: i32,
    /// Its tenant and that tenant's weight, where tenants of one priority share a worker.
    pub share: Share,
    /// How it uses prefix caches; `None` reads nothing from them and stores nothing in them.
    pub cache: Option<CacheUse>,
    /// Digest of the adapter that computes it.
    pub adapter: Option<Digest>,
}

/// How a sequence uses the prefix caches of workers.
#[derive(Clone, PartialEq, Eq)]
pub struct CacheUse {
    /// Sequences share prefixes only under the same salt. At most [`CacheUse::SALT_BYTES_MAX`].
    pub salt: Vec<u8>,
    /// Time without use after which its blocks are evicted; `None` uses the worker's own.
    pub ttl: Option<Duration>,
    /// Pins the blocks of its prompt for this duration, within the quota of its salt.
    pub pin: Option<Duration>,
    /// The sequence is not expected to be continued soon: once it has ended, its blocks are evicted before others.
    pub cold: bool,
}

impl CacheUse {
    /// Longest salt, in bytes.
    pub const SALT_BYTES_MAX: usize = 64;
}

impl fmt::Debug for CacheUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The salt is secret: with it, anyone could name a tenant's prefixes.
        f.debug_struct("CacheUse")
            .field("ttl", &self.ttl)
            .field("pin", &self.pin)
            .field("cold", &self.cold)
            .finish_non_exhaustive()
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the context limit.
    Length,
    /// The client or an operator cancelled it.
    Cancelled,
}

/// Tokens counted for one request.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Tokens of the prompt whose KV was not computed for this request, as of the prefill that produced its first token.
    pub cached_tokens: u32,
    /// Tokens of the prompt whose KV was computed and stored in a prefix cache.
    pub cache_write_tokens: u32,
    /// Tokens whose KV was computed again: the sequence lost its blocks, or was continued on another worker.
    pub recomputed_tokens: u32,
}

/// Timings of one request, in microseconds; `None` if the phase did not happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseTimings {
    /// Waiting for a prefill slot.
    pub queue_us: Option<u64>,
    /// Prefill compute, first launch to first token.
    pub prefill_us: Option<u64>,
    /// First KV write posted to commit acknowledged.
    pub transfer_us: Option<u64>,
    /// The part of the transfer that did not overlap with compute: end of prefill compute to commit acknowledged.
    pub exposed_us: Option<u64>,
    /// Bytes of KV that were moved.
    pub transfer_bytes: Option<u64>,
    /// Request accepted to first token sent to the client.
    pub ttft_us: Option<u64>,
    /// First to last token.
    pub decode_us: Option<u64>,
}

/// Log-probabilities of one generated token (natural logarithm, over the whole vocabulary, before temperature and penalties).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// Log-probabilities of a token of a prompt, after the tokens before it.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLogprob {
    pub token: TokenId,
    /// Its place among all tokens: 1 if it is the most likely one. Of equal ones, the one with the lower id comes first.
    pub rank: u32,
    pub logprobs: TokenLogprobs,
}

/// Log-probabilities of consecutive tokens of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLogprobs {
    /// Index of the first of them in the prompt, at least 1: nothing comes before the first token of a prompt, so it has none.
    pub first: u32,
    /// One per token.
    pub tokens: Vec<PromptLogprob>,
}

impl PromptLogprobs {
    /// Most tokens of one message.
    pub const TOKENS_MAX: usize = 1024;
}
