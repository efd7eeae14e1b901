//! The device that the settings ask for: its numerics class, how it is opened, and the memory that a KV pool may take there.

use crate::error::WorkerError;
use crate::packed::{self, Kept};
use crate::settings::{DeviceKind, EngineSettings, NumericsChoice};
use baton_engine::formats::ModelSource;
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::cuda::{CudaConfig, CudaDevice, CudaError};
use baton_kernels::device::{Device, DeviceMemory};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::reference::ReferenceDevice;
use baton_node::config::ByteSize;
use baton_types::Dtype;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens a GPU, in the class of its tensor cores.
pub(crate) fn gpu(
    settings: &EngineSettings,
    ordinal: u32,
    open: impl FnOnce(&CudaConfig) -> Result<Arc<CudaDevice>, CudaError>,
) -> Result<Arc<dyn Device>, WorkerError> {
    let half = half(settings)?;
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

/// The folder of files of GPU kernels, which `configured` names; where it is empty, `kernels` beside this program.
pub fn cuda_kernels(configured: &Path) -> PathBuf {
    if !configured.as_os_str().is_empty() {
        return configured.into();
    }
    let beside = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.join("kernels")));
    beside.unwrap_or_else(|| "kernels".into())
}

/// A device that computes on the CPU, in the class of settings and model. It keeps packed weights where the settings say.
pub(crate) fn on_cpu(settings: &EngineSettings, source: &dyn ModelSource) -> Result<Arc<dyn Device>, WorkerError> {
    let numerics = numerics(settings, source)?;
    if settings.device == DeviceKind::Reference {
        return Ok(ReferenceDevice::new(numerics));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let config = CpuConfig { threads: settings.threads.of(cores), simd: None, numerics };
    let device = match packed::kept(&settings.packed_cache, source) {
        Some(Kept { cache, model }) => cpu::cached_device(config, cache, model)?,
        None => cpu::device(config)?,
    };
    Ok(if settings.device == DeviceKind::Lagging { Lagging::new(device, LagConfig::default()) } else { device })
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

/// The format of a tensor-core class: matrices and KV have the same.
fn half(settings: &EngineSettings) -> Result<Half, WorkerError> {
    let refused = |setting, got, takes| WorkerError::GpuFormat { setting, got, takes };
    let half = Half::of(settings.weights).ok_or(refused("engine.weights", settings.weights, Dtype::Bf16))?;
    if settings.kv != half.dtype() {
        return Err(refused("engine.kv", settings.kv, half.dtype()));
    }
    Ok(half)
}

/// The system allocates the pool's pages when they are first touched. Without this check, a pool that the host cannot hold would kill
/// this process under load instead of at its start.
pub(crate) fn check_memory(asked: ByteSize, memory: Option<u64>) -> Result<(), WorkerError> {
    match memory {
        // In whole mebibytes, for readability.
        Some(memory) if asked.0 > memory => Err(WorkerError::KvMemory { asked, memory: ByteSize(memory >> 20 << 20) }),
        _ => Ok(()),
    }
}

/// Bytes of the KV pool on a device with memory of its own, beside weights that are still to be loaded: what this worker's part of the
/// memory has left, if no other process has it.
pub(crate) fn pool_on_gpu(
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
        _ => Err(too_little_memory(device, memory, settings, weights)),
    }
}

/// The error of a GPU whose memory does not suffice. `weights` are bytes that are still to be loaded.
pub(crate) fn too_little_memory(
    device: &dyn Device,
    memory: DeviceMemory,
    settings: &EngineSettings,
    weights: u64,
) -> WorkerError {
    WorkerError::GpuMemory {
        gpu: device.info().name,
        total: ByteSize(memory.total >> 20 << 20),
        free: ByteSize(memory.free >> 20 << 20),
        weights: ByteSize(memory.weights.saturating_add(weights) >> 20 << 20),
        utilization: settings.gpu_memory_utilization,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::formats::{GgufModel, RandomModel};

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
    fn a_pool_that_the_host_cannot_hold_is_refused_with_both_numbers() {
        let pool = check_memory(ByteSize(2 << 30), Some(1 << 30)).unwrap_err().to_string();
        assert!(pool.contains("2GiB") && pool.contains("1GiB") && pool.contains("--kv-cache-bytes"), "{pool}");
        assert!(check_memory(ByteSize(1 << 30), Some(1 << 30)).is_ok() && check_memory(ByteSize(1), None).is_ok());
    }
}
