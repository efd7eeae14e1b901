//! Workers on GPUs: how they size their pool, and what they say where there is none.

use baton_kernels::cuda::{CudaError, recording};
use baton_kernels::numerics::{Half, TensorCore};
use baton_types::MemoryKind;
use baton_worker::WorkerError;
use baton_worker::bring_up::{self, Loaded};
use baton_worker::settings::{DeviceKind, EngineSettings, ModelSettings};

fn model(hidden: usize) -> ModelSettings {
    let spec = format!("random:hidden={hidden},heads=4,kv_heads=2,head_dim=32,ffn=256,vocab=128,context=512,layers=2");
    ModelSettings { model: spec, ..ModelSettings::default() }
}

fn load(memory: usize, hidden: usize, engine: &EngineSettings) -> Result<Loaded, WorkerError> {
    let (device, _) = recording(TensorCore::Tc16F25, Half::Bf16, memory);
    bring_up::load_on(device, &model(hidden), engine, &|_, _| ())
}

#[test]
fn the_pool_is_what_weights_and_activations_leave() {
    const MEMORY: usize = 64 << 20;
    let pool = |utilization| {
        let engine =
            EngineSettings { gpu_memory_utilization: utilization, running_max: 4, ..EngineSettings::default() };
        let loaded = load(MEMORY, 128, &engine).unwrap();
        assert_eq!(loaded.memory.kind(), MemoryKind::Cuda(0));
        loaded.map.bytes()
    };
    let (half, most) = (pool(0.5), pool(0.9));
    // A block is the unit, and what a program takes beside it is the same.
    let difference = MEMORY * 4 / 10;
    assert!((difference - 8192..difference + 8192).contains(&(most - half)), "{half} and {most}");
    assert!(half > MEMORY / 10 && most < MEMORY * 9 / 10, "{half} and {most}");
}

#[test]
fn a_model_that_does_not_fit_is_refused_by_name() {
    let engine = EngineSettings { running_max: 4, ..EngineSettings::default() };
    let Err(error) = load(1 << 20, 1024, &engine) else { panic!("it fits") };
    assert!(matches!(error, WorkerError::GpuMemory { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("too little") && text.contains("gpu_memory_utilization = 0.9"), "{text}");
}

#[test]
fn without_a_gpu_the_error_says_what_to_do() {
    let of = |engine: EngineSettings| match bring_up::load(&model(128), &engine, &|_, _| ()) {
        Ok(_) => panic!("a GPU that nobody has"),
        Err(error) => error,
    };
    let error = of(EngineSettings { device: DeviceKind::Cuda(99), ..EngineSettings::default() });
    match &error {
        WorkerError::Cuda(CudaError::NoDriver) => {
            let text = error.to_string();
            assert!(text.contains("libcuda.so.1") && text.contains("--device cpu"), "{text}");
        }
        // Where there is a driver.
        WorkerError::Cuda(CudaError::NoDevice { ordinal: 99, .. } | CudaError::Driver { .. }) => {}
        other => panic!("{other}"),
    }
    let formats =
        EngineSettings { kv: baton_types::Dtype::F16, device: DeviceKind::Cuda(0), ..EngineSettings::default() };
    let text = of(formats).to_string();
    assert!(text.contains("engine.kv is f16") && text.contains("bf16"), "{text}");
}
