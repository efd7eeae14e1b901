//! Puts an engine together: with a thread of its own, or driven by whoever holds it.

use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::handle::EngineHandle;
use crate::model::Model;
use crate::runner::{Runner, Turn};
use crate::shared::Shared;
use crate::step_model::StepModel;
use crate::thread;
use baton_kv_cache::Lease;
use baton_types::{Clock, KvPoolMap, PoolMemory, SystemClock};
use std::future::{Future, poll_fn};
use std::sync::Arc;

/// Puts model, pool and thread together; holds nothing itself.
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
        let (engine, runner) = assemble(model, map, config, Arc::new(SystemClock))?;
        thread::spawn(runner).map_err(EngineError::Thread)?;
        Ok(engine)
    }

    /// An engine without a thread, by the time of `clock`: for simulations. Its handle is as any other, but must not be stopped, since
    /// nobody would end what that waits for.
    #[doc(hidden)]
    pub fn driven<M: StepModel>(
        model: M,
        map: &KvPoolMap,
        config: EngineConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<(EngineHandle, Driven<M>), EngineError> {
        let (engine, runner) = assemble(model, map, config, clock)?;
        Ok((engine, Driven(runner)))
    }
}

fn assemble<M: StepModel>(
    model: M,
    map: &KvPoolMap,
    config: EngineConfig,
    clock: Arc<dyn Clock>,
) -> Result<(EngineHandle, Runner<M>), EngineError> {
    let shared = Shared::new(config.try_new()?, map, model.vocab(), clock)?;
    let (len_max, sequences) = (shared.len_max(), shared.pool_tokens / shared.len_max());
    tracing::info!(
        blocks = map.blocks(),
        block_tokens = shared.block_tokens,
        len_max,
        sequences,
        "engine starts: the KV pool holds {sequences} sequences of full length"
    );
    Ok((EngineHandle::new(shared.clone()), Runner::new(model, shared)))
}

/// An engine that moves only on [`Driven::turn`]. Dropping it is a crash of its process: no sink gets an end.
#[doc(hidden)]
pub struct Driven<M>(Runner<M>);

impl<M: StepModel> Driven<M> {
    /// Ends the step that was launched by the turn before, if one was, and launches the next. Whoever calls decides how long a step takes:
    /// between two turns anything else may happen.
    pub fn turn(&mut self) -> Turn {
        match self.0.turn() {
            Ok(Turn::Ended) => self.0.end(None),
            Ok(turn) => return turn,
            Err(error) => self.0.end(Some(format!("the model failed: {error}"))),
        }
        Turn::Ended
    }

    /// Ready once something came since the last turn: that may make an idle engine move.
    pub fn work(&self) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.0.shared().clone();
        poll_fn(move |cx| shared.mailbox.poll_changed(cx))
    }

    /// The blocks of its sequences.
    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.0.leases()
    }
}
