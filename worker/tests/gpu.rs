//! Workers on GPUs: how they size their pool, and what they say where there is none.

use baton_engine::{PrefixUse, Run, SequenceEvent, SequenceRequest, SequenceSink};
use baton_kernels::cuda::{Capability, CudaError, CudaVersion, Gpu, RemoteWrites, open_recorded, recording};
use baton_kernels::numerics::{Half, TensorCore};
use baton_kv_cache::PrefixHasher;
use baton_memory::Rows;
use baton_types::{Digest, MemoryKind, RequestId, SamplingParams, Share, TokenId};
use baton_worker::WorkerError;
use baton_worker::bring_up::{self, Loaded};
use baton_worker::settings::{DeviceKind, EngineSettings, ModelSettings};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

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
        // Block tables are made for the pool, and come to some kilobytes here.
        let memory = loaded.device.memory().unwrap();
        let (ours, part) = (memory.weights + memory.pool + memory.workspace, (MEMORY as f64 * utilization) as u64);
        assert!(ours <= part + (64 << 10), "{ours} of {part} bytes: {memory:?}");
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
    // Little more than the weights: there is room, but for too few blocks.
    let refused = (1..64).filter_map(|quarters| load(quarters << 18, 128, &engine).err());
    refused.for_each(|error| {
        // Memory that a program takes beside the pool may be what is missing.
        assert!(
            matches!(&error, WorkerError::GpuMemory { .. }) || error.to_string().contains("out of memory"),
            "{error}"
        );
    });
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

/// Writes a file of kernels of the sources with this digest.
fn write_kernels(folder: &Path, target: &str, digest: &str) {
    // Of the mark.
    let blake3 = blake3::hash(b"BATONCU1").to_hex();
    let modules = format!(r#"[{{"name":"norm","offset":0,"bytes":8,"blake3":"{blake3}","kernels":[]}}]"#);
    let manifest = format!(r#"{{"target":"{target}","compiler":"13.0","digest":"{digest}","modules":{modules}}}"#);
    let length = (manifest.len() as u32).to_le_bytes();
    let bytes = [b"BATONCU1", &length[..], manifest.as_bytes()].concat();
    std::fs::write(folder.join(format!("{target}.cubins")), bytes).unwrap();
}

/// Starts a worker on a GPU of this capability, whose driver is for this CUDA, with the kernels of this folder.
fn start(capability: (u32, u32), cuda: u32, kernels: &Path) -> Result<Loaded, WorkerError> {
    start_with(capability, cuda, kernels, EngineSettings::default())
}

fn start_with(
    capability: (u32, u32),
    cuda: u32,
    kernels: &Path,
    engine: EngineSettings,
) -> Result<Loaded, WorkerError> {
    let (major, minor) = capability;
    let gpu = Gpu {
        name: "NVIDIA Made Up".into(),
        ordinal: 0,
        capability: Capability { major, minor },
        processors: 4,
        memory: 64 << 20,
        cuda: CudaVersion(cuda),
        remote_writes: RemoteWrites::Unsupported,
    };
    let engine = EngineSettings { device: DeviceKind::Cuda(0), cuda_kernels: kernels.into(), running_max: 4, ..engine };
    bring_up::load_with(&model(128), &engine, &|_, _| (), |config| open_recorded(config, gpu))
}

#[test]
fn a_gpu_that_can_not_be_used_is_refused_with_what_to_do() {
    let digest = include_str!("../../kernels/cu/sources.digest").trim_end();
    let folder = tempfile::tempdir().unwrap();
    write_kernels(folder.path(), "sm_90a", digest);
    write_kernels(folder.path(), "sm_80", "another");
    for (capability, cuda, parts) in [
        ((7, 5), 13_000, ["compute capability 7.5, and this build has kernels for 8.0", "--device cpu"]),
        ((10, 3), 13_010, ["NVIDIA Made Up has compute capability 10.3", "9.0, 10.0 and 12.x"]),
        ((9, 0), 12_090, ["a driver for CUDA 12.9, and kernels of this build need 13.0", "version 580 or newer"]),
        ((8, 9), 13_000, ["sm_89.cubins: No such file", "engine.cuda_kernels"]),
        ((8, 6), 13_000, ["sm_80.cubins: its kernels are of another version", "cargo xtask cubins"]),
    ] {
        let Err(error) = start(capability, cuda, folder.path()) else { panic!("{capability:?} starts") };
        let text = error.to_string();
        assert!(matches!(error, WorkerError::Cuda(_)), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    assert!(matches!(start((7, 5), 13_000, folder.path()), Err(WorkerError::Cuda(CudaError::NoCubin { .. }))));
}

#[test]
fn memory_of_a_gpu_is_told_by_its_use() {
    let folder = tempfile::tempdir().unwrap();
    write_kernels(folder.path(), "sm_90a", include_str!("../../kernels/cu/sources.digest").trim_end());
    let loaded = start((9, 0), 13_000, folder.path()).unwrap();
    let memory = loaded.device.memory().unwrap();
    assert_eq!((memory.total, memory.pool), (64 << 20, loaded.map.bytes() as u64));
    // Two layers of 4 x 128 x 128 and 3 x 128 x 256 weights, two matrices of 128 x 128 for the vocabulary, of two bytes; tables and norms.
    let matrices = 2 * (2 * (3 * 128 * 128 + 3 * 128 * 256) + 2 * 128 * 128);
    assert!((matrices..matrices + (256 << 10)).contains(&(memory.weights as usize)), "{memory:?}, {matrices}");
    assert!(memory.workspace > 0, "{memory:?}");
    assert_eq!(memory.other(), 0, "a recorder has nothing else: {memory:?}");
    let device = loaded.device.clone();
    drop(loaded);
    // The engine ends with its last handle, at its own time.
    let until = Instant::now() + Duration::from_secs(10);
    while device.memory().unwrap().pool > 0 {
        assert!(Instant::now() < until, "the pool stays allocated: {:?}", device.memory());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The settings refuse it before anything is loaded; this is who computes with it.
#[test]
fn blocks_that_kernels_can_not_address_are_bound_by_no_program() {
    let engine = EngineSettings { block_tokens: 48, running_max: 4, ..EngineSettings::default() };
    let Err(error) = load(64 << 20, 64, &engine) else { panic!("blocks of 48 tokens are computed with") };
    assert!(error.to_string().contains("blocks of 48 tokens: GPU kernels take powers of two"), "{error}");
}

struct Sink(Sender<SequenceEvent>);

impl SequenceSink for Sink {
    fn has_room(&self, _: usize) -> bool {
        true
    }

    fn send(&mut self, event: SequenceEvent) -> bool {
        self.0.send(event).is_ok()
    }
}

/// Starts a request for one prompt. The end of what it returns ends the request.
fn submit(to: &Loaded, name: &str) -> (impl Drop + use<>, Receiver<SequenceEvent>) {
    let tokens: Vec<TokenId> = (0..20).collect();
    let request = SequenceRequest {
        id: RequestId::try_new(name).unwrap(),
        prompt_len: tokens.len(),
        sampling: SamplingParams { max_tokens: 300, ignore_eos: true, ..SamplingParams::default() },
        sample_index: 0,
        deadline: Instant::now() + Duration::from_secs(300),
        priority: 0,
        share: Share::default(),
        prefix: Some(PrefixUse::new(PrefixHasher::new(&Digest([1; 32]), b""), &tokens)),
        adapter: None,
        tokens,
    };
    let (sender, events) = channel();
    (to.engine.submit(request, Run::Full, Box::new(Sink(sender))).unwrap(), events)
}

/// Peers' copies may fill the queue of a pool. Sequences that fork a block must not wait behind them, and never fail for it.
#[test]
fn a_fork_needs_no_room_in_the_queue_of_the_pool() {
    for _ in 0..3 {
        let engine = EngineSettings { running_max: 4, ..EngineSettings::default() };
        let loaded = load(64 << 20, 64, &engine).unwrap();
        let (memory, stop, full) = (&loaded.memory, AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if memory.try_read(Rows::run(0, 64), Vec::new()).is_err() {
                        full.store(true, Ordering::Relaxed);
                    }
                }
            });
            while !full.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let running: Vec<_> = (0..4).map(|i| submit(&loaded, &format!("sample-{i}"))).collect();
            let ended: Vec<SequenceEvent> = running
                .iter()
                .map(|(_, events)| {
                    loop {
                        match events.recv_timeout(Duration::from_secs(60)) {
                            Ok(event @ (SequenceEvent::Token { .. } | SequenceEvent::Failed { .. })) => return event,
                            Ok(_) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
                .collect();
            stop.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(|event| matches!(event, SequenceEvent::Token { .. })), "{ended:?}");
        });
        assert!(!loaded.engine.heartbeat().failed);
    }
}

#[test]
fn a_class_that_is_asked_for_is_that_of_the_gpu_or_refused() {
    let digest = include_str!("../../kernels/cu/sources.digest").trim_end();
    let folder = tempfile::tempdir().unwrap();
    ["sm_80", "sm_90a"].into_iter().for_each(|target| write_kernels(folder.path(), target, digest));
    use baton_worker::settings::NumericsChoice::{Auto, Bf16x32, F32Fma, I8x32, Tc8f24, Tc16f25};
    for (capability, takes) in [((8, 6), [Auto, Tc8f24]), ((9, 0), [Auto, Tc16f25])] {
        for numerics in [Auto, F32Fma, Bf16x32, I8x32, Tc16f25, Tc8f24] {
            let engine = EngineSettings { numerics, ..EngineSettings::default() };
            match start_with(capability, 13_000, folder.path(), engine) {
                Ok(_) => assert!(takes.contains(&numerics), "{numerics:?} starts on {capability:?}"),
                Err(error) => {
                    assert!(matches!(error, WorkerError::DeviceClass { .. }), "{error}");
                    assert!(!takes.contains(&numerics), "{numerics:?} on {capability:?}: {error}");
                }
            }
        }
    }
}
