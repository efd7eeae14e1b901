//! Creates an engine: with its own thread, or run by the caller.

use crate::config::EngineConfig;
use crate::draft_model::DraftModel;
use crate::error::EngineError;
use crate::handle::EngineHandle;
use crate::model::Model;
use crate::runner::{Runner, Turn};
use crate::shared::Shared;
use crate::step_model::StepModel;
use crate::thread;
use baton_kv_cache::Lease;
use baton_memory::PoolMemory;
use baton_types::{Clock, KvPoolMap, SystemClock};
use std::future::{Future, poll_fn};
use std::sync::Arc;

/// Constructors of an engine; holds no state.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Binds `model` to `memory`, which `map` lays out, and starts the engine thread.
    /// Load the model with [`EngineConfig::model_config`] and make `map` with [`EngineConfig::pool_map`].
    pub fn start(
        model: Model,
        memory: Arc<dyn PoolMemory>,
        map: &KvPoolMap,
        config: EngineConfig,
    ) -> Result<EngineHandle, EngineError> {
        Self::start_with_draft(model, memory, map, config, None)
    }

    /// As [`Engine::start`], with a model that proposes tokens.
    pub fn start_with_draft(
        mut model: Model,
        memory: Arc<dyn PoolMemory>,
        map: &KvPoolMap,
        config: EngineConfig,
        draft: Option<DraftModel>,
    ) -> Result<EngineHandle, EngineError> {
        model.bind(memory, map)?;
        Self::start_with(model, map, config, draft)
    }

    /// Starts the engine thread over any model that is bound to a pool laid out by `map`.
    pub fn start_with<M: StepModel>(
        model: M,
        map: &KvPoolMap,
        config: EngineConfig,
        draft: Option<DraftModel>,
    ) -> Result<EngineHandle, EngineError> {
        let (engine, runner) = assemble(model, map, config, draft, Arc::new(SystemClock))?;
        thread::spawn(runner).map_err(EngineError::Thread)?;
        Ok(engine)
    }

    /// An engine without a thread, on the time of `clock`: for simulations. Its handle works like any other, but must not be stopped: no
    /// thread would complete the stop that it waits for.
    #[doc(hidden)]
    pub fn driven<M: StepModel>(
        model: M,
        map: &KvPoolMap,
        config: EngineConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<(EngineHandle, Driven<M>), EngineError> {
        Self::driven_with_draft(model, map, config, None, clock)
    }

    /// As [`Engine::driven`], with a model that proposes tokens.
    #[doc(hidden)]
    pub fn driven_with_draft<M: StepModel>(
        model: M,
        map: &KvPoolMap,
        config: EngineConfig,
        draft: Option<DraftModel>,
        clock: Arc<dyn Clock>,
    ) -> Result<(EngineHandle, Driven<M>), EngineError> {
        let (engine, runner) = assemble(model, map, config, draft, clock)?;
        Ok((engine, Driven(runner)))
    }
}

fn assemble<M: StepModel>(
    model: M,
    map: &KvPoolMap,
    config: EngineConfig,
    draft: Option<DraftModel>,
    clock: Arc<dyn Clock>,
) -> Result<(EngineHandle, Runner<M>), EngineError> {
    let shared = Shared::new(config.try_new()?, map, &model, clock)?;
    let draft = draft.map(|draft| draft.start(shared.vocab, shared.config.chunk_tokens_max)).transpose()?;
    let len_max = shared.len_max();
    let needs = shared.pool.shape().blocks_at_once(len_max, shared.config.launched_tokens_max());
    let sequences = needs.iter().zip(map.group_blocks()).map(|(needed, blocks)| *blocks as usize / needed).min();
    let sequences = sequences.unwrap_or(0);
    tracing::info!(
        blocks = ?map.group_blocks(),
        block_tokens = shared.block_tokens,
        len_max,
        sequences,
        "engine starts: the KV pool holds {sequences} sequences of full length"
    );
    Ok((EngineHandle::new(shared.clone()), Runner::new(model, draft, shared)))
}

/// An engine that runs only in [`Driven::turn`]. Dropping it acts like a crash of its process: no sink gets a last event.
#[doc(hidden)]
pub struct Driven<M>(Runner<M>);

impl<M: StepModel> Driven<M> {
    /// Finishes the step that the previous turn launched, if any, and launches the next. The caller decides how long a step takes: anything
    /// else may happen between two turns.
    pub fn turn(&mut self) -> Turn {
        match self.0.turn() {
            Ok(Turn::Ended) => self.0.end(None),
            Ok(turn) => return turn,
            Err(error) => self.0.end(Some(format!("the model failed: {error}"))),
        }
        Turn::Ended
    }

    /// Ready once something arrived since the last turn; an idle engine may then have work.
    pub fn work(&self) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.0.shared().clone();
        poll_fn(move |cx| shared.mailbox.poll_changed(cx))
    }

    /// The leases of its sequences.
    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.0.leases()
    }
}
