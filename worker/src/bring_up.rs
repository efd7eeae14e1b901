//! From settings to a running engine with its pool: the part of a worker's start that needs no network.

use crate::device::{self, check_memory, pool_on_gpu, too_little_memory};
use crate::error::WorkerError;
use crate::grammars::ModelGrammars;
use crate::settings::{DeviceKind, EngineSettings, ModelSettings};
use crate::{draft_model, models, text};
use baton_engine::families::DecoderSpec;
use baton_engine::formats::ModelSource;
use baton_engine::{Engine, EngineConfig, EngineError, EngineHandle, Model, ModelConfig};
use baton_kernels::cuda::{self, CudaConfig, CudaDevice, CudaError};
use baton_kernels::device::Device;
use baton_kv_cache::PoolShape;
use baton_memory::PoolMemory;
use baton_memory::host::return_free_heap;
use baton_node::host;
use baton_proto::convert::checked_card;
use baton_types::{Compatibility, KvLayout, KvPoolMap, MemoryKind, ModelCard};
use std::sync::Arc;
use std::time::Duration;

/// A worker's engine and what other components need to know of it.
#[derive(Clone)]
pub struct Loaded {
    pub engine: EngineHandle,
    /// What the engine computes on.
    pub device: Arc<dyn Device>,
    /// Memory of the engine's KV pool.
    pub memory: Arc<dyn PoolMemory>,
    /// How the pool is laid out.
    pub map: KvPoolMap,
    /// What peers compare before they exchange KV.
    pub compatibility: Compatibility,
    /// The model card for routers.
    pub card: ModelCard,
    /// What the model computes, which adapters must fit.
    pub spec: Arc<DecoderSpec>,
    /// Tokenizer + template bundle, if the model has text.
    pub bundle: Option<bytes::Bytes>,
}

/// Opens the model, loads its weights and starts the engine. Blocks until that is done; `progress` receives 0 to 1.
pub fn load(
    model: &ModelSettings,
    engine: &EngineSettings,
    progress: &(dyn Fn(&str, f32) + Sync),
) -> Result<Loaded, WorkerError> {
    load_with(model, engine, progress, cuda::open)
}

/// As [`load`], where a GPU is opened by `open`.
pub fn load_with(
    model: &ModelSettings,
    engine: &EngineSettings,
    progress: &(dyn Fn(&str, f32) + Sync),
    open: impl FnOnce(&CudaConfig) -> Result<Arc<CudaDevice>, CudaError>,
) -> Result<Loaded, WorkerError> {
    check_device(engine)?;
    let (device, source) = match engine.device {
        DeviceKind::Cuda(ordinal) => {
            let device = device::gpu(engine, ordinal, open)?;
            (device, models::open(model, progress)?)
        }
        DeviceKind::Cpu | DeviceKind::Reference | DeviceKind::Lagging => {
            let source = models::open(model, progress)?;
            (device::on_cpu(engine, source.as_ref())?, source)
        }
    };
    start(device, source, model, engine, progress)
}

/// Whether a worker with these settings can serve the model: opens the models, which are downloaded if they are missing, and checks what
/// [`load`] checks before it loads their weights. What only a GPU knows is not checked.
pub fn check(
    model: &ModelSettings,
    engine: &EngineSettings,
    progress: &(dyn Fn(&str, f32) + Sync),
) -> Result<(), WorkerError> {
    check_device(engine)?;
    let source = models::open(model, progress)?;
    let context_max = context_max(model.max_model_len, source.spec().context)?;
    draft_model::open(source.as_ref(), model, engine, progress)?;
    if !matches!(engine.device, DeviceKind::Cuda(_)) {
        device::on_cpu(engine, source.as_ref())?;
        let config = engine_config(source.as_ref(), engine, context_max, engine.kv_cache_bytes.0)?;
        config.pool_map(source.spec().kv_layout(engine.block_tokens, engine.kv).map_err(EngineError::from)?)?;
    }
    Ok(())
}

/// What is refused whatever the model is refused before anything is downloaded.
fn check_device(engine: &EngineSettings) -> Result<(), WorkerError> {
    match engine.device {
        DeviceKind::Cuda(_) if engine.lora.is_on() => Err(WorkerError::AdaptersOnGpu),
        DeviceKind::Cuda(_) if !engine.speculation.draft_model.is_empty() => Err(WorkerError::DraftOnGpu),
        DeviceKind::Cuda(_) => Ok(()),
        DeviceKind::Cpu | DeviceKind::Reference | DeviceKind::Lagging => {
            check_memory(engine.kv_cache_bytes, host::memory_bytes())
        }
    }
}

/// As [`load`], on a device given by the caller instead of the configured one.
pub fn load_on(
    device: Arc<dyn Device>,
    model: &ModelSettings,
    engine: &EngineSettings,
    progress: &(dyn Fn(&str, f32) + Sync),
) -> Result<Loaded, WorkerError> {
    if device.info().memory == MemoryKind::Host {
        check_memory(engine.kv_cache_bytes, host::memory_bytes())?;
    }
    start(device, models::open(model, progress)?, model, engine, progress)
}

fn start(
    device: Arc<dyn Device>,
    source: Arc<dyn ModelSource>,
    model: &ModelSettings,
    engine: &EngineSettings,
    progress: &(dyn Fn(&str, f32) + Sync),
) -> Result<Loaded, WorkerError> {
    let context_max = context_max(model.max_model_len, source.spec().context)?;
    let draft = draft_model::open(source.as_ref(), model, engine, progress)?;
    // On a GPU: each parameter has 16 bits there.
    let weights = 2 * source.spec().parameters();
    let kv_cache_bytes = match device.memory() {
        None => engine.kv_cache_bytes.0,
        // For the bounds alone: what is left is known once the model is loaded.
        Some(memory) => pool_on_gpu(device.as_ref(), memory, engine, weights)?,
    };
    let config = engine_config(source.as_ref(), engine, context_max, kv_cache_bytes)?;
    let text = text::load(source.as_ref())?;
    let (bundle, grammars) = text.map_or((None, None), |text| (Some(text.bundle), text.grammars));
    let card = card(source.as_ref(), model, context_max, bundle.as_deref())?;
    let layout = source.spec().kv_layout(engine.block_tokens, engine.kv).map_err(EngineError::from)?;
    // A GPU's pool is what its memory leaves: its size is no setting.
    let map_of = |config: &EngineConfig, layout: KvLayout, weights: u64| {
        config.pool_map(layout).map_err(|error| match (error, device.memory()) {
            (EngineError::PoolTooSmall { .. }, Some(memory)) => too_little_memory(&*device, memory, engine, weights),
            (error, _) => error.into(),
        })
    };
    let map = map_of(&config, layout.clone(), weights)?;
    // A model file may declare a context of any length; rotary tables are made for no more positions than the pool holds.
    let pool_tokens = PoolShape::from(&map).tokens_max(config.launched_tokens_max());
    let bounds = ModelConfig { model_len_max: context_max.min(pool_tokens), ..config.model_config() };
    let load = |fraction| progress("loading weights", fraction);
    // The parts of the parsed text are free now. They would count beside weights and pool for good.
    return_free_heap();
    let network = Model::load(source.as_ref(), device.as_ref(), bounds, &load).map_err(EngineError::from)?;
    let compatibility = network.compatibility(layout.clone());
    return_free_heap();
    let (config, map) = match device.memory() {
        None => (config, map),
        Some(memory) => {
            let config = EngineConfig { kv_cache_bytes: pool_on_gpu(device.as_ref(), memory, engine, 0)?, ..config };
            let map = map_of(&config, layout, 0)?;
            (config, map)
        }
    };
    let load = |fraction| progress("loading weights of the draft model", fraction);
    let draft = draft.map(|draft| draft.load(engine, &config, &load)).transpose()?;
    let memory = device.alloc_pool(&map)?;
    let engine = Engine::start_with_draft(network, memory.clone(), &map, config, draft)?;
    if let Some(compiler) = grammars {
        engine.set_grammars(Arc::new(ModelGrammars::new(compiler)))?;
    }
    // If the pool is smaller than the context, it bounds the longest sequence that can be served.
    let card = ModelCard { context_max: engine.len_max() as u32, ..card };
    let (spec, bundle) = (Arc::new(source.spec().clone()), bundle.map(Into::into));
    Ok(Loaded { engine, device, memory, map, compatibility, card, spec, bundle })
}

fn engine_config(
    source: &dyn ModelSource,
    engine: &EngineSettings,
    context_max: usize,
    kv_cache_bytes: u64,
) -> Result<EngineConfig, WorkerError> {
    let config = EngineConfig {
        kv: engine.kv,
        kv_cache_bytes,
        model_len_max: context_max,
        chunk_tokens_max: engine.chunk_tokens_max,
        mixed_chunk_tokens_max: engine.mixed_chunk_tokens_max(),
        running_max: engine.running_max,
        waiting_max: engine.waiting_max,
        stall: Duration::from_millis(engine.stall_ms_max),
        step_max: Duration::from_millis(engine.step_ms_max),
        end_tokens: source.end_tokens().to_vec(),
        prefix_cache: engine.prefix_cache.config(),
        speculation: engine.speculation.config(),
        adapters: engine.lora.bounds(),
        ..EngineConfig::default()
    };
    Ok(config.try_new()?)
}

fn context_max(asked: u32, context: usize) -> Result<usize, WorkerError> {
    match asked {
        0 => Ok(context),
        _ if asked as usize > context => Err(WorkerError::ModelLen { asked, context }),
        _ => Ok(asked as usize),
    }
}

/// The model card for routers. Refuses what they would refuse, since a refused worker waits forever.
fn card(
    source: &dyn ModelSource,
    settings: &ModelSettings,
    context_max: usize,
    bundle: Option<&[u8]>,
) -> Result<ModelCard, WorkerError> {
    let card = ModelCard {
        id: source.name().to_owned(),
        served_names: served_names(source.name(), &settings.served_names),
        revision: models::revision(settings),
        fingerprint: source.fingerprint(),
        context_max: context_max as u32,
        vocab: source.spec().vocab as u32,
        end_tokens: source.end_tokens().to_vec(),
        defaults: source.sampling_defaults(),
        bundle: bundle.map(baton_text::bundle::digest),
    };
    Ok(checked_card(card)?)
}

fn served_names(id: &str, more: &[String]) -> Vec<String> {
    let mut names = vec![id.to_owned()];
    names.extend(more.iter().filter(|n| *n != id).cloned());
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_that_the_model_lacks_is_refused_with_both_numbers() {
        let length = context_max(100_000, 8192).unwrap_err().to_string();
        assert!(length.contains("100000") && length.contains("8192"), "{length}");
        assert_eq!((context_max(0, 8192).unwrap(), context_max(4096, 8192).unwrap()), (8192, 4096));
    }
}
