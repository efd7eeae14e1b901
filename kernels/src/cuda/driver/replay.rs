//! A driver that remembers the graph that was enqueued last, so that it can be run again without a host between.

use super::{Address, Algorithm, Command, Driver, Event, Gpu, GraphId, InUse, Pinned, Purpose, Stream, end_of};
use crate::cuda::arguments::model::Gemm;
use crate::device::DeviceError;
use baton_types::FenceStatus;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Replay {
    inner: Arc<dyn Driver>,
    last: Mutex<Option<(Stream, GraphId)>>,
}

impl Replay {
    pub(crate) fn new(inner: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Self { inner, last: Mutex::default() })
    }

    /// How long so many runs of that graph take, one behind the other.
    pub(crate) fn run(&self, times: u32) -> Result<Duration, DeviceError> {
        let Some((stream, graph)) = *self.last.lock() else {
            return Err(DeviceError::Failed("no graph was enqueued".into()));
        };
        let began = Instant::now();
        for _ in 0..times {
            self.inner.enqueue(stream, &Command::Graph(graph))?;
        }
        end_of(&*self.inner, self.inner.record(stream)?)?;
        Ok(began.elapsed())
    }
}

impl Driver for Replay {
    fn gpu(&self) -> &Gpu {
        self.inner.gpu()
    }

    fn memory_free(&self) -> Result<u64, DeviceError> {
        self.inner.memory_free()
    }

    fn alloc(&self, bytes: usize, what: &str) -> Result<Address, DeviceError> {
        self.inner.alloc(bytes, what)
    }

    fn free(&self, at: Address) {
        self.inner.free(at);
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>, DeviceError> {
        self.inner.pinned(bytes)
    }

    fn stream(&self, purpose: Purpose) -> Result<Stream, DeviceError> {
        self.inner.stream(purpose)
    }

    fn enqueue(&self, stream: Stream, command: &Command) -> Result<(), DeviceError> {
        if let Command::Graph(graph) = command {
            *self.last.lock() = Some((stream, *graph));
        }
        self.inner.enqueue(stream, command)
    }

    fn algorithms(&self, product: &Gemm) -> Result<Vec<Algorithm>, DeviceError> {
        self.inner.algorithms(product)
    }

    fn in_use(&self) -> &InUse {
        self.inner.in_use()
    }

    fn show_remote_writes(&self) -> Result<(), DeviceError> {
        self.inner.show_remote_writes()
    }

    fn graph(&self, commands: &[Command]) -> Result<GraphId, DeviceError> {
        self.inner.graph(commands)
    }

    fn record(&self, stream: Stream) -> Result<Event, DeviceError> {
        self.inner.record(stream)
    }

    fn poll(&self, event: Event) -> FenceStatus {
        self.inner.poll(event)
    }

    fn wait(&self, event: Event) -> Result<(), DeviceError> {
        self.inner.wait(event)
    }

    fn forget(&self, event: Event) {
        self.inner.forget(event);
    }
}
