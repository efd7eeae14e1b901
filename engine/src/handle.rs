//! The engine from outside: start it, submit sequences, watch it, stop it.

use crate::api::{Load, Run, SequenceRequest, SequenceSink, SubmitError};
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::gate::{LogitObserver, SequenceGate};
use crate::health::{Health, Heartbeat};
use crate::mailbox::{Mailbox, Submission, is_counted};
use crate::model::Model;
use crate::runner::{self, Runner};
use crate::scheduler::{Awaited, Prefix, SequenceKey};
use crate::step_model::StepModel;
use baton_kv_cache::{Keep, Lease, Pin, PrefixHash, Reserve, SharedPool};
use baton_types::{KvPoolMap, PoolMemory};
use parking_lot::{Condvar, Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Binds `model` to `memory`, which `map` lays out, and starts the engine thread.
    /// Load the model with [`EngineConfig::model_config`] and make `map` with [`EngineConfig::pool_map`].
    pub fn start(
        mut model: Model,
        memory: Arc<dyn PoolMemory>,
        map: &KvPoolMap,
        config: EngineConfig,
    ) -> Result<EngineHandle, EngineError> {
        model.bind(memory, map)?;
        Self::start_with(model, map, config)
    }

    /// Starts the engine thread over any model that is bound to a pool laid out by `map`.
    pub fn start_with<M: StepModel>(
        model: M,
        map: &KvPoolMap,
        config: EngineConfig,
    ) -> Result<EngineHandle, EngineError> {
        let config = config.try_new()?;
        let (groups, blocks) = (map.layout().groups().len(), map.blocks());
        let pool = match &config.prefix_cache {
            Some(cache) => SharedPool::with_cache(groups, blocks, cache.of_pool(map))?,
            None => SharedPool::try_new(groups, blocks)?,
        };
        let block_tokens = map.layout().block_tokens() as usize;
        let pool_tokens = map.blocks() as usize * block_tokens;
        let shared = Arc::new(Shared {
            mailbox: Mailbox::default(),
            pool: pool.clone(),
            vocab: model.vocab(),
            block_tokens,
            pool_tokens,
            layers: map.layout().groups().iter().flat_map(|group| group.layers.iter().copied()).collect(),
            gate: RwLock::default(),
            logits: RwLock::default(),
            load: Mutex::default(),
            starved: AtomicBool::new(false),
            awaited: Mutex::default(),
            health: Health::new(),
            ended: (Mutex::new(false), Condvar::new()),
            config,
        });
        // The pool outlives no engine that it wakes: a weak reference, or the two would keep each other alive.
        let wake = Arc::downgrade(&shared);
        pool.on_freed(move || {
            if let Some(shared) = wake.upgrade() {
                shared.mailbox.wake();
            }
        });
        let len = shared.len_max();
        tracing::info!(
            blocks = map.blocks(),
            block_tokens,
            len_max = len,
            sequences = pool_tokens / len,
            "engine starts: the KV pool holds {} sequences of full length",
            pool_tokens / len
        );
        let runner = Runner::new(model, shared.clone());
        let thread = std::thread::Builder::new().name("engine".into());
        thread.spawn(move || runner::run(runner)).map_err(EngineError::Thread)?;
        Ok(EngineHandle(Arc::new(Owner(shared))))
    }
}

/// What the handle and the engine thread share.
pub(crate) struct Shared {
    pub(crate) mailbox: Mailbox,
    pub(crate) pool: SharedPool,
    pub(crate) config: EngineConfig,
    pub(crate) block_tokens: usize,
    pub(crate) gate: RwLock<Option<Arc<dyn SequenceGate>>>,
    pub(crate) logits: RwLock<Option<Arc<dyn LogitObserver>>>,
    pub(crate) load: Mutex<Load>,
    /// A sequence lacks blocks: nothing is leased to others meanwhile.
    pub(crate) starved: AtomicBool,
    /// Blocks that a peer waits for.
    pub(crate) awaited: Mutex<Option<Awaited>>,
    pub(crate) health: Health,
    pub(crate) ended: (Mutex<bool>, Condvar),
    /// Model layers that have KV.
    pub(crate) layers: Vec<u32>,
    vocab: usize,
    pool_tokens: usize,
}

impl Shared {
    /// Longest sequence, prompt and output together.
    pub(crate) fn len_max(&self) -> usize {
        self.config.model_len_max.min(self.pool_tokens)
    }

    /// The names under which a sequence's blocks are shared, the first `prompt` of whose tokens are its prompt here; none where there is
    /// no cache.
    fn prefix(&self, request: &SequenceRequest, prompt: usize, now: Instant) -> Option<Prefix> {
        let (cache, used) = (self.config.prefix_cache.as_ref()?, request.prefix.as_ref()?);
        let pin = used.pin.map(|pin| Pin { owner: pin.owner, until: now + pin.time });
        let names = used.hasher.prompt(&request.tokens, &[]);
        let whole = used.hasher.whole(&names, &request.tokens[..prompt], &[]);
        Some(Prefix { names, whole, keep: Keep { ttl: used.ttl.unwrap_or(cache.ttl), pin } })
    }
}

/// A running engine. Clones are the same engine; it stops when the last one is dropped.
#[derive(Clone)]
pub struct EngineHandle(Arc<Owner>);

struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.mailbox.stop();
    }
}

impl EngineHandle {
    /// Hands a sequence to the engine. What happens to it comes through `sink`; dropping the returned control cancels it.
    pub fn submit(
        &self,
        request: SequenceRequest,
        run: Run,
        sink: Box<dyn SequenceSink>,
    ) -> Result<SequenceControl, SubmitError> {
        let shared = &self.0.0;
        self.check(&request, &run)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let control = SequenceControl { shared: shared.clone(), cancelled: cancelled.clone(), detached: false };
        // Hashed on this thread: the engine's has better to do.
        let prompt = request.tokens.len() - usize::from(matches!(run, Run::Adopted { .. }));
        let prefix = shared.prefix(&request, prompt, Instant::now());
        shared.mailbox.submit(shared.config.waiting_max, is_counted(&run), |arrival| {
            let key = SequenceKey::new(request.priority, arrival);
            Submission { key, request, prefix, run, sink, cancelled }
        })?;
        Ok(control)
    }

    /// Whether a sequence of `tokens` tokens, plus one to generate, can ever run here.
    pub fn check_fits(&self, tokens: usize) -> Result<(), SubmitError> {
        let shared = &self.0.0;
        let limits = [(shared.config.model_len_max, "the context"), (shared.pool_tokens, "the KV pool")];
        let (limit, what) = if limits[0].0 <= limits[1].0 { limits[0] } else { limits[1] };
        if tokens >= limit { Err(SubmitError::NeverFits { tokens: tokens + 1, limit, what }) } else { Ok(()) }
    }

    /// Longest sequence, prompt and output together: the smaller of context and KV pool. Longer output ends with `Length`.
    pub fn len_max(&self) -> usize {
        self.0.0.len_max()
    }

    /// Leases blocks for `tokens` positions that a peer will fill, or `None` if there is no room *now*: the watermark is kept,
    /// and sequences that lack blocks go first. [`SharedPool::on_freed`] tells when to try again; until then, have the room kept with
    /// [`EngineHandle::keep_room`].
    ///
    /// What is cached of the prefixes `names` comes with it, see [`Lease::cached_blocks`]: the peer has to fill the rest, of which there
    /// is always some.
    pub fn reserve(&self, tokens: usize, names: &[PrefixHash]) -> Option<Lease> {
        let shared = &self.0.0;
        if shared.starved.load(Ordering::Acquire) {
            return None;
        }
        let wanted = || Reserve {
            names,
            reuse_tokens_max: tokens.saturating_sub(1),
            blocks: tokens.div_ceil(shared.block_tokens),
            keep_free: shared.config.watermark_blocks as usize,
            now: Instant::now(),
        };
        shared.pool.try_reserve(wanted()).or_else(|| {
            // Where nobody holds anything, nothing but pins keeps it out, and it would wait for their end.
            let waived = shared.pool.counts().referenced == 0 && shared.pool.waive_pins();
            waived.then(|| shared.pool.try_reserve(wanted())).flatten()
        })
    }

    /// The names under which blocks of a sequence are shared, and for how long they are kept; `None` where they are not.
    pub fn prefix_of(&self, request: &SequenceRequest) -> Option<Prefix> {
        self.0.0.prefix(request, request.tokens.len(), Instant::now())
    }

    /// A turn among the sequences, as of now, for blocks that a peer will ask for.
    pub fn take_turn(&self, priority: i32) -> SequenceKey {
        SequenceKey::new(priority, self.0.0.mailbox.next_arrival())
    }

    /// Keeps room for a reservation of so many tokens that waits since its turn, or for none any more: sequences that come after it
    /// are admitted only where as much stays free, so that no stream of small ones starves it.
    pub fn keep_room(&self, reservation: Option<(SequenceKey, usize)>) {
        let shared = &self.0.0;
        let awaited = reservation.map(|(turn, tokens)| Awaited { turn, blocks: tokens.div_ceil(shared.block_tokens) });
        if std::mem::replace(&mut *shared.awaited.lock(), awaited) != awaited {
            shared.mailbox.wake();
        }
    }

    /// Whether a sequence lacks blocks, or a reservation waits for some.
    pub fn lacks_blocks(&self) -> bool {
        self.0.0.starved.load(Ordering::Acquire) || self.0.0.awaited.lock().is_some()
    }

    /// The block pool.
    pub fn pool(&self) -> SharedPool {
        self.0.0.pool.clone()
    }

    /// The bounds it was started with.
    pub fn config(&self) -> &EngineConfig {
        &self.0.0.config
    }

    /// Load as of the last step; blocks as of now.
    pub fn load(&self) -> Load {
        Load { blocks: self.0.0.pool.counts(), ..*self.0.0.load.lock() }
    }

    /// Signs of life.
    pub fn heartbeat(&self) -> Heartbeat {
        self.0.0.health.beat()
    }

    /// How long the step that runs may still take, see [`Heartbeat::patience`]; zero once it hangs.
    pub fn patience(&self) -> Duration {
        self.heartbeat().patience(self.0.0.config.step_max, Instant::now())
    }

    /// How long its loop has not moved while it had work, see [`Heartbeat::still`].
    pub fn still(&self) -> Duration {
        self.heartbeat().still(Instant::now())
    }

    /// Whether it can serve: it did not fail, and no step hangs.
    pub fn healthy(&self) -> bool {
        !self.heartbeat().failed && !self.patience().is_zero()
    }

    /// Makes the engine look again at paused sequences at once, for instance because a sink has room again.
    pub fn wake(&self) {
        self.0.0.mailbox.wake();
    }

    /// Holds sequences in a phase, for tests; `None` opens everything.
    pub fn set_gate(&self, gate: Option<Arc<dyn SequenceGate>>) {
        *self.0.0.gate.write() = gate;
        self.wake();
    }

    /// Shows all logits from the next step on to `observer`, for tests; `None` shows them to nobody.
    pub fn set_logit_observer(&self, observer: Option<Arc<dyn LogitObserver>>) {
        *self.0.0.logits.write() = observer;
    }

    /// Ends every sequence with `Unavailable` and then the thread. Drain before. Returns whether the thread ended within `step_max`;
    /// must not be called from a sink or observer, which run on that thread.
    pub fn stop(&self) -> bool {
        let shared = &self.0.0;
        shared.mailbox.stop();
        let (ended, changed) = &shared.ended;
        let mut ended = ended.lock();
        let by = Instant::now() + shared.config.step_max;
        while !*ended && !changed.wait_until(&mut ended, by).timed_out() {}
        *ended
    }

    fn check(&self, request: &SequenceRequest, run: &Run) -> Result<(), SubmitError> {
        let shared = &self.0.0;
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
        self.check_fits(len)?;
        match run {
            Run::Adopted { .. } if len < 2 => invalid("an adopted sequence has a prompt and a token behind it".into()),
            Run::Adopted { lease } if lease.blocks_min() * shared.block_tokens + 1 < len => {
                invalid(format!("{} adopted blocks do not hold {} tokens", lease.blocks_min(), len - 1))
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

/// Holds a sequence in the engine: dropping it cancels the sequence, wherever it is. For one that ended it does nothing.
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
