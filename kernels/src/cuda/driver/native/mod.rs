//! The CUDA driver, which is loaded when a device is opened and not before.
#![allow(unsafe_code)] // Calls of the CUDA driver.

pub(in crate::cuda) mod inventory;
pub(in crate::cuda) mod library;
mod memory;
mod module;

use super::{Address, Algorithm, Command, Driver, Event, GraphId, InUse, Launch, Pinned, Purpose, Stream};
use crate::cuda::arguments::model::Gemm;
use crate::cuda::pack::Image;
use crate::cuda::{CudaError, Gpu, RemoteWrites};
use crate::device::DeviceError;
use crate::numerics::Half;
use baton_types::{FenceStatus, MemoryKind};
use cudarc::driver::{DriverError, result, sys};
use library::Library;
use memory::HostMemory;
use module::Modules;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Longest wait for an event: a step takes milliseconds, the longest prefill a few seconds.
const EVENT_WAIT_MAX: Duration = Duration::from_secs(60);

/// How long a wait spins before it sleeps: most steps end soon after the host begins to wait.
const SPIN: Duration = Duration::from_micros(200);

/// Of a wait that sleeps.
const PAUSE: Duration = Duration::from_micros(50);

/// A GPU of this host.
pub(in crate::cuda) struct NativeDriver {
    gpu: Gpu,
    modules: Modules,
    half: Half,
    /// Looked for once.
    library: OnceLock<Option<Library>>,
    in_use: InUse,
    state: Mutex<State>,
    /// Released last: page-locked memory, too, holds it.
    context: Arc<Context>,
}

/// The primary context of a device, retained.
struct Context {
    device: sys::CUdevice,
    handle: Handle<sys::CUcontext>,
}

impl Context {
    fn retain(device: sys::CUdevice) -> Result<Self, DriverError> {
        // SAFETY: the device is one that the driver gave.
        Ok(Self { device, handle: Handle(unsafe { result::primary_ctx::retain(device) }?) })
    }

    /// Makes it that of the calling thread.
    fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: it is retained.
        unsafe { result::ctx::set_current(self.handle.0) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained, and is released once. Nothing of it is left.
        _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

#[derive(Default)]
struct State {
    streams: Vec<Handle<sys::CUstream>>,
    events: HashMap<u64, Handle<sys::CUevent>>,
    events_made: u64,
    graphs: Vec<Handle<sys::CUgraphExec>>,
}

/// A handle of the driver. All of them may be used on any thread whose current context is the device's.
#[derive(Clone, Copy)]
struct Handle<T>(T);

// SAFETY: the CUDA driver API is thread-safe, and its handles are opaque to us; each use makes the context current first.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

fn failed(what: &str) -> impl FnOnce(DriverError) -> DeviceError + '_ {
    move |error| DeviceError::Failed(format!("{what}: {error}"))
}

impl NativeDriver {
    /// Opens the device with this number, and loads the kernels that `images` finds for it.
    pub(in crate::cuda) fn open(
        ordinal: u32,
        half: Half,
        images: impl FnOnce(&Gpu) -> Result<Vec<Image>, CudaError>,
    ) -> Result<Arc<Self>, CudaError> {
        let devices = inventory::count()?;
        if ordinal >= devices {
            return Err(CudaError::NoDevice { ordinal, devices });
        }
        let (device, gpu) = inventory::gpu(ordinal)?;
        // Before a context takes memory.
        let images = images(&gpu)?;
        let failed = inventory::failed;
        let context = Arc::new(Context::retain(device).map_err(failed("cuDevicePrimaryCtxRetain"))?);
        context.enter().map_err(failed("cuCtxSetCurrent"))?;
        let (_, memory) = result::mem_get_info().map_err(failed("cuMemGetInfo"))?;
        let gpu = Gpu { memory: memory as u64, ..gpu };
        let modules = Modules::load(&images)?;
        Ok(Arc::new(Self {
            gpu,
            modules,
            half,
            library: OnceLock::new(),
            in_use: InUse::default(),
            state: Mutex::default(),
            context,
        }))
    }

    /// Makes the device's context that of the calling thread.
    fn enter(&self) -> Result<(), DeviceError> {
        self.context.enter().map_err(failed("cuCtxSetCurrent"))
    }

    fn handle(&self, stream: Stream) -> sys::CUstream {
        self.state.lock().streams[stream.0 as usize].0
    }

    fn issue(&self, stream: sys::CUstream, command: &Command) -> Result<(), DeviceError> {
        match command {
            Command::Upload { from, offset, to, bytes } => {
                let from = HostMemory::of(from, *offset, *bytes)?;
                // SAFETY: both sides have as many bytes; the caller keeps them until an event behind the copy has come.
                unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from, *bytes, stream) }.result().map_err(failed("upload"))
            }
            Command::Download { from, to, offset, bytes } => {
                let to = HostMemory::of(to, *offset, *bytes)?;
                // SAFETY: as above.
                unsafe { sys::cuMemcpyDtoHAsync_v2(to, from.0, *bytes, stream) }.result().map_err(failed("download"))
            }
            Command::Clear { at, bytes } => {
                // SAFETY: the memory is allocated, and the caller keeps it as above.
                unsafe { result::memset_d8_async(at.0, 0, *bytes, stream) }.map_err(failed("clear"))
            }
            Command::Launch(launch) => self.launch(stream, launch),
            Command::Product(product) => match self.library.get().and_then(Option::as_ref) {
                Some(library) => library.enqueue(product, self.half, stream),
                None => Err(DeviceError::Failed("a product of a library that is not loaded".into())),
            },
            Command::Graph(graph) => {
                let graph = self.state.lock().graphs[graph.0 as usize].0;
                // SAFETY: graph and stream are live until `self` is dropped.
                unsafe { result::graph::launch(graph, stream) }.map_err(failed("cuGraphLaunch"))
            }
        }
    }

    fn launch(&self, stream: sys::CUstream, launch: &Launch) -> Result<(), DeviceError> {
        let function = self.modules.function(&launch.kernel, launch.shared)?;
        // In words of eight bytes, as the struct is aligned.
        let mut words = [0u64; 32];
        let bytes = launch.arguments.bytes();
        assert!(bytes.len() <= size_of_val(&words), "arguments of {} have {} bytes", launch.kernel, bytes.len());
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let mut parameters = [words.as_mut_ptr().cast::<c_void>()];
        let ([x, y, z], block) = (launch.grid, launch.block);
        // SAFETY: the function takes one struct of these bytes, which is copied by the call. What its pointers reach stays allocated until an
        // event behind the launch has come.
        let launched = unsafe {
            result::launch_kernel(function, (x, y, z), (block, 1, 1), launch.shared, stream, &mut parameters)
        };
        launched.map_err(|error| DeviceError::Failed(format!("{}: {error}", launch.kernel)))
    }
}

impl Driver for NativeDriver {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn in_use(&self) -> &InUse {
        &self.in_use
    }

    fn memory_free(&self) -> Result<u64, DeviceError> {
        self.enter()?;
        let (free, _) = result::mem_get_info().map_err(failed("cuMemGetInfo"))?;
        Ok(free as u64)
    }

    fn alloc(&self, bytes: usize, what: &str) -> Result<Address, DeviceError> {
        self.enter()?;
        // SAFETY: the memory is read only after something was stored to it; it is freed by `free`.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(at) => Ok(Address(at)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let free = result::mem_get_info().map_or(0, |(free, _)| free);
                Err(DeviceError::OutOfMemory {
                    kind: MemoryKind::Cuda(self.gpu.ordinal),
                    bytes,
                    what: what.into(),
                    help: format!(
                        "{free} bytes are free: end other processes, take a smaller model, or leave more beside the KV pool (a lower \
                         engine.gpu_memory_utilization)"
                    ),
                })
            }
            Err(error) => Err(failed("cuMemAlloc")(error)),
        }
    }

    fn free(&self, at: Address) {
        // SAFETY: `at` is of `alloc`, and freed once. cuMemFree waits for work that uses it.
        let freed = self.enter().and_then(|()| unsafe { result::free_sync(at.0) }.map_err(failed("cuMemFree")));
        if let Err(error) = freed {
            tracing::warn!(%error, "device memory is not freed");
        }
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>, DeviceError> {
        self.enter()?;
        Ok(Arc::new(HostMemory::new(bytes, self.context.clone())?))
    }

    fn stream(&self, purpose: Purpose) -> Result<Stream, DeviceError> {
        self.enter()?;
        let (least, greatest) = result::stream::get_priority_range().map_err(failed("cuCtxGetStreamPriorityRange"))?;
        let priority = if purpose == Purpose::Steps { greatest } else { least };
        let stream = result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, priority);
        let stream = stream.map_err(failed("cuStreamCreate"))?;
        let mut state = self.state.lock();
        state.streams.push(Handle(stream));
        Ok(Stream(state.streams.len() as u32 - 1))
    }

    fn enqueue(&self, stream: Stream, command: &Command) -> Result<(), DeviceError> {
        self.enter()?;
        self.issue(self.handle(stream), command)
    }

    fn algorithms(&self, product: &Gemm) -> Result<Vec<Algorithm>, DeviceError> {
        self.enter()?;
        let library = self.library.get_or_init(Library::open).as_ref();
        library.map_or_else(|| Ok(Vec::new()), |library| library.algorithms(product, self.half))
    }

    fn graph(&self, commands: &[Command]) -> Result<GraphId, DeviceError> {
        self.enter()?;
        let stream =
            result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed("cuStreamCreate"))?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream was made above and is used by this call alone; graph and stream are destroyed once.
        let captured = unsafe {
            let begun = result::stream::begin_capture(stream, mode).map_err(failed("cuStreamBeginCapture"));
            let issued = begun.and_then(|()| commands.iter().try_for_each(|command| self.issue(stream, command)));
            // Ends a capture that has failed, too.
            let ended = result::stream::end_capture(stream).map_err(failed("cuStreamEndCapture"));
            let made = issued.and(ended).and_then(|graph| {
                let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
                let destroyed = result::graph::destroy(graph);
                made.map_err(failed("cuGraphInstantiate")).and_then(|made| {
                    destroyed.map_err(failed("cuGraphDestroy"))?;
                    Ok(made)
                })
            });
            result::stream::destroy(stream).map_err(failed("cuStreamDestroy"))?;
            made
        };
        let mut state = self.state.lock();
        state.graphs.push(Handle(captured?));
        Ok(GraphId(state.graphs.len() as u32 - 1))
    }

    fn record(&self, stream: Stream) -> Result<Event, DeviceError> {
        self.enter()?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let event = result::event::create(flags).map_err(failed("cuEventCreate"))?;
        let stream = self.handle(stream);
        // SAFETY: event and stream are live.
        unsafe { result::event::record(event, stream) }.map_err(failed("cuEventRecord"))?;
        let mut state = self.state.lock();
        state.events_made += 1;
        let id = state.events_made;
        state.events.insert(id, Handle(event));
        Ok(Event(id))
    }

    fn show_remote_writes(&self) -> Result<(), DeviceError> {
        match self.gpu.remote_writes {
            RemoteWrites::Ordered => return Ok(()),
            RemoteWrites::Unsupported => return Ok(()), // No NIC was given an address.
            RemoteWrites::Flushed => self.enter()?,
        }
        let target = sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the device's context is current, and takes no memory of ours. The device said that the host may flush.
        unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) }.result().map_err(failed("cuFlushGPUDirectRDMAWrites"))
    }

    fn poll(&self, event: Event) -> FenceStatus {
        if self.enter().is_err() {
            return FenceStatus::Failed;
        }
        let Some(event) = self.state.lock().events.get(&event.0).copied() else { return FenceStatus::Failed };
        // SAFETY: the event is live.
        match unsafe { result::event::query(event.0) } {
            Ok(()) => FenceStatus::Done,
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => FenceStatus::Pending,
            Err(_) => FenceStatus::Failed,
        }
    }

    fn wait(&self, event: Event) -> Result<(), DeviceError> {
        let begin = Instant::now();
        loop {
            match self.poll(event) {
                FenceStatus::Done => return Ok(()),
                FenceStatus::Failed => return Err(DeviceError::Failed("the GPU reports an error".into())),
                FenceStatus::Pending => {}
            }
            let waited = begin.elapsed();
            if waited > EVENT_WAIT_MAX {
                return Err(DeviceError::Failed(format!("a command did not end in {} s", EVENT_WAIT_MAX.as_secs())));
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn forget(&self, event: Event) {
        let event = self.state.lock().events.remove(&event.0);
        let Some(event) = event.filter(|_| self.enter().is_ok()) else { return };
        // SAFETY: it was removed above, so that it is destroyed once. The driver keeps what pending work needs of it.
        let _ = unsafe { result::event::destroy(event.0) };
    }
}

impl Drop for NativeDriver {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        let state = self.state.get_mut();
        // SAFETY: each handle is live and destroyed once. Failures leave memory of the driver behind, which ends with the process.
        unsafe {
            state.graphs.drain(..).for_each(|graph| _ = result::graph::exec_destroy(graph.0));
            state.events.drain().for_each(|(_, event)| _ = result::event::destroy(event.0));
            state.streams.drain(..).for_each(|stream| _ = result::stream::destroy(stream.0));
            self.modules.unload();
        }
        self.library.take();
    }
}

impl fmt::Debug for NativeDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NativeDriver").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}
