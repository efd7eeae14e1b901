//! What a worker may ask of the engine. Token ids in, token ids out.
//!
//! One engine thread owns model, scheduler and running sequences. Callers hold an [`crate::EngineHandle`]; commands travel over a
//! bounded queue, results come back through the [`SequenceSink`] given with each sequence. Blocks travel as [`baton_kv_cache::Lease`]s:
//! whoever holds the lease owns the blocks, dropping it frees them.

use baton_kv_cache::{HASH_TOKENS, Lease, PrefixHash, PrefixHasher};
use baton_types::{ErrorKind, Fence, FinishReason, RequestId, SamplingParams, Share, TokenId, TokenLogprobs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A sequence to run.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// For logs and spans.
    pub id: RequestId,
    /// Prompt, followed by the tokens generated so far where a sequence is continued.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt; the rest counts as output (penalties, `max_tokens`, random numbers).
    pub prompt_len: usize,
    /// Checked sampling parameters.
    pub sampling: SamplingParams,
    /// Sequence index among the `n` samples of one request, for the random numbers.
    pub sample_index: u32,
    /// After this instant the sequence is dropped, wherever it is.
    pub deadline: Instant,
    /// Higher is preempted later. Default 0.
    pub priority: i32,
    /// Whose it is, where tenants of one priority share what the engine has.
    pub share: Share,
    /// What is shared of it; `None` takes nothing from the prefix cache and leaves nothing there.
    pub prefix: Option<PrefixUse>,
}

impl SequenceRequest {
    /// See [`PrefixUse::block_hashes`]; none where it shares nothing.
    pub fn block_hashes(&self) -> Arc<[PrefixHash]> {
        self.prefix.as_ref().map_or_else(Arc::default, |prefix| prefix.block_hashes.clone())
    }
}

/// How a sequence uses the prefix cache, with the hashes of its prefixes.
#[derive(Clone, Debug)]
pub struct PrefixUse {
    hasher: PrefixHasher,
    block_hashes: Arc<[PrefixHash]>,
    /// How long its blocks are kept without use; `None` is the engine's own time.
    pub ttl: Option<Duration>,
    /// Keeps its prompt in the cache for so long, within the quota of `owner`.
    pub pin: Option<PinFor>,
    /// Once it ended, its blocks make room before others.
    pub cold: bool,
}

impl PrefixUse {
    /// Hashes `tokens`, those of the request, for its tenant alone: once, on the thread of whoever takes the request, and nobody after it
    /// does so again.
    pub fn new(hasher: PrefixHasher, tokens: &[TokenId]) -> Self {
        let block_hashes = hasher.prompt(tokens, &[]).into();
        Self { hasher, block_hashes, ttl: None, pin: None, cold: false }
    }

    /// One for every 16 tokens, each of all tokens up to its end.
    pub fn block_hashes(&self) -> &Arc<[PrefixHash]> {
        &self.block_hashes
    }

    /// Those of `tokens`, which begin with the tokens that were hashed: only what was appended is hashed now.
    pub(crate) fn block_hashes_of(&self, tokens: &[TokenId]) -> Vec<PrefixHash> {
        let mut hashes = self.block_hashes.to_vec();
        let (groups, _tail) = tokens.as_chunks();
        for group in &groups[hashes.len()..] {
            hashes.push(self.next(&hashes, group));
        }
        hashes
    }

    /// That of the 16 tokens behind those of `hashes`.
    pub(crate) fn next(&self, hashes: &[PrefixHash], group: &[TokenId; HASH_TOKENS]) -> PrefixHash {
        self.hasher.next(hashes.last().copied().unwrap_or(self.hasher.root()), group, &[])
    }

    /// That of all of `tokens`, of which `hashes` are.
    pub(crate) fn whole(&self, hashes: &[PrefixHash], tokens: &[TokenId]) -> PrefixHash {
        self.hasher.whole(hashes, tokens, &[])
    }
}

/// A pin asked for.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinFor {
    /// Label of the tenant, for the quota.
    pub owner: u64,
    pub time: Duration,
}

/// What the prefill that made a sequence's first token took from the prefix cache, and left there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    /// Tokens that it came with whose KV was cached: of its prompt, and of what was generated before where it is continued.
    pub cached_tokens: usize,
    /// Tokens that it came with whose KV was computed and is cached now.
    pub written_tokens: usize,
}

/// How far to run it.
pub enum Run {
    /// Prefill here and decode here.
    Full,
    /// Prefill here, sample the first token, then hand the blocks to [`PrefillObserver::prefilled`].
    PrefillOnly {
        /// Told after each layer of each chunk, on the engine thread; must return at once.
        observer: Box<dyn PrefillObserver>,
    },
    /// Blocks already hold the KV of all but the last of `tokens`; join the running batch.
    Adopted {
        /// The verified blocks, covering at least `tokens.len() - 1` positions.
        lease: Lease,
    },
}

/// Follows the prefill of one sequence, layer by layer.
pub trait PrefillObserver: Send {
    /// The sequence left the queue; its blocks hold what they hold at these addresses until it ends. The KV of leading positions may be
    /// cached: then [`PrefillObserver::layer_launched`] tells so of every layer before the first launch.
    fn started(&mut self, blocks: &baton_types::GroupBlocks, now: Instant);
    /// KV of `layer` (model layer) is enqueued for positions `0..tokens_end`; it may be read once `fence` is done.
    fn layer_launched(&mut self, layer: u32, tokens_end: usize, fence: &Fence);
    /// The sequence was preempted: its blocks were freed and it starts over (a new `started` follows). All reads must have ended
    /// before this returns. Sequences under a transfer are not preempted, so only a prefill without observer demand sees it.
    fn restarted(&mut self) {}
    /// All KV of the prompt is computed and the first token is sampled; [`SequenceEvent::Prefilled`] follows. Whoever still reads the
    /// blocks keeps the lease until that ended, whether or not anybody hears of the event: that is why the event does not carry it.
    fn prefilled(&mut self, lease: Lease);
    /// The sequence ended before that (cancelled, deadline, failure). The lease is kept in the same way; the default frees the
    /// blocks at once.
    fn ended(&mut self, lease: Lease) {
        drop(lease);
    }
}

/// What happens to a sequence, in order; `Prefilled`, `Finished` or `Failed` is always the last.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug)]
pub enum SequenceEvent {
    /// Left the queue.
    Started { at: Instant },
    /// A token was generated.
    Token {
        token: TokenId,
        /// Where asked for.
        logprobs: Option<TokenLogprobs>,
        /// Whether the sequence ends with it.
        finish: Option<FinishReason>,
        /// With the first token that is generated here.
        reuse: Option<Reuse>,
        /// When it was sampled.
        at: Instant,
    },
    /// [`Run::PrefillOnly`] ended after its first token (a `Token` event came before, with `finish` where that token ends the sequence).
    /// The observer has the blocks.
    Prefilled {
        /// First launch to sampled token.
        compute_us: u64,
        /// When prefill compute ended.
        at: Instant,
    },
    /// The end of a sequence that ran here.
    Finished { reason: FinishReason },
    /// The end of a sequence that could not go on.
    Failed {
        /// Row of the error table.
        kind: ErrorKind,
        /// Fit for the client.
        message: String,
    },
}

/// Where the events of one sequence go. Called on the engine thread; must never block.
pub trait SequenceSink: Send {
    /// Whether two more events fit now; an unused sink holds at least three. A sequence whose sink has no room is paused, and
    /// cancelled after [`crate::EngineConfig::stall`].
    fn has_room(&self) -> bool;
    /// Takes an event. `false` means that nobody listens any more: the sequence is cancelled.
    fn send(&mut self, event: SequenceEvent) -> bool;
}

/// Why a sequence was not accepted.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Prompt plus one token exceed the context or the whole pool.
    #[error("{tokens} tokens can never fit: {limit} is the limit of {what}")]
    NeverFits {
        tokens: usize,
        limit: usize,
        /// `the context` or `the KV pool`.
        what: &'static str,
    },
    /// Too many sequences wait.
    #[error("{waiting} sequences wait already, the queue holds {waiting_max}")]
    Full { waiting: usize, waiting_max: usize },
    /// Empty prompt, token out of the vocabulary and the like.
    #[error("{0}")]
    Invalid(String),
    /// The engine stopped.
    #[error("the engine is stopped")]
    Stopped,
}

/// A point-in-time view of an engine's load.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub waiting: usize,
    /// Prompt tokens not yet computed, of waiting and running sequences.
    pub waiting_tokens: usize,
    /// Sequences in the running batch.
    pub running: usize,
    /// Sum of context lengths in the running batch.
    pub running_tokens: usize,
    /// Blocks by state.
    pub blocks: baton_kv_cache::BlockCounts,
    /// Prefill tokens per second, recent.
    pub prefill_tokens_per_s: f32,
    /// Decode steps per second, recent.
    pub decode_steps_per_s: f32,
    /// Steps run since the start; moves while there is work.
    pub steps: u64,
    /// Rows of prompts computed since the start.
    pub prefill_rows: u64,
    /// Rows of generation computed since the start: one a sequence and step.
    pub decode_rows: u64,
    /// Tokens generated since the start.
    pub generated_tokens: u64,
    /// Tokens of prompts whose KV was cached, since the start: each sequence's as of its first token here.
    pub cached_tokens: u64,
    /// Rows computed once more since the start, of sequences that had lost their blocks.
    pub recomputed_tokens: u64,
    /// Token slots in blocks of sequences, and those of them that are behind the sequence's last token so far.
    pub slots: usize,
    /// See `slots`.
    pub slots_unused: usize,
    /// Preemptions since the start.
    pub preemptions: u64,
}
