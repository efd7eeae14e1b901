//! One engine of a case, with its pool and statistics.

use super::case::{Caching, Setup};
use super::ledger::{Ledger, Recorder};
use super::world::{PATIENCE, World};
use baton_engine::{
    Engine, EngineConfig, EngineHandle, Model, ModelError, PrefixCacheConfig, SequenceEvent, SequenceSink, StepInput,
    StepModel, StepOutput,
};
use baton_kernels::numerics::{ATTENTION_SLAB, ATTENTION_SPLIT};
use baton_kv_cache::ForkCopy;
use baton_memory::PoolMemory;
use baton_types::{Compatibility, Fence, KvPoolMap};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

/// A running engine.
pub(super) struct Side {
    pub(super) engine: EngineHandle,
    pub(super) memory: Arc<dyn PoolMemory>,
    pub(super) map: KvPoolMap,
    pub(super) compatibility: Compatibility,
    pub(super) seen: Arc<Mutex<Seen>>,
}

/// Statistics of the steps of one engine.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Most sequences in one step.
    pub(super) widest: usize,
    /// Steps with prefill of one sequence and decode of another.
    pub(super) mixed: usize,
    /// Chunks that start inside an attention slab.
    pub(super) ragged_chunks: usize,
    /// Chunks that start behind the first split of attention.
    pub(super) chunks_behind_split: usize,
    /// Blocks copied where samples diverge.
    pub(super) copies: usize,
}

impl Side {
    /// Starts an engine that records what it computes in `ledger`.
    pub(super) fn start(world: &World, setup: &Setup, ledger: &Arc<Mutex<Ledger>>) -> anyhow::Result<Self> {
        let config = EngineConfig {
            model_len_max: world.len_max() + 1,
            chunk_tokens_max: setup.chunk,
            running_max: setup.running,
            watermark_blocks: 0,
            prefix_cache: (setup.cache != Caching::Off).then(PrefixCacheConfig::default),
            ..EngineConfig::default()
        };
        let device = world.family.device(world.numerics, setup)?;
        let mut model = Model::load(world.source.as_ref(), device.as_ref(), config.model_config(), &|_| ())?;
        let layout = model.layout(setup.block_tokens)?;
        let longest = layout.blocks_for(world.len_max() + 1);
        let blocks = if setup.tight { longest + 2 } else { longest * world.requests() };
        let (map, compatibility) = (KvPoolMap::try_new(layout.clone(), blocks as u32)?, model.compatibility(layout));
        let memory = device.alloc_pool(&map)?;
        // NaN everywhere: a read of something never stored is noticed.
        memory.write_by(Instant::now() + PATIENCE, 0, &vec![0xff; memory.bytes()])?;
        model.bind(memory.clone(), &map)?;
        let seen = Arc::<Mutex<Seen>>::default();
        let watched = Watched { model, seen: seen.clone(), copies: setup.copies };
        let engine = Engine::start_with(watched, &map, config, None)?;
        let is_ahead = setup.lagging;
        let recorder = Recorder { ledger: ledger.clone(), memory: memory.clone(), map: map.clone(), is_ahead };
        engine.set_logit_observer(Some(Arc::new(recorder)));
        Ok(Self { engine, memory, map, compatibility, seen })
    }
}

/// A model whose batches are inspected.
struct Watched {
    model: Model,
    seen: Arc<Mutex<Seen>>,
    copies: bool,
}

impl StepModel for Watched {
    fn vocab(&self) -> usize {
        self.model.spec().vocab
    }

    fn is_asynchronous(&self) -> bool {
        self.model.is_asynchronous()
    }

    fn launch(&mut self, batch: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        // Rows of proposed tokens are no chunk of a prompt.
        let chunks = batch.segments.iter().filter(|s| s.rows > 1 && s.samples <= 1);
        let mut seen = self.seen.lock();
        seen.widest = seen.widest.max(batch.segments.len());
        seen.mixed += usize::from(chunks.clone().next().is_some() && batch.segments.iter().any(|s| s.rows == 1));
        seen.chunks_behind_split += chunks.clone().filter(|s| s.position > ATTENTION_SPLIT).count();
        seen.ragged_chunks += chunks.filter(|s| !s.position.is_multiple_of(ATTENTION_SLAB)).count();
        drop(seen);
        self.model.launch(batch, observer)
    }

    fn finish(&mut self) -> Result<StepOutput, ModelError> {
        self.model.finish()
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        self.seen.lock().copies += 1;
        if self.copies { self.model.copy(copy) } else { Ok(()) }
    }
}

/// The engine that sent an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    P,
    D,
}

/// An event of a request.
pub(super) struct Said {
    pub(super) place: Place,
    pub(super) index: usize,
    pub(super) event: SequenceEvent,
}

/// Sends the events of one sequence to the thread that runs the case.
#[derive(Clone)]
pub(super) struct Events {
    pub(super) place: Place,
    pub(super) index: usize,
    pub(super) sender: Sender<Said>,
}

impl SequenceSink for Events {
    fn has_room(&self, _: usize) -> bool {
        true
    }

    fn send(&mut self, event: SequenceEvent) -> bool {
        self.sender.send(Said { place: self.place, index: self.index, event }).is_ok()
    }
}
