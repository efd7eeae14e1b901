//! From settings to a running engine with its pool: the part of a worker's start that needs no network.

use crate::grpc::checked_card;
use crate::packed::{self, Kept};
use crate::settings::{DeviceKind, EngineSettings, ModelSettings, NumericsChoice, TransferSettings, TransportKind};
use crate::{WorkerError, models, text};
use baton_engine::formats::ModelSource;
use baton_engine::{Engine, EngineConfig, EngineError, EngineHandle, Model, ModelConfig};
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::cuda::{self, CudaConfig, CudaDevice, CudaError};
use baton_kernels::device::{Device, DeviceMemory};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::reference::ReferenceDevice;
use baton_kv_cache::PoolShape;
use baton_kv_transfer::{TransportChoice, UcxLanes, UcxWrites, inventory};
use baton_memory::PoolMemory;
use baton_memory::host::return_free_heap;
use baton_node::config::ByteSize;
use baton_node::host;
use baton_types::{Compatibility, Dtype, KvPoolMap, MemoryKind, ModelCard};
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
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
    // Before anything is downloaded.
    if let DeviceKind::Cuda(ordinal) = engine.device {
        let gpu = gpu(engine, ordinal, open)?;
        return start(gpu, models::open(model, progress)?, model, engine, progress);
    }
    check_memory(engine.kv_cache_bytes, host::memory_bytes())?;
    let source = models::open(model, progress)?;
    let numerics = numerics(engine, source.as_ref())?;
    let kept = match engine.device {
        DeviceKind::Cpu | DeviceKind::Lagging => packed::kept(&engine.packed_cache, source.as_ref()),
        DeviceKind::Reference | DeviceKind::Cuda(_) => None,
    };
    let device = device(engine, numerics, kept, open)?;
    start(device, source, model, engine, progress)
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
    let config = EngineConfig {
        kv: engine.kv,
        kv_cache_bytes: match device.memory() {
            None => engine.kv_cache_bytes.0,
            // For the bounds alone: what is left is known once the model is loaded.
            Some(memory) => pool_on_gpu(device.as_ref(), memory, engine, 2 * source.spec().parameters())?,
        },
        model_len_max: context_max,
        chunk_tokens_max: engine.chunk_tokens_max,
        running_max: engine.running_max,
        waiting_max: engine.waiting_max,
        stall: Duration::from_millis(engine.stall_ms_max),
        step_max: Duration::from_millis(engine.step_ms_max),
        end_tokens: source.end_tokens().to_vec(),
        prefix_cache: engine.prefix_cache.config(),
        ..EngineConfig::default()
    }
    .try_new()?;
    let bundle = text::bundle(source.as_ref())?;
    let card = card(source.as_ref(), model, context_max, bundle.as_deref())?;
    let layout = source.spec().kv_layout(engine.block_tokens, engine.kv).map_err(EngineError::from)?;
    let map = config.pool_map(layout.clone())?;
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
            let map = config.pool_map(layout)?;
            (config, map)
        }
    };
    let memory = device.alloc_pool(&map)?;
    let engine = Engine::start(network, memory.clone(), &map, config)?;
    // If the pool is smaller than the context, it bounds the longest sequence that can be served.
    let card = ModelCard { context_max: engine.len_max() as u32, ..card };
    Ok(Loaded { engine, device, memory, map, compatibility, card, bundle: bundle.map(Into::into) })
}

/// Bytes of the KV pool on a device with memory of its own, beside weights that are still to be loaded: what this worker's part of the
/// memory has left, if no other process has it.
fn pool_on_gpu(
    device: &dyn Device,
    memory: DeviceMemory,
    settings: &EngineSettings,
    weights: u64,
) -> Result<u64, WorkerError> {
    let DeviceMemory { total, free, weights: loaded, pool: _, workspace, beside_pool } = memory;
    let ours = (total as f64 * settings.gpu_memory_utilization) as u64;
    let beside = beside_pool.saturating_add(weights);
    let of_ours = ours.checked_sub(loaded.saturating_add(workspace).saturating_add(beside));
    // Graphs and libraries take memory of the driver's.
    let of_free = free.checked_sub(beside.saturating_add(total / 50));
    match of_ours.zip(of_free).map(|(ours, free)| ours.min(free)) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(WorkerError::GpuMemory {
            gpu: device.info().name,
            total: ByteSize(total >> 20 << 20),
            free: ByteSize(free >> 20 << 20),
            weights: ByteSize(weights >> 20 << 20),
            utilization: settings.gpu_memory_utilization,
        }),
    }
}

/// The folder of files of GPU kernels, which `configured` names; where it is empty, `kernels` beside this program.
pub fn cuda_kernels(configured: &Path) -> PathBuf {
    if !configured.as_os_str().is_empty() {
        return configured.into();
    }
    let beside = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.join("kernels")));
    beside.unwrap_or_else(|| "kernels".into())
}

/// Opens a GPU, in the class of its tensor cores.
fn gpu(
    settings: &EngineSettings,
    ordinal: u32,
    open: impl FnOnce(&CudaConfig) -> Result<Arc<CudaDevice>, CudaError>,
) -> Result<Arc<dyn Device>, WorkerError> {
    let half = half(settings)?;
    if settings.kv != half.dtype() {
        return Err(WorkerError::GpuFormat { setting: "engine.kv", got: settings.kv, takes: half.dtype() });
    }
    let device = open(&CudaConfig { ordinal, half, kernels: cuda_kernels(&settings.cuda_kernels) })?;
    let computes = device.info().numerics;
    let asked = match settings.numerics {
        NumericsChoice::Auto => None,
        NumericsChoice::F32Fma => Some("f32fma"),
        NumericsChoice::Bf16x32 => Some("bf16x32"),
        NumericsChoice::I8x32 => Some("i8x32"),
        NumericsChoice::Tc16f25 => Some("tc16f25"),
        NumericsChoice::Tc8f24 => Some("tc8f24"),
    };
    if asked.is_some_and(|asked| asked != computes.name()) {
        return Err(WorkerError::DeviceClass { device: settings.device, computes: computes.name().into() });
    }
    Ok(device)
}

/// The transport options of the settings, as the transfer takes them.
pub fn transport(settings: &TransferSettings) -> Result<TransportChoice, WorkerError> {
    transport_with(settings, inventory::has_rdma)
}

fn transport_with(
    settings: &TransferSettings,
    has_rdma: impl FnOnce() -> bool,
) -> Result<TransportChoice, WorkerError> {
    let given = |text: &String| Some(text.clone()).filter(|t| !t.is_empty());
    let (bind, named) = (settings.bind, given(&settings.ucx_tls).map(UcxLanes::Named));
    let lanes = match (settings.transport, named) {
        (TransportKind::Tcp, _) => return Ok(TransportChoice::tcp(bind)),
        (TransportKind::Ucx, Some(named)) => named,
        (_, named) if has_rdma() => named.unwrap_or(UcxLanes::Rdma),
        (TransportKind::Auto, _) => return Ok(TransportChoice::tcp(bind)),
        // All peers are on this host.
        (TransportKind::Ucx, None) if bind.is_loopback() => UcxLanes::SharedMemory,
        (TransportKind::Ucx, None) => return Err(WorkerError::NoRdma { bind }),
    };
    let devices = given(&settings.ucx_net_devices);
    Ok(TransportChoice::Ucx { lanes, bind, port: 0, devices, writes: UcxWrites::ByLanes })
}

/// Address that peers connect to, if it is not the bound one: the configured address. If none is configured and the data plane listens at
/// all addresses, it is the one from which this host reaches others.
pub fn advertise(settings: &TransferSettings) -> Option<IpAddr> {
    settings.advertise.or_else(|| settings.bind.is_unspecified().then(|| own_address(settings.bind)).flatten())
}

fn own_address(any: IpAddr) -> Option<IpAddr> {
    // Addresses for documentation (RFC 5737, RFC 3849): nothing is sent to them. The system only reports the source address that it would
    // use.
    let to = if any.is_ipv4() { "192.0.2.1:9" } else { "[2001:db8::1]:9" };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_unspecified())
}

/// Refuses lanes without a fence if the instance has no configured name. Peers bound quarantined blocks per name, and a new name at each
/// start would start with a new bound.
pub fn check_name(named: bool, fences: bool, settings: &TransferSettings) -> Result<(), WorkerError> {
    match named || fences {
        true => Ok(()),
        false => Err(WorkerError::Unnamed { lanes: settings.ucx_tls.clone() }),
    }
}

/// The system allocates the pool's pages when they are first touched. Without this check, a pool that the host cannot hold would kill
/// this process under load instead of at its start.
fn check_memory(asked: ByteSize, memory: Option<u64>) -> Result<(), WorkerError> {
    match memory {
        // In whole mebibytes, for readability.
        Some(memory) if asked.0 > memory => Err(WorkerError::KvMemory { asked, memory: ByteSize(memory >> 20 << 20) }),
        _ => Ok(()),
    }
}

fn context_max(asked: u32, context: usize) -> Result<usize, WorkerError> {
    match asked {
        0 => Ok(context),
        _ if asked as usize > context => Err(WorkerError::ModelLen { asked, context }),
        _ => Ok(asked as usize),
    }
}

/// The numerics class of the settings; the model's stored format must fit it. Never a property of this host: workers that exchange KV must
/// come to the same.
fn numerics(settings: &EngineSettings, source: &dyn ModelSource) -> Result<Numerics, WorkerError> {
    let quantized = source.is_quantized();
    let class = match settings.numerics {
        NumericsChoice::I8x32 if !quantized => return Err(WorkerError::NotQuantized),
        NumericsChoice::I8x32 => Numerics::I8x32,
        NumericsChoice::F32Fma => Numerics::F32Fma { weights: settings.weights },
        NumericsChoice::Tc16f25 => Numerics::TensorCore { cores: TensorCore::Tc16F25, half: half(settings)? },
        NumericsChoice::Tc8f24 => Numerics::TensorCore { cores: TensorCore::Tc8F24, half: half(settings)? },
        // The one for all hosts, of the classes that pass the gate of `docs/numerics.md`.
        NumericsChoice::Auto | NumericsChoice::Bf16x32 => Numerics::Bf16x32,
    };
    let Some(takes) = class.kv() else { return Ok(class) };
    for (setting, got) in [("engine.weights", settings.weights), ("engine.kv", settings.kv)] {
        if got != takes {
            return Err(WorkerError::Numerics { setting, got, class, takes });
        }
    }
    Ok(class)
}

/// The format of matrices and KV in a tensor-core class.
fn half(settings: &EngineSettings) -> Result<Half, WorkerError> {
    let (setting, got, takes) = ("engine.weights", settings.weights, Dtype::Bf16);
    Half::of(got).ok_or(WorkerError::GpuFormat { setting, got, takes })
}

fn device(
    settings: &EngineSettings,
    numerics: Numerics,
    kept: Option<Kept>,
    open: impl FnOnce(&CudaConfig) -> Result<Arc<CudaDevice>, CudaError>,
) -> Result<Arc<dyn Device>, WorkerError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let config = CpuConfig { threads: settings.threads.of(cores), simd: None, numerics };
    let on_cpu = || match kept {
        Some(Kept { cache, model }) => cpu::cached_device(config, cache, model),
        None => cpu::device(config),
    };
    Ok(match settings.device {
        DeviceKind::Cpu => on_cpu()?,
        DeviceKind::Reference => ReferenceDevice::new(numerics),
        DeviceKind::Lagging => Lagging::new(on_cpu()?, LagConfig::default()),
        DeviceKind::Cuda(ordinal) => gpu(settings, ordinal, open)?,
    })
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
    use baton_engine::formats::{GgufModel, RandomModel};
    use std::path::Path;

    #[test]
    fn the_class_is_a_function_of_model_and_settings() {
        let random = RandomModel::parse("random:layers=1").unwrap();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/weights/fixtures/tiny.gguf");
        let gguf = GgufModel::open(&file, None).unwrap();
        assert!(gguf.is_quantized() && !random.is_quantized());
        let sources: [&dyn ModelSource; 2] = [&gguf, &random];
        let class = |choice, source| {
            let settings = EngineSettings { numerics: choice, ..EngineSettings::default() };
            numerics(&settings, source)
        };
        for source in sources {
            // Whatever instructions this host has.
            assert_eq!(class(NumericsChoice::Auto, source).unwrap(), Numerics::Bf16x32);
            assert_eq!(class(NumericsChoice::Bf16x32, source).unwrap(), Numerics::Bf16x32);
            let settings = EngineSettings {
                numerics: NumericsChoice::F32Fma,
                weights: Dtype::F16,
                kv: Dtype::F32,
                ..EngineSettings::default()
            };
            assert_eq!(numerics(&settings, source).unwrap(), Numerics::F32Fma { weights: Dtype::F16 });
        }
        assert_eq!(class(NumericsChoice::I8x32, sources[0]).unwrap(), Numerics::I8x32);
        assert!(matches!(class(NumericsChoice::I8x32, sources[1]), Err(WorkerError::NotQuantized)));
        let other = |weights, kv| {
            let settings = EngineSettings { weights, kv, ..EngineSettings::default() };
            numerics(&settings, sources[0]).unwrap_err().to_string()
        };
        let (weights, kv) = (other(Dtype::F16, Dtype::Bf16), other(Dtype::Bf16, Dtype::F32));
        assert!(weights.contains("engine.weights") && kv.contains("engine.kv"), "{weights}; {kv}");
    }

    #[test]
    fn what_can_never_be_served_is_refused_with_both_numbers() {
        let pool = check_memory(ByteSize(2 << 30), Some(1 << 30)).unwrap_err().to_string();
        assert!(pool.contains("2GiB") && pool.contains("1GiB") && pool.contains("--kv-cache-bytes"), "{pool}");
        assert!(check_memory(ByteSize(1 << 30), Some(1 << 30)).is_ok() && check_memory(ByteSize(1), None).is_ok());
        let length = context_max(100_000, 8192).unwrap_err().to_string();
        assert!(length.contains("100000") && length.contains("8192"), "{length}");
        assert_eq!((context_max(0, 8192).unwrap(), context_max(4096, 8192).unwrap()), (8192, 4096));
    }

    #[test]
    fn ucx_is_taken_where_it_has_lanes_that_suit() {
        let chosen = |transport, tls: &str, bind: &str, rdma| {
            let (ucx_tls, bind) = (tls.into(), bind.parse().unwrap());
            let settings = TransferSettings { transport, ucx_tls, bind, ..TransferSettings::default() };
            match transport_with(&settings, || rdma) {
                Ok(TransportChoice::Tcp { .. }) => "tcp".to_owned(),
                Ok(TransportChoice::Ucx { lanes, .. }) => lanes.tls().to_owned(),
                Err(error) => error.to_string(),
            }
        };
        use TransportKind::{Auto, Tcp, Ucx};
        let (here, there) = ("127.0.0.1", "10.0.0.1");
        for (transport, tls, bind, rdma, expected) in [
            (Auto, "", there, false, "tcp"),
            (Auto, "", there, true, "rc,dc,ud"),
            (Auto, "", here, false, "tcp"),
            (Auto, "rc", there, true, "rc"),
            (Auto, "rc", there, false, "tcp"),
            (Ucx, "", there, true, "rc,dc,ud"),
            (Ucx, "", here, false, "posix,sysv,self"),
            (Ucx, "posix,self", there, false, "posix,self"),
            (Tcp, "rc", there, true, "tcp"),
        ] {
            assert_eq!(chosen(transport, tls, bind, rdma), expected, "{transport:?} {tls:?} {bind} {rdma}");
        }
        let told = chosen(Ucx, "", there, false);
        assert!(told.contains("10.0.0.1") && told.contains("tcp"), "{told}");
    }

    #[test]
    fn what_is_published_can_be_connected_to() {
        let published = |bind: &str, advertise: Option<&str>| {
            let (bind, advertise) = (bind.parse().unwrap(), advertise.map(|address| address.parse().unwrap()));
            super::advertise(&TransferSettings { bind, advertise, ..TransferSettings::default() })
        };
        assert_eq!(published("127.0.0.1", None), None);
        assert_eq!(published("0.0.0.0", Some("10.0.0.1")), Some("10.0.0.1".parse().unwrap()));
        // A host without a route has no address to publish; starting the data plane reports that.
        assert!(published("0.0.0.0", None).is_none_or(|address| !address.is_unspecified()));
    }

    #[test]
    fn lanes_without_a_fence_ask_for_a_name_that_lasts() {
        let settings = TransferSettings { ucx_tls: "cma,tcp".into(), ..TransferSettings::default() };
        let refused = check_name(false, false, &settings).unwrap_err().to_string();
        assert!(refused.contains("cma,tcp") && refused.contains("--instance"), "{refused}");
        for (named, fences) in [(true, false), (false, true), (true, true)] {
            assert!(check_name(named, fences, &settings).is_ok());
        }
    }
}
