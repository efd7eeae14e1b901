//! A GPU for tests. It records every command, runs it late by its kernel's host twin, and has memory that the host can't address.
//!
//! The host twin is scalar code; for products, the CPU's vector kernels of the class, which are checked against the scalar twin.
//!
//! A command runs only when somebody polls or waits for an event behind it: one command a poll. An upload takes its bytes then, and a
//! download brings them then. So a host that reuses a buffer too early, or reads one too early, gets wrong bytes.
//!
//! What a NIC stores lands late: neither kernels nor copies see it before [`Driver::show_remote_writes`].

pub(crate) mod library;
pub(super) mod memory;
pub(super) mod twin;

use super::defect::SeededDefect;
use super::{Address, Algorithm, Command, Driver, Event, GraphId, InUse, Pinned, Purpose, Stream};
use crate::cuda::arguments::model::Gemm;
use crate::cuda::pack::Image;
use crate::cuda::{Capability, CudaError, Gpu, RemoteWrites};
use crate::device::DeviceError;
use crate::numerics::{Half, TensorCore};
use baton_types::{FenceStatus, MemoryKind};
use memory::Memory;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use twin::Twin;

/// What a recorder noted.
#[derive(Clone, Debug)]
pub(crate) enum Note {
    /// A command was enqueued.
    Enqueued(Stream, Command),
    /// An event was recorded behind everything enqueued to a stream.
    Recorded(Stream),
    /// A graph of these commands was made.
    Made(Vec<Command>),
    /// The host waited.
    Waited,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Recorder {
    gpu: Gpu,
    memory_max: usize,
    /// Of the library, for every product.
    algorithms: Vec<Algorithm>,
    in_use: InUse,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    twin: Twin,
    memory: Memory,
    streams: Vec<VecDeque<Command>>,
    /// Commands that every stream was given.
    enqueued: Vec<u64>,
    /// Commands that every stream has run.
    run: Vec<u64>,
    /// Stream, and how many of its commands come before.
    events: HashMap<u64, (usize, u64)>,
    events_made: u64,
    graphs: Vec<Vec<Command>>,
    notes: Vec<Note>,
    /// Whether launches fail.
    refuses_launches: bool,
    /// Events that can't be made from now on.
    refuses_events: u32,
    /// What NICs have stored and the device does not see yet.
    landing: Vec<(Address, Vec<u8>)>,
    /// Streams that were made for programs.
    programs: Vec<Stream>,
}

impl Recorder {
    /// A device of this class, with so many bytes of memory.
    pub(crate) fn new(cores: TensorCore, half: Half, memory_max: usize) -> Arc<Self> {
        Self::with_library(cores, half, memory_max, &[library::DIVIDES, library::DIVIDES_SILENTLY, library::EXACT])
    }

    /// The same with a library of these algorithms.
    pub(crate) fn with_library(
        cores: TensorCore,
        half: Half,
        memory_max: usize,
        algorithms: &[Algorithm],
    ) -> Arc<Self> {
        let capability = match cores {
            TensorCore::Tc16F25 => Capability { major: 9, minor: 0 },
            TensorCore::Tc8F24 => Capability { major: 8, minor: 0 },
        };
        let gpu = Gpu {
            name: "recorder".into(),
            ordinal: 0,
            capability,
            processors: 4,
            memory: memory_max as u64,
            remote_writes: RemoteWrites::Flushed,
            cuda: crate::cuda::gpu::CUDA_MIN,
        };
        Self::of(gpu, cores, half, algorithms)
    }

    /// A device that says it is `gpu`, whose kernels `images` finds as for the CUDA driver.
    pub(crate) fn open(
        gpu: Gpu,
        half: Half,
        images: impl FnOnce(&Gpu) -> Result<Vec<Image>, CudaError>,
    ) -> Result<Arc<Self>, CudaError> {
        images(&gpu)?;
        let cores = gpu.target().map_or(TensorCore::Tc16F25, |target| target.cores);
        Ok(Self::of(gpu, cores, half, &[library::EXACT]))
    }

    fn of(gpu: Gpu, cores: TensorCore, half: Half, algorithms: &[Algorithm]) -> Arc<Self> {
        let memory_max = gpu.memory as usize;
        let state = State {
            twin: Twin { cores, half, defect: None },
            memory: Memory::default(),
            streams: Vec::new(),
            enqueued: Vec::new(),
            run: Vec::new(),
            events: HashMap::new(),
            events_made: 0,
            graphs: Vec::new(),
            notes: Vec::new(),
            refuses_launches: false,
            refuses_events: 0,
            landing: Vec::new(),
            programs: Vec::new(),
        };
        let (algorithms, in_use) = (algorithms.to_vec(), InUse::default());
        Arc::new(Self { gpu, memory_max, algorithms, in_use, state: Mutex::new(state) })
    }

    /// The same with a defect in the twins of its kernels.
    pub(crate) fn with_defect(self: Arc<Self>, defect: Option<SeededDefect>) -> Arc<Self> {
        self.state.lock().twin.defect = defect;
        self
    }

    /// What happened since the last call.
    pub(crate) fn take_notes(&self) -> Vec<Note> {
        std::mem::take(&mut self.state.lock().notes)
    }

    /// Whether a stream was made for a program.
    pub(crate) fn is_of_program(&self, stream: Stream) -> bool {
        self.state.lock().programs.contains(&stream)
    }

    /// Whether it refuses launches from now on.
    pub(crate) fn refuse_launches(&self, refuse: bool) {
        self.state.lock().refuses_launches = refuse;
    }

    /// Makes so many attempts to record an event fail.
    #[cfg(test)]
    pub(crate) fn refuse_events(&self, count: u32) {
        self.state.lock().refuses_events = count;
    }

    /// Commands that were enqueued and have not run.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().streams.iter().map(VecDeque::len).sum()
    }

    /// A NIC reads device memory. It sees what the device's commands have stored so far, and its own writes.
    ///
    /// # Panics
    /// If the bytes are not of one allocation.
    pub(crate) fn read_by_nic(&self, at: Address, len: usize) -> Vec<u8> {
        let state = self.state.lock();
        let mut bytes = state.memory.bytes(at, len).to_vec();
        for (start, written) in &state.landing {
            for (byte, place) in written.iter().zip(start.0..) {
                if let Some(to) = place.checked_sub(at.0).and_then(|offset| bytes.get_mut(offset as usize)) {
                    *to = *byte;
                }
            }
        }
        bytes
    }

    /// A NIC writes device memory by itself.
    ///
    /// # Panics
    /// As [`Recorder::read_by_nic`].
    pub(crate) fn write_by_nic(&self, at: Address, bytes: &[u8]) {
        let mut state = self.state.lock();
        state.memory.bytes(at, bytes.len());
        state.landing.push((at, bytes.to_vec()));
    }

    /// Bytes of device memory that are allocated.
    pub(crate) fn allocated(&self) -> usize {
        self.state.lock().memory.allocated()
    }
}

impl State {
    /// Runs the next command of a stream. Returns whether there was one.
    fn step(&mut self, stream: usize) -> bool {
        let Some(next) = self.streams[stream].pop_front() else { return false };
        self.execute(&next);
        self.run[stream] += 1;
        true
    }

    fn execute(&mut self, command: &Command) {
        match command {
            Command::Upload { from, offset, to, bytes } => {
                let mut data = vec![0; *bytes];
                from.load(*offset, &mut data);
                self.memory.bytes_mut(*to, *bytes).copy_from_slice(&data);
            }
            Command::Download { from, to, offset, bytes } => to.store(*offset, self.memory.bytes(*from, *bytes)),
            Command::Clear { at, bytes } => self.memory.bytes_mut(*at, *bytes).fill(0),
            Command::Launch(launch) => self.twin.run(launch, &mut self.memory),
            Command::Product(product) => self.twin.product(product, &mut self.memory),
            Command::Graph(graph) => {
                let commands = self.graphs[graph.0 as usize].clone();
                commands.iter().for_each(|command| self.execute(command));
            }
        }
    }

    fn has_come(&self, event: Event) -> bool {
        self.events.get(&event.0).is_none_or(|(stream, before)| self.run[*stream] >= *before)
    }

    fn run_to(&mut self, stream: usize, before: u64) {
        while self.run[stream] < before {
            assert!(self.step(stream), "an event behind commands that are not there");
        }
    }

    fn push(&mut self, stream: Stream, queued: Command) {
        self.streams[stream.0 as usize].push_back(queued);
        self.enqueued[stream.0 as usize] += 1;
    }
}

impl Driver for Recorder {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn in_use(&self) -> &InUse {
        &self.in_use
    }

    fn memory_free(&self) -> Result<u64, DeviceError> {
        Ok((self.memory_max - self.state.lock().memory.allocated()) as u64)
    }

    fn alloc(&self, bytes: usize, what: &str) -> Result<Address, DeviceError> {
        let mut state = self.state.lock();
        if bytes > self.memory_max.saturating_sub(state.memory.allocated()) {
            let help = "a recorder has no more".to_owned();
            return Err(DeviceError::OutOfMemory { kind: MemoryKind::Cuda(0), bytes, what: what.into(), help });
        }
        Ok(state.memory.alloc(bytes))
    }

    fn free(&self, at: Address) {
        let mut state = self.state.lock();
        // As the driver does: after everything that was enqueued.
        (0..state.streams.len()).for_each(|stream| while state.step(stream) {});
        state.memory.free(at);
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>, DeviceError> {
        Ok(Arc::new(Staging(Mutex::new(vec![0; bytes]))))
    }

    fn stream(&self, purpose: Purpose) -> Result<Stream, DeviceError> {
        let mut state = self.state.lock();
        state.streams.push(VecDeque::new());
        state.enqueued.push(0);
        state.run.push(0);
        let stream = Stream(state.streams.len() as u32 - 1);
        if purpose == Purpose::Steps {
            state.programs.push(stream);
        }
        Ok(stream)
    }

    fn enqueue(&self, stream: Stream, command: &Command) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        if state.refuses_launches && matches!(command, Command::Launch(_)) {
            return Err(DeviceError::Failed("the recorder refuses launches".into()));
        }
        state.notes.push(Note::Enqueued(stream, command.clone()));
        state.push(stream, command.clone());
        Ok(())
    }

    fn algorithms(&self, _: &Gemm) -> Result<Vec<Algorithm>, DeviceError> {
        Ok(self.algorithms.clone())
    }

    fn graph(&self, commands: &[Command]) -> Result<GraphId, DeviceError> {
        let mut state = self.state.lock();
        state.graphs.push(commands.to_vec());
        let id = GraphId(state.graphs.len() as u32 - 1);
        state.notes.push(Note::Made(commands.to_vec()));
        Ok(id)
    }

    fn record(&self, stream: Stream) -> Result<Event, DeviceError> {
        let mut state = self.state.lock();
        if state.refuses_events > 0 {
            state.refuses_events -= 1;
            return Err(DeviceError::Failed("no event".into()));
        }
        state.events_made += 1;
        let event = Event(state.events_made);
        let before = state.enqueued[stream.0 as usize];
        state.events.insert(event.0, (stream.0 as usize, before));
        state.notes.push(Note::Recorded(stream));
        Ok(event)
    }

    fn show_remote_writes(&self) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        for (at, bytes) in std::mem::take(&mut state.landing) {
            state.memory.bytes_mut(at, bytes.len()).copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn poll(&self, event: Event) -> FenceStatus {
        let mut state = self.state.lock();
        if !state.has_come(event) {
            let (stream, _) = state.events[&event.0];
            state.step(stream);
        }
        if state.has_come(event) { FenceStatus::Done } else { FenceStatus::Pending }
    }

    fn wait(&self, event: Event) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        state.notes.push(Note::Waited);
        if let Some(&(stream, before)) = state.events.get(&event.0) {
            state.run_to(stream, before);
        }
        Ok(())
    }

    fn forget(&self, event: Event) {
        self.state.lock().events.remove(&event.0);
    }
}

/// Stands in for page-locked memory.
#[derive(Debug)]
struct Staging(Mutex<Vec<u8>>);

impl Pinned for Staging {
    fn bytes(&self) -> usize {
        self.0.lock().len()
    }

    fn store(&self, at: usize, data: &[u8]) {
        self.0.lock()[at..at + data.len()].copy_from_slice(data);
    }

    fn load(&self, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.0.lock()[at..at + out.len()]);
    }
}
