//! The engine's handle: submit sequences, reserve blocks, read its state.

use crate::api::{AdapterUse, Load, Run, SequenceRequest, SequenceSink, SubmitError};
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::gate::{LogitObserver, SequenceGate};
use crate::grammar::{GrammarThreads, Grammars};
use crate::health::Heartbeat;
use crate::mailbox::{AdapterChange, Asked, Submission, is_counted};
use crate::model::ModelError;
use crate::runner::{common, start_grammar, wake};
use crate::scheduler::{Accounts, Awaited, SequenceKey};
use crate::shared::Shared;
use baton_kernels::adapter::PackedAdapter;
use baton_kernels::step::AdapterSlot;
use baton_kv_cache::{Fill, HASH_TOKENS, Keep, Lease, PrefixHash, Reserve, SharedPool};
use baton_types::{Share, seeded};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A running engine. Clones refer to the same engine; it stops when the last one is dropped.
#[derive(Clone)]
pub struct EngineHandle(Arc<Owner>);

struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.mailbox.stop();
    }
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl EngineHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self(Arc::new(Owner(shared)))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }

    /// The current time of the engine's clock.
    pub fn now(&self) -> Instant {
        self.shared().clock.now()
    }

    /// Submits a sequence. Its events go to `sink`; dropping the returned control cancels it.
    pub fn submit(
        &self,
        mut request: SequenceRequest,
        run: Run,
        sink: Box<dyn SequenceSink>,
    ) -> Result<SequenceControl, SubmitError> {
        let shared = self.shared();
        if seeded!(IgnoredShares) {
            request.share = Share::default();
        }
        self.check(&request, &run)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let control = SequenceControl { shared: shared.clone(), cancelled: cancelled.clone(), detached: false };
        let prompt = request.tokens.len() - usize::from(matches!(run, Run::Adopted { .. }));
        let prefix = shared.prefix(&request, prompt);
        let asked = Asked {
            priority: request.priority,
            share: request.share,
            tokens: if is_counted(&run) { prompt } else { request.tokens.len() - prompt },
            prompt: prefix.as_ref().map(|prefix| prefix.whole),
            turn: if let Run::Adopted { turn, .. } = &run { *turn } else { None },
        };
        let common = common(shared);
        shared.mailbox.submit(shared.config.waiting_max, is_counted(&run), asked, |key, charged| {
            let is_early = common.grammars.as_ref().is_some_and(|threads| threads.have_place());
            let grammar = is_early.then(|| start_grammar(&request, &common, wake(shared))).flatten();
            Submission { key, request, prefix, charged, run, sink, cancelled, grammar }
        })?;
        Ok(control)
    }

    /// Checks that a sequence of `tokens` tokens, plus one to generate, can ever run here.
    pub fn check_fits(&self, tokens: usize) -> Result<(), SubmitError> {
        let shared = self.shared();
        let limits = [(shared.config.model_len_max, "the context"), (shared.pool_tokens, "the KV pool")];
        let (limit, what) = if limits[0].0 <= limits[1].0 { limits[0] } else { limits[1] };
        if tokens >= limit { Err(SubmitError::NeverFits { tokens: tokens + 1, limit, what }) } else { Ok(()) }
    }

    /// Longest sequence, prompt and output together: the smaller of context and KV pool. Longer output ends with `Length`.
    pub fn len_max(&self) -> usize {
        self.shared().len_max()
    }

    /// Leases blocks for `tokens` positions that a peer will fill, or `None` if there is no room *now*: the watermark is kept, and
    /// sequences that lack blocks have precedence. [`SharedPool::on_freed`] reports when to retry; until then, have room reserved with
    /// [`EngineHandle::keep_room`].
    ///
    /// The lease includes cached blocks of the prefixes with these hashes, see [`Lease::cached_blocks`]. The peer must fill the rest, which
    /// is never empty.
    pub fn reserve(&self, tokens: usize, block_hashes: &[PrefixHash]) -> Option<Lease> {
        let shared = self.shared();
        if shared.starved.load(Ordering::Acquire) {
            return None;
        }
        let keep_free = vec![shared.config.watermark_blocks as usize; shared.pool.groups()];
        let wanted = || Reserve {
            hashes: block_hashes,
            reuse_tokens_max: tokens.saturating_sub(1),
            tokens,
            fill: Fill::Received { peer_block_tokens: None },
            keep_free: &keep_free,
            now: self.now(),
        };
        shared.pool.try_reserve(wanted()).or_else(|| {
            // If no sequence holds blocks, only pins leave no room, and the request would wait for the pins to end.
            let waived = shared.pool.counts().referenced == 0 && shared.pool.waive_pins();
            waived.then(|| shared.pool.try_reserve(wanted())).flatten()
        })
    }

    /// How long blocks of a sequence stay in the prefix cache; `None` if they are not cached.
    pub fn keep(&self, request: &SequenceRequest) -> Option<Keep> {
        self.shared().keep(request)
    }

    /// Takes a place among the sequences, as of now, for blocks of `tokens` tokens that a peer requests.
    pub fn take_turn(&self, priority: i32, share: Share, tokens: usize) -> SequenceKey {
        let share = if seeded!(IgnoredShares) { Share::default() } else { share };
        self.shared().mailbox.take_turn(Asked { priority, share, tokens, prompt: None, turn: None })
    }

    /// The request with this place got its blocks.
    pub fn turn_came(&self, turn: SequenceKey) {
        self.shared().mailbox.turn_came(turn);
    }

    /// Refunds tokens charged with a place: they are not needed, because they are cached or because the request ended before its turn.
    pub fn give_back(&self, turn: SequenceKey, share: Share, tokens: usize) {
        let share = if seeded!(IgnoredShares) { Share::default() } else { share };
        self.shared().mailbox.give_back(turn, share, tokens);
    }

    /// Places and blocks of the sequences here by tenant, as of the last step.
    pub fn accounts(&self) -> Accounts {
        let shared = self.shared();
        let blocks = shared.pool.shape().limiting().blocks.saturating_sub(shared.config.watermark_blocks) as usize;
        let held = shared.accounts.lock().clone();
        held.unwrap_or_else(|| Accounts::new(shared.config.running_max, blocks))
    }

    /// Keeps room for a request that has been waiting since it took its place, or for none. Sequences with a later place are
    /// admitted only if as much stays free, so that a stream of small ones cannot starve it. Sequences beyond their tenant's share may be
    /// preempted for a request within its share.
    pub fn keep_room(&self, mut awaited: Option<Awaited>) {
        let shared = self.shared();
        if seeded!(IgnoredShares) {
            awaited.iter_mut().for_each(|awaited| awaited.share = Share::default());
        }
        if std::mem::replace(&mut *shared.awaited.lock(), awaited) != awaited {
            shared.mailbox.wake();
        }
    }

    /// Whether a sequence lacks blocks, or a reservation waits for some.
    pub fn lacks_blocks(&self) -> bool {
        self.shared().starved.load(Ordering::Acquire) || self.shared().awaited.lock().is_some()
    }

    pub fn pool(&self) -> SharedPool {
        self.shared().pool.clone()
    }

    /// The configuration that it was started with.
    pub fn config(&self) -> &EngineConfig {
        &self.shared().config
    }

    /// Tokens per block of the pool.
    pub fn block_tokens(&self) -> usize {
        self.shared().block_tokens
    }

    /// Load as of the last step; blocks as of now.
    pub fn load(&self) -> Load {
        Load { blocks: self.shared().pool.counts(), ..*self.shared().load.lock() }
    }

    pub fn heartbeat(&self) -> Heartbeat {
        self.shared().health.beat()
    }

    /// How long the current step may still take, see [`Heartbeat::patience`]; zero once it hangs.
    pub fn patience(&self) -> Duration {
        self.heartbeat().patience(self.shared().config.step_max, self.now())
    }

    /// For how long its loop has made no progress while it had work, see [`Heartbeat::still`].
    pub fn still(&self) -> Duration {
        self.heartbeat().still(self.now())
    }

    /// Whether it can serve: it has not failed, and no step hangs.
    pub fn healthy(&self) -> bool {
        !self.heartbeat().failed && !self.patience().is_zero()
    }

    /// Makes the engine check paused sequences at once, for instance because a sink has room again.
    pub fn wake(&self) {
        self.shared().mailbox.wake();
    }

    /// Loads an adapter into a slot between two steps, in place of the one that is there, or frees the slot. No sequence may use it, and
    /// none may be submitted for it until `done` is called, on the engine thread. `done` is dropped without a call if the engine stops.
    pub fn set_adapter(
        &self,
        slot: AdapterSlot,
        adapter: Option<Arc<PackedAdapter>>,
        done: impl FnOnce(Result<(), ModelError>) + Send + 'static,
    ) {
        self.shared().mailbox.change_adapter(AdapterChange { slot, adapter, done: Box::new(done) });
    }

    /// Sets the grammars of its model, and starts threads that follow them. Without them, sequences with a grammar are refused.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn set_grammars(&self, grammars: Arc<dyn Grammars>) -> Result<(), EngineError> {
        let threads = GrammarThreads::start(grammars, self.config().running_max).map_err(EngineError::Thread)?;
        *self.shared().grammars.write() = Some(threads);
        Ok(())
    }

    /// Whether sequences may have a grammar.
    pub fn has_grammars(&self) -> bool {
        self.shared().grammars.read().is_some()
    }

    /// Holds sequences in a phase, for tests; `None` opens everything.
    pub fn set_gate(&self, gate: Option<Arc<dyn SequenceGate>>) {
        *self.shared().gate.write() = gate;
        self.wake();
    }

    /// Passes all logits from the next step on to `observer`, for tests; `None` stops that.
    pub fn set_logit_observer(&self, observer: Option<Arc<dyn LogitObserver>>) {
        *self.shared().logits.write() = observer;
    }

    fn check(&self, request: &SequenceRequest, run: &Run) -> Result<(), SubmitError> {
        let shared = self.shared();
        let (len, prompt_len) = (request.tokens.len(), request.prompt_len);
        let invalid = |message: String| Err(SubmitError::Invalid(message));
        if prompt_len == 0 || prompt_len > len {
            return invalid(format!("prompt_len must be 1 to {len}, the number of tokens, got {prompt_len}"));
        }
        if len - prompt_len >= request.sampling.max_tokens as usize {
            let max = request.sampling.max_tokens;
            return invalid(format!("{} tokens are generated already, max_tokens is {max}", len - prompt_len));
        }
        if let Some(token) = request.tokens.iter().find(|&&t| t as usize >= shared.vocab) {
            return invalid(format!("token {token} is not in the vocabulary of {}", shared.vocab));
        }
        let sampling = &request.sampling;
        let named = sampling.allowed_token_ids.iter().chain(sampling.logit_bias.iter().map(|(token, _)| token));
        if let Some(token) = named.into_iter().find(|&&t| t as usize >= shared.vocab) {
            return invalid(format!(
                "token {token} of its sampling parameters is not in the vocabulary of {}",
                shared.vocab
            ));
        }
        if let Err(error) = sampling.check_ends(&shared.config.end_tokens) {
            return invalid(error.to_string());
        }
        if sampling.grammar.is_some() && shared.grammars.read().is_none() {
            return invalid("this model has no grammars: it has no text, or no end token".into());
        }
        if request.block_hashes().len() > len / HASH_TOKENS {
            return invalid("there are more block hashes than blocks of its tokens".into());
        }
        if let Some(AdapterUse { slot, digest, .. }) = &request.adapter
            && shared.adapters.lock().get(slot) != Some(digest)
        {
            return Err(SubmitError::UnknownAdapter(*slot));
        }
        let adapter = request.adapter.as_ref().map(|used| used.digest);
        if request.prefix.as_ref().is_some_and(|prefix| prefix.adapter() != adapter) {
            return invalid("its block hashes are those of another adapter".into());
        }
        self.check_fits(len)?;
        match run {
            Run::Adopted { .. } if len < 2 => invalid("an adopted sequence has a prompt and a token behind it".into()),
            Run::Adopted { lease, .. } if lease.blocks_end() * shared.block_tokens + 1 < len => {
                invalid(format!("{} adopted blocks do not hold {} tokens", lease.blocks_end(), len - 1))
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("load", &self.load()).finish_non_exhaustive()
    }
}

/// Keeps a sequence in the engine: dropping it cancels the sequence, whatever its phase. For a sequence that has ended it does nothing.
#[must_use = "dropping it cancels the sequence"]
pub struct SequenceControl {
    shared: Arc<Shared>,
    cancelled: Arc<AtomicBool>,
    detached: bool,
}

impl SequenceControl {
    /// Ends the sequence with `Finished { reason: Cancelled }`; its blocks are freed before the next step.
    pub fn cancel(&self) {
        if !self.cancelled.swap(true, Ordering::Release) {
            self.shared.mailbox.wake();
        }
    }

    /// Lets the sequence run to its end without this value.
    pub fn detach(mut self) {
        self.detached = true;
    }
}

impl Drop for SequenceControl {
    fn drop(&mut self) {
        if !self.detached {
            self.cancel();
        }
    }
}

impl std::fmt::Debug for SequenceControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SequenceControl").field("cancelled", &self.cancelled).finish_non_exhaustive()
    }
}
