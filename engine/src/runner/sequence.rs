//! One sequence as the engine thread sees it: tokens, parameters and its sink.

use crate::api::{PrefillObserver, Run, SequenceEvent, SequenceRequest, SequenceSink};
use crate::grammar::{Asked, GrammarThreads, SequenceGrammar};
use crate::mailbox::Submission;
use crate::scheduler::Arrival;
use crate::speculation::{Drafter, Proposer};
use baton_kernels::sampling::TokenSet;
use baton_kernels::step::{AdapterSlot, Join, LateMask};
use baton_kv_cache::{HASH_TOKENS, PrefixHash};
use baton_types::fence::AlreadyDone;
use baton_types::{BlockTables, ErrorKind, Fence, FinishReason, RequestError, TokenId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub(super) struct Sequence {
    /// `tokens` grows by each token generated here.
    pub(super) request: SequenceRequest,
    pub(super) sink: Box<dyn SequenceSink>,
    /// Only for a sequence that ends with its first token.
    pub(super) observer: Option<Box<dyn PrefillObserver>>,
    /// Tokens charged to its tenant.
    pub(super) charged: usize,
    /// Whether it holds one of the `waiting_max` places.
    pub(super) counted: bool,
    pub(super) launched_at: Option<Instant>,
    /// Tokens that launched steps will sample.
    pub(super) launched_tokens: usize,
    /// Launched steps that will yield log-probabilities of its prompt.
    pub(super) launched_scores: usize,
    /// Whether a token was generated here.
    pub(super) generated: bool,
    /// The only tokens that may be drawn; `None`: all.
    allowed: Option<Arc<TokenSet>>,
    /// All tokens but those that end it, until it has `min_tokens`.
    without_ends: Option<LateMask>,
    /// What is proposed for it; `None` before its first token here, and where nothing is.
    pub(super) drafter: Option<Drafter>,
    /// Proposals in the launched step.
    pub(super) drafts: Vec<TokenId>,
    /// Where `drafts` come from.
    pub(super) proposer: Proposer,
    /// The masks of its grammar, which hold `without_ends` already.
    grammar: Option<SequenceGrammar>,
    /// Hashes of all its tokens so far; `None` if it does not use the prefix cache.
    block_hashes: Option<Vec<PrefixHash>>,
    cancelled: Arc<AtomicBool>,
}

/// What all sequences of an engine have in common.
pub(crate) struct Common<'a> {
    pub(super) vocab: usize,
    /// Those of the model.
    pub(super) end_tokens: &'a [TokenId],
    pub(crate) grammars: Option<Arc<GrammarThreads>>,
}

/// Has a thread start the grammar of a request, if it has one, which calls `started` once that is done.
pub(crate) fn start_grammar(
    request: &SequenceRequest,
    common: &Common<'_>,
    started: impl FnOnce() + Send + 'static,
) -> Option<SequenceGrammar> {
    let SequenceRequest { tokens, prompt_len, sampling, priority, share, .. } = request;
    let (grammar, threads) = (sampling.grammar.as_ref()?, common.grammars.as_ref()?);
    let asked = Asked {
        grammar: grammar.clone(),
        answer: &tokens[*prompt_len..],
        position: tokens.len(),
        priority: *priority,
        share: *share,
        min_tokens: sampling.min_tokens,
        without_ends: TokenSet::all_but(common.vocab, sampling.ends(common.end_tokens)),
    };
    Some(SequenceGrammar::start(asked, threads.clone(), started))
}

impl Sequence {
    /// The sequence, and its description for the scheduler.
    pub(super) fn new(submission: Submission, counted: bool, common: &Common<'_>) -> (Self, Arrival) {
        let Submission { request, prefix, charged, run, sink, cancelled, grammar, .. } = submission;
        let block_hashes = prefix.as_ref().map(|prefix| prefix.hashes.clone());
        let len = request.tokens.len();
        let (observer, lease) = match run {
            Run::Full => (None, None),
            Run::PrefillOnly { observer } => (Some(observer), None),
            Run::Adopted { lease, .. } => (None, Some(lease)),
        };
        let computed = if lease.is_some() { len - 1 } else { 0 };
        let (pinned, deadline, share) = (observer.is_some(), request.deadline, request.share);
        // The last token of the prompt is followed by one that is sampled. What is adopted was prefilled elsewhere.
        let is_scored = request.sampling.prompt_logprobs.is_some() && lease.is_none();
        let scored = if is_scored { 0..request.prompt_len.min(len).saturating_sub(1) } else { 0..0 };
        let arrival = Arrival { len, computed, lease, pinned, deadline, share, prefix, scored };
        let (launched_at, generated) = (None, false);
        let sampling = &request.sampling;
        let allowed = &sampling.allowed_token_ids;
        let allowed = (!allowed.is_empty()).then(|| Arc::new(allowed.iter().copied().collect()));
        let all_but_ends = || TokenSet::all_but(common.vocab, sampling.ends(common.end_tokens));
        let has_grammar = sampling.grammar.is_some();
        let without_ends = (sampling.min_tokens > 0 && !has_grammar).then(|| LateMask::known(all_but_ends()));
        let sequence = Self {
            request,
            sink,
            observer,
            charged,
            counted,
            launched_at,
            launched_tokens: 0,
            launched_scores: 0,
            generated,
            allowed,
            without_ends,
            drafter: None,
            drafts: Vec::new(),
            proposer: Proposer::default(),
            grammar,
            block_hashes,
            cancelled,
        };
        (sequence, arrival)
    }

    /// Whether another sequence has the same tenant, prompt and adapter, and both use the prefix cache.
    pub(super) fn is_sibling(&self, other: &Self) -> bool {
        let both_cached = self.block_hashes.is_some() && other.block_hashes.is_some();
        both_cached
            && self.adapter() == other.adapter()
            && (self.request.share.tenant, &self.request.tokens) == (other.request.share.tenant, &other.request.tokens)
    }

    /// The only tokens that may be drawn; `None`: all.
    pub(super) fn allowed(&self) -> Option<&Arc<TokenSet>> {
        self.allowed.as_ref()
    }

    fn adapter(&self) -> Option<AdapterSlot> {
        self.request.adapter.as_ref().map(|used| used.slot)
    }

    /// How it ends, if it does not go on.
    pub(super) fn ends_early(&self) -> Option<SequenceEvent> {
        if self.cancelled.load(Ordering::Acquire) {
            return Some(SequenceEvent::Finished { reason: FinishReason::Cancelled });
        }
        let RequestError { kind, message, .. } = self.failure()?.clone();
        if kind == ErrorKind::Internal {
            tracing::error!(request = %self.request.id, "{message}");
        }
        Some(SequenceEvent::Failed { kind, message })
    }

    /// What the device needs to know of it, but for its slot and its blocks.
    pub(super) fn join(&self) -> Join {
        let SequenceRequest { tokens, prompt_len, sampling, sample_index, adapter, .. } = &self.request;
        Join {
            tokens: tokens.clone(),
            prompt_len: *prompt_len,
            sampling: sampling.clone(),
            sample_index: *sample_index,
            bias: sampling.logit_bias.clone(),
            allowed: self.allowed.clone(),
            adapter: adapter.as_ref().map(|used| used.slot),
            ..Join::default()
        }
    }

    /// Whether its grammar, if it has one, has started.
    pub(super) fn is_prepared(&self) -> bool {
        self.request.sampling.grammar.is_none() || self.grammar.as_ref().is_some_and(SequenceGrammar::has_started)
    }

    /// Has a thread start its grammar, which calls `started` once that is done; nothing, if it was called before.
    pub(super) fn prepare(&mut self, common: &Common<'_>, started: impl FnOnce() + Send + 'static) {
        if self.grammar.is_none() {
            self.grammar = start_grammar(&self.request, common, started);
        }
    }

    /// The mask of a row that samples the token at `position`, if it has one.
    pub(super) fn mask(&mut self, position: usize) -> Option<LateMask> {
        if let Some(grammar) = &mut self.grammar {
            return Some(grammar.mask(position));
        }
        let SequenceRequest { prompt_len, sampling, .. } = &self.request;
        let is_before = position - prompt_len < sampling.min_tokens as usize;
        self.without_ends.as_ref().filter(|_| is_before).cloned()
    }

    /// Reports that it left the queue, with the KV of `cached` tokens present already.
    pub(super) fn start(&mut self, blocks: &BlockTables, cached: usize, layers: &[u32], now: Instant) {
        self.tell(SequenceEvent::Started { at: now });
        let Some(observer) = &mut self.observer else { return };
        observer.started(blocks, now);
        if cached > 0 {
            let done: Fence = Arc::new(AlreadyDone);
            layers.iter().for_each(|layer| observer.layer_launched(*layer, cached, &done));
        }
    }

    /// Hashes of its prefixes, where no continuation is expected.
    pub(super) fn cold_hashes(&self) -> Option<&[PrefixHash]> {
        self.request.prefix.as_ref().filter(|prefix| prefix.cold)?;
        self.block_hashes.as_deref()
    }

    /// The hash of all its tokens, if the last one completes a group of 16.
    pub(super) fn next_hash(&mut self) -> Option<PrefixHash> {
        let (hashes, tokens) = (self.block_hashes.as_mut()?, &self.request.tokens);
        let group = tokens.last_chunk().filter(|_| tokens.len().is_multiple_of(HASH_TOKENS))?;
        let hash = self.request.prefix.as_ref()?.next(hashes, group);
        hashes.push(hash);
        Some(hash)
    }

    /// Sends an event that is not the last. If the receiver is gone, the sequence is cancelled.
    pub(super) fn tell(&mut self, event: SequenceEvent) {
        if !self.sink.send(event) {
            self.cancelled.store(true, Ordering::Release);
        }
    }

    /// Appends a generated token and returns whether the sequence ends with it. `len_max` counts prompt and output.
    pub(super) fn push(&mut self, token: TokenId, end_tokens: &[TokenId], len_max: usize) -> Option<FinishReason> {
        self.request.tokens.push(token);
        let sampling = &self.request.sampling;
        if sampling.is_end(token, end_tokens) {
            return Some(FinishReason::Stop);
        }
        let is_full = self.is_full(self.request.tokens.len(), len_max);
        // After a prefill, the answer goes on elsewhere.
        if let (false, None, Some(grammar)) = (is_full, &self.observer, &mut self.grammar) {
            grammar.advance(token);
        }
        is_full.then_some(FinishReason::Length)
    }

    /// Why its grammar failed: what is sampled for it from then on is not taken.
    pub(super) fn failure(&self) -> Option<&RequestError> {
        self.grammar.as_ref()?.failure()
    }

    /// Whether it ends with `len` tokens.
    fn is_full(&self, len: usize, len_max: usize) -> bool {
        len - self.request.prompt_len >= self.request.sampling.max_tokens as usize || len >= len_max
    }

    /// Whether log-probabilities of its prompt may come.
    pub(super) fn scores(&self) -> bool {
        self.request.sampling.prompt_logprobs.is_some() && !self.generated
    }

    /// Whether it goes on here after the tokens that launched steps will sample, unless one of these is an end token.
    pub(super) fn continues(&self, len_max: usize) -> bool {
        self.observer.is_none() && !self.is_full(self.request.tokens.len() + self.launched_tokens, len_max)
    }
}
