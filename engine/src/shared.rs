//! State shared by an engine's handles and its runner.

use crate::api::{Load, SequenceRequest};
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::gate::{LogitObserver, SequenceGate};
use crate::grammar::GrammarThreads;
use crate::health::Health;
use crate::mailbox::Mailbox;
use crate::scheduler::{Accounts, Awaited, Prefix};
use crate::step_model::StepModel;
use baton_kernels::step::AdapterSlot;
use baton_kv_cache::{Keep, Pin, PoolShape, SharedPool};
use baton_types::{Clock, Digest, GroupKind, KvPoolMap};
use parking_lot::{Condvar, Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(crate) struct Shared {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) mailbox: Mailbox,
    pub(crate) pool: SharedPool,
    pub(crate) config: EngineConfig,
    pub(crate) block_tokens: usize,
    pub(crate) gate: RwLock<Option<Arc<dyn SequenceGate>>>,
    /// Those of its model, if it has any.
    pub(crate) grammars: RwLock<Option<Arc<GrammarThreads>>>,
    pub(crate) logits: RwLock<Option<Arc<dyn LogitObserver>>>,
    pub(crate) load: Mutex<Load>,
    /// A sequence lacks blocks: meanwhile no blocks are leased to peers.
    pub(crate) starved: AtomicBool,
    /// What the tenants hold, as of the last plan.
    pub(crate) accounts: Mutex<Option<Accounts>>,
    /// Blocks that a peer's reservation waits for.
    pub(crate) awaited: Mutex<Option<Awaited>>,
    pub(crate) health: Health,
    /// Whether the engine thread has ended, where it has one.
    pub(crate) ended: (Mutex<bool>, Condvar),
    /// Whether a group has a window, whose blocks sequences exchange.
    pub(crate) exchanges_blocks: bool,
    /// Model layers that have KV.
    pub(crate) layers: Vec<u32>,
    /// Loaded adapters, and what they are.
    pub(crate) adapters: Mutex<BTreeMap<AdapterSlot, Digest>>,
    pub(crate) vocab: usize,
    /// Longest sequence that fits the empty pool.
    pub(crate) pool_tokens: usize,
}

impl Shared {
    /// Creates the state of an engine of `model`, over a new pool laid out by `map`.
    pub(crate) fn new(
        config: EngineConfig,
        map: &KvPoolMap,
        model: &impl StepModel,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, EngineError> {
        let shape = PoolShape::from(map);
        let pool_tokens = shape.tokens_max(config.launched_tokens_max());
        let pool = match &config.prefix_cache {
            Some(cache) => SharedPool::with_cache(shape, cache.of_pool(map))?,
            None => SharedPool::try_new(shape)?,
        };
        let block_tokens = map.layout().block_tokens() as usize;
        let shared = Arc::new(Self {
            mailbox: Mailbox::default(),
            pool: pool.clone(),
            vocab: model.vocab(),
            adapters: Mutex::new(model.adapters()),
            block_tokens,
            pool_tokens,
            exchanges_blocks: map
                .layout()
                .groups()
                .iter()
                .any(|group| matches!(group.kind, GroupKind::Window(_) | GroupKind::State)),
            layers: map.layout().groups().iter().flat_map(|group| group.layers.iter().copied()).collect(),
            gate: RwLock::default(),
            grammars: RwLock::default(),
            logits: RwLock::default(),
            load: Mutex::default(),
            starved: AtomicBool::new(false),
            accounts: Mutex::default(),
            awaited: Mutex::default(),
            health: Health::new(clock.now()),
            ended: (Mutex::new(false), Condvar::new()),
            clock,
            config,
        });
        // A weak reference: the pool's callback must not keep the engine alive, which owns the pool.
        let wake = Arc::downgrade(&shared);
        pool.on_freed(move || {
            if let Some(shared) = wake.upgrade() {
                shared.mailbox.wake();
            }
        });
        Ok(shared)
    }

    /// Longest sequence, prompt and output together.
    pub(crate) fn len_max(&self) -> usize {
        self.config.model_len_max.min(self.pool_tokens)
    }

    /// How long the sequence's cached blocks are kept; `None` if there is no cache or the sequence does not use it.
    pub(crate) fn keep(&self, request: &SequenceRequest) -> Option<Keep> {
        let (cache, used) = (self.config.prefix_cache.as_ref()?, request.prefix.as_ref()?);
        let pin = used.pin.map(|pin| Pin { owner: pin.owner, until: self.clock.now() + pin.time });
        Some(Keep { ttl: used.ttl.unwrap_or(cache.ttl), pin })
    }

    /// The hashes under which a sequence's blocks are cached; the first `prompt` of its tokens are its prompt here.
    pub(crate) fn prefix(&self, request: &SequenceRequest, prompt: usize) -> Option<Prefix> {
        let (keep, used) = (self.keep(request)?, request.prefix.as_ref()?);
        let hashes = used.block_hashes_of(&request.tokens);
        let whole = used.whole(&hashes, &request.tokens[..prompt]);
        Some(Prefix { hashes, whole, keep })
    }
}
