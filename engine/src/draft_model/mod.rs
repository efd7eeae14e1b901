//! The draft model: a second, smaller model with the same tokens, whose greedy continuation of a sequence is proposed.
//!
//! It has a pool of its own, without a prefix cache, and there blocks of those sequences of the running batch that it proposes for. A
//! sequence that the pool has no room for has no proposals of it; a sequence that ends or is preempted gives its blocks back at once. Its
//! steps run on the engine thread between two steps of the model, each of at most one chunk of rows.
//!
//! It decides nothing: which sequences it continues, and what becomes of its proposals, is known to [`crate::speculation`] and the runner.

mod past;
mod round;

pub(crate) use round::Task;

use crate::error::EngineError;
use crate::model::Model;
use crate::scheduler::SequenceKey;
use crate::step_model::StepModel;
use baton_kv_cache::{PoolShape, SharedPool, StateBefore};
use baton_memory::PoolMemory;
use baton_types::{KvPoolMap, TokenId};
use past::Past;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A model to propose tokens, bound to its pool.
pub struct DraftModel {
    model: Box<dyn StepModel>,
    map: KvPoolMap,
    len_max: usize,
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftModel").field("map", &self.map).field("len_max", &self.len_max).finish_non_exhaustive()
    }
}

impl DraftModel {
    /// Binds `model`, which was loaded with [`crate::EngineConfig::draft_model_config`], to `memory`, which `map` lays out.
    pub fn new(mut model: Model, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<Self, EngineError> {
        model.bind(memory, map)?;
        let len_max = model.config().model_len_max;
        Ok(Self::with(model, map, len_max))
    }

    /// Any model that is bound to a pool laid out by `map`, for sequences of at most `len_max` tokens.
    pub fn with(model: impl StepModel, map: &KvPoolMap, len_max: usize) -> Self {
        Self { model: Box::new(model), map: map.clone(), len_max }
    }

    /// For a model of `vocab` tokens: the draft model with an empty pool. A step has at most `chunk` rows, or one for each sequence.
    pub(crate) fn start(self, vocab: usize, chunk: usize) -> Result<DraftRunner, EngineError> {
        let Self { model, map, len_max } = self;
        let shape = PoolShape::from(&map);
        if model.vocab() != vocab {
            return Err(EngineError::DraftVocab { draft: model.vocab(), model: vocab });
        }
        if shape.groups.iter().any(|group| !group.kind.is_by_position()) {
            return Err(EngineError::StatesDrafted);
        }
        let len_max = len_max.min(shape.tokens_max(chunk));
        let pool = SharedPool::try_new(shape)?;
        Ok(DraftRunner { model, pool, pasts: BTreeMap::new(), chunk, len_max, joined: 0 })
    }
}

/// A draft model at work.
pub(crate) struct DraftRunner {
    model: Box<dyn StepModel>,
    pool: SharedPool,
    /// What it knows of the sequences that it proposes for.
    pasts: BTreeMap<SequenceKey, Past>,
    chunk: usize,
    len_max: usize,
    /// Slots of the device that the sequences of the last round have.
    joined: usize,
}

impl DraftRunner {
    /// Most rows of a step that takes in tokens.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// How many of a sequence's tokens it has no KV of, the last one included.
    pub(crate) fn behind(&self, key: SequenceKey, tokens: &[TokenId]) -> usize {
        tokens.len() - self.pasts.get(&key).map_or(0, |past| past.known(tokens))
    }

    /// Whether it can propose behind so many tokens of a sequence.
    pub(crate) fn has_room(&self, key: SequenceKey, tokens: usize) -> bool {
        let missing = match self.pasts.get(&key) {
            Some(past) => past.lease.missing(0..tokens, StateBefore::Replaced),
            None => self.pool.shape().blocks_at_once(tokens, self.chunk),
        };
        tokens <= self.len_max && self.pool.available().iter().zip(missing).all(|(free, missing)| *free >= missing)
    }

    /// Forgets a sequence, and gives its blocks back.
    pub(crate) fn leave(&mut self, key: SequenceKey) {
        self.pasts.remove(&key);
    }

    /// Blocks that sequences hold.
    pub(crate) fn blocks(&self) -> usize {
        self.pool.counts().referenced
    }
}
