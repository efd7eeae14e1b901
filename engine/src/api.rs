//! The engine's interface for workers: token ids in, token ids out.
//!
//! One engine thread owns model, scheduler and running sequences. Callers hold an [`crate::EngineHandle`]. Commands go through a bounded
//! queue, and results come back through the [`SequenceSink`] of each sequence. Blocks are passed as [`baton_kv_cache::Lease`]s: the holder
//! of a lease owns the blocks, and dropping it frees them.

use crate::gaps::StepGaps;
use crate::scheduler::SequenceKey;
use baton_kernels::step::AdapterSlot;
use baton_kv_cache::{HASH_TOKENS, Lease, PrefixHash, PrefixHasher};
use baton_types::{
    Digest, ErrorKind, Fence, FinishReason, PromptLogprobs, RequestId, SamplingParams, Share, TokenId, TokenLogprobs,
};
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A sequence to run.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// For logs and spans.
    pub id: RequestId,
    /// Prompt, followed by the tokens generated so far where a sequence is resumed.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt; the rest counts as output (penalties, `max_tokens`, random numbers).
    pub prompt_len: usize,
    /// Sampling parameters, checked before they come here.
    pub sampling: SamplingParams,
    /// Sequence index among the `n` samples of one request, for the random numbers.
    pub sample_index: u32,
    /// After this instant the sequence is dropped, whatever its phase.
    pub deadline: Instant,
    /// Sequences with a higher priority are preempted later. Default 0.
    pub priority: i32,
    /// The tenant's share, by which tenants of one priority divide the engine's capacity.
    pub share: Share,
    /// How it uses the prefix cache; `None` neither reads nor fills it.
    pub prefix: Option<PrefixUse>,
    /// The adapter that computes all its rows.
    pub adapter: Option<AdapterUse>,
}

/// Use of a loaded adapter. Whoever loads adapters keeps this one in its slot while a clone of `kept` lives.
#[derive(Clone, Debug)]
pub struct AdapterUse {
    /// Where it is loaded.
    pub slot: AdapterSlot,
    /// Which adapter is expected there.
    pub digest: Digest,
    /// Dropped with the sequence, once no later step has its rows.
    pub kept: Arc<dyn Any + Send + Sync>,
}

impl SequenceRequest {
    /// See [`PrefixUse::block_hashes`]; empty if the sequence does not use the prefix cache.
    pub fn block_hashes(&self) -> Arc<[PrefixHash]> {
        self.prefix.as_ref().map_or_else(Arc::default, |prefix| prefix.block_hashes.clone())
    }
}

/// How a sequence uses the prefix cache, with the hashes of its prefixes.
#[derive(Clone, Debug)]
pub struct PrefixUse {
    hasher: PrefixHasher,
    /// Digest of the adapter that computes its KV.
    adapter: Option<Digest>,
    block_hashes: Arc<[PrefixHash]>,
    /// How long unused blocks stay cached; `None` is the engine's default.
    pub ttl: Option<Duration>,
    /// Pins its prompt in the cache for a time, within the quota of `owner`.
    pub pin: Option<PinFor>,
    /// Once the sequence has ended, its blocks are evicted before others.
    pub cold: bool,
}

impl PrefixUse {
    /// Hashes `tokens`, those of the request, for its tenant alone. This runs once, on the thread that accepts the request; later code
    /// reuses the hashes.
    pub fn new(hasher: PrefixHasher, tokens: &[TokenId]) -> Self {
        Self::with(hasher, None, tokens)
    }

    /// As [`PrefixUse::new`], for a request with the adapter of this digest: only such requests share its KV.
    pub fn of_adapter(hasher: PrefixHasher, adapter: Digest, tokens: &[TokenId]) -> Self {
        Self::with(hasher, Some(adapter), tokens)
    }

    fn with(hasher: PrefixHasher, adapter: Option<Digest>, tokens: &[TokenId]) -> Self {
        let extra: Vec<&[u8]> = adapter.iter().map(|digest| &digest.0[..]).collect();
        let block_hashes = hasher.prompt(tokens, &extra).into();
        Self { hasher, adapter, block_hashes, ttl: None, pin: None, cold: false }
    }

    /// Digest of the adapter that computes its KV.
    pub fn adapter(&self) -> Option<Digest> {
        self.adapter
    }

    /// What is hashed beside the tokens.
    fn extra(&self) -> Vec<&[u8]> {
        self.adapter.iter().map(|digest| &digest.0[..]).collect()
    }

    /// One hash for every 16 tokens, each over all tokens up to its end.
    pub fn block_hashes(&self) -> &Arc<[PrefixHash]> {
        &self.block_hashes
    }

    /// Hashes of `tokens`, which begin with the tokens that were hashed already: only appended tokens are hashed now.
    pub(crate) fn block_hashes_of(&self, tokens: &[TokenId]) -> Vec<PrefixHash> {
        let mut hashes = self.block_hashes.to_vec();
        let (groups, _tail) = tokens.as_chunks();
        for group in &groups[hashes.len()..] {
            hashes.push(self.next(&hashes, group));
        }
        hashes
    }

    /// Hash of the 16 tokens after those of `hashes`.
    pub(crate) fn next(&self, hashes: &[PrefixHash], group: &[TokenId; HASH_TOKENS]) -> PrefixHash {
        self.hasher.next(hashes.last().copied().unwrap_or(self.hasher.root()), group, &self.extra())
    }

    /// Hash of all of `tokens`, whose full groups have `hashes`.
    pub(crate) fn whole(&self, hashes: &[PrefixHash], tokens: &[TokenId]) -> PrefixHash {
        self.hasher.whole(hashes, tokens, &self.extra())
    }
}

/// How long the blocks of a request stay pinned in the prefix cache, and for whom.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinFor {
    /// Label of the tenant, for the quota.
    pub owner: u64,
    pub time: Duration,
}

/// What the prefill that generated a sequence's first token read from the prefix cache, and stored there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    /// Submitted tokens whose KV was cached: of the prompt, and of earlier output where the sequence is resumed.
    pub cached_tokens: usize,
    /// Submitted tokens whose KV was computed here and is cached now.
    pub written_tokens: usize,
}

/// Which phases to run here.
pub enum Run {
    /// Prefill here and decode here.
    Full,
    /// Prefill here, sample the first token, then pass the blocks to [`PrefillObserver::prefilled`].
    PrefillOnly {
        /// Called after each layer of each chunk, on the engine thread; must return at once.
        observer: Box<dyn PrefillObserver>,
    },
    /// Blocks already hold the KV of all but the last of `tokens`; the sequence joins the running batch.
    Adopted {
        /// The verified blocks, covering at least `tokens.len() - 1` positions.
        lease: Lease,
        /// The turn with which the blocks were granted, see [`crate::EngineHandle::take_turn`]. The sequence keeps this place, and its
        /// tenant is not charged again. `None` takes a new place.
        turn: Option<SequenceKey>,
    },
}

/// Observes the prefill of one sequence, layer by layer.
pub trait PrefillObserver: Send {
    /// The sequence left the queue; its blocks keep these ids until it ends, or until [`PrefillObserver::grown`]. The KV of leading positions may be cached: then
    /// [`PrefillObserver::layer_launched`] reports every layer of it before the first launch.
    fn started(&mut self, blocks: &baton_types::BlockTables, now: Instant);
    /// The blocks from now on: the sequence exchanged some of a window, or of a state, before the launch that uses them. Of states, the one
    /// behind the positions of that launch. Blocks that the position after the prompt needs are never given up.
    fn grown(&mut self, _blocks: &baton_types::BlockTables) {}
    /// KV of `layer` (model layer) is enqueued for positions `0..tokens_end`; it may be read once `fence` is done.
    fn layer_launched(&mut self, layer: u32, tokens_end: usize, fence: &Fence);
    /// All KV of the prompt is computed and the first token is sampled; [`SequenceEvent::Prefilled`] follows. A reader of the blocks keeps
    /// the lease until its reads have ended. The event does not carry the lease, because the event's receiver may be gone.
    fn prefilled(&mut self, lease: Lease);
    /// The sequence ended before that (cancelled, deadline, failure). The lease is kept likewise; the default frees the blocks at once.
    fn ended(&mut self, lease: Lease) {
        drop(lease);
    }
}

/// Events of a sequence, in order; `Prefilled`, `Finished` or `Failed` is always the last.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug)]
pub enum SequenceEvent {
    /// The sequence left the queue.
    Started { at: Instant },
    /// Log-probabilities of the next tokens of the prompt, where the request asked for them: in order, each once, all before the first token.
    Prompt(PromptLogprobs),
    /// A token was generated.
    Token {
        token: TokenId,
        /// Set if the request asked for log-probabilities.
        logprobs: Option<TokenLogprobs>,
        /// Set if the sequence ends with this token.
        finish: Option<FinishReason>,
        /// Present with the first token that is generated here.
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
    /// A sequence that ran here has ended.
    Finished { reason: FinishReason },
    /// A sequence could not continue.
    Failed {
        /// Row of the error table.
        kind: ErrorKind,
        /// Message for the client.
        message: String,
    },
}

/// Receives the events of one sequence. Called on the engine thread; must never block.
pub trait SequenceSink: Send {
    /// Whether so many more events fit now; an unused sink holds at least three. A sequence whose sink has no room for a token and its end
    /// is paused, and cancelled after [`crate::EngineConfig::stall`].
    fn has_room(&self, events: usize) -> bool;
    /// Accepts an event. `false` means that the receiver is gone: the sequence is cancelled.
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
    /// Too many sequences are waiting.
    #[error("{waiting} sequences wait already, the queue holds {waiting_max}")]
    Full { waiting: usize, waiting_max: usize },
    /// The adapter is not loaded.
    #[error("{0:?} is not loaded")]
    UnknownAdapter(AdapterSlot),
    /// Empty prompt, a token outside the vocabulary and the like.
    #[error("{0}")]
    Invalid(String),
    #[error("the engine is stopped")]
    Stopped,
}

/// A point-in-time view of an engine's load.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub waiting: usize,
    /// Prompt tokens neither computed nor known to be cached, over waiting and running sequences.
    pub waiting_tokens: usize,
    /// Sequences in the running batch.
    pub running: usize,
    /// Sum of context lengths in the running batch.
    pub running_tokens: usize,
    pub blocks: baton_kv_cache::BlockCounts,
    /// Prefill tokens per second, recent.
    pub prefill_tokens_per_s: f32,
    /// Decode steps per second, recent; with proposals, tokens per second of a sequence.
    pub decode_steps_per_s: f32,
    /// Steps since the start; increases while there is work.
    pub steps: u64,
    /// Prompt rows computed since the start.
    pub prefill_rows: u64,
    /// Decode rows computed since the start that were to sample a token: one per sequence and step, and one per accepted proposal.
    pub decode_rows: u64,
    /// Times without a step on the device while there was work, since the start.
    pub gaps: StepGaps,
    /// Tokens generated since the start.
    pub generated_tokens: u64,
    /// Tokens proposed since the start, each of which took a row.
    pub proposed_tokens: u64,
    /// Proposed tokens that were sampled.
    pub accepted_tokens: u64,
    /// Those among `proposed_tokens` that the draft model proposed.
    pub draft_proposed_tokens: u64,
    /// Those among `accepted_tokens` that the draft model proposed.
    pub draft_accepted_tokens: u64,
    /// Blocks of the draft model's pool that sequences hold.
    pub draft_blocks: usize,
    /// Prompt tokens whose KV was cached, since the start; counted at each sequence's first token here.
    pub cached_tokens: u64,
    /// Rows recomputed since the start, for sequences that were preempted.
    pub recomputed_tokens: u64,
    /// Token slots in the blocks of all sequences.
    pub slots: usize,
    /// Token slots after the last token of their sequence.
    pub slots_unused: usize,
    /// Preemptions since the start.
    pub preemptions: u64,
}
