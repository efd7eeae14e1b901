//! What the engine asks of a GPU: memory, streams of commands, events. Two implementations, and in tests two decorators.

#[cfg(any(test, feature = "testing"))]
pub(super) mod checked;
pub(crate) mod command;
mod copies;
#[cfg(any(test, feature = "testing"))]
pub(super) mod defect;
pub(super) mod native;
#[cfg(any(test, feature = "testing"))]
pub(super) mod recorder;
#[cfg(any(test, feature = "testing"))]
pub(super) mod replay;

pub(crate) use super::arguments::Address;
use super::arguments::model::Gemm;
use super::gpu::Gpu;
use crate::device::DeviceError;
use baton_types::FenceStatus;
pub(crate) use command::{Algorithm, Command, GraphId, Launch};
pub(crate) use copies::Copies;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What device memory is allocated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Weights,
    Pool,
    /// Everything else: activations, block tables, buffers of copies.
    Workspace,
}

/// Bytes that are allocated on a device, by use.
#[derive(Debug, Default)]
pub(crate) struct InUse {
    weights: AtomicU64,
    pool: AtomicU64,
    workspace: AtomicU64,
}

impl InUse {
    fn counter(&self, of: Use) -> &AtomicU64 {
        match of {
            Use::Weights => &self.weights,
            Use::Pool => &self.pool,
            Use::Workspace => &self.workspace,
        }
    }

    pub(crate) fn bytes(&self, of: Use) -> u64 {
        self.counter(of).load(Ordering::Relaxed)
    }
}

/// A queue of commands, run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stream(pub(crate) u32);

/// What a stream is for: steps go before copies where both wait for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The kernels of a program.
    Steps,
    /// Copies between the host and the device.
    Copies,
}

/// A point in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event(pub(crate) u64);

/// Page-locked memory of the host, which the device reads and writes while commands run. Whoever holds it keeps the host away from bytes
/// that a command still uses.
pub(crate) trait Pinned: Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn bytes(&self) -> usize;

    /// Where it begins, if the CUDA driver allocated it.
    fn address(&self) -> Option<*mut u8> {
        None
    }

    /// Copies into it.
    ///
    /// # Panics
    /// If that leaves the memory.
    fn store(&self, at: usize, data: &[u8]);

    /// Copies out of it.
    ///
    /// # Panics
    /// If that leaves the memory.
    fn load(&self, at: usize, out: &mut [u8]);
}

/// One GPU. Every call returns at once but [`Driver::wait`]; commands are enqueued in the order of the calls.
pub(crate) trait Driver: Send + Sync + fmt::Debug {
    /// The device.
    fn gpu(&self) -> &Gpu;

    /// What its buffers take; [`Buffer`] keeps it.
    fn in_use(&self) -> &InUse;

    /// Bytes of device memory that are free now.
    fn memory_free(&self) -> Result<u64, DeviceError>;

    /// Device memory, not initialized. `what` is for the error.
    fn alloc(&self, bytes: usize, what: &str) -> Result<Address, DeviceError>;

    /// Frees what [`Driver::alloc`] gave, once every enqueued command has ended.
    fn free(&self, at: Address);

    /// Page-locked memory, zeroed.
    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>, DeviceError>;

    /// A new stream.
    fn stream(&self, purpose: Purpose) -> Result<Stream, DeviceError>;

    /// Enqueues a command.
    fn enqueue(&self, stream: Stream, command: &Command) -> Result<(), DeviceError>;

    /// How a vendor's library computes a product of this shape, the likely fastest first; nothing without a library.
    fn algorithms(&self, product: &Gemm) -> Result<Vec<Algorithm>, DeviceError>;

    /// Makes a graph of commands, to be enqueued as one.
    fn graph(&self, commands: &[Command]) -> Result<GraphId, DeviceError>;

    /// The end of everything enqueued to this stream so far.
    fn record(&self, stream: Stream) -> Result<Event, DeviceError>;

    /// Whether the event has come. Never waits.
    fn poll(&self, event: Event) -> FenceStatus;

    /// Lets commands that are enqueued later see what NICs had stored in device memory before the call.
    fn show_remote_writes(&self) -> Result<(), DeviceError>;

    /// Waits for the event. Only the end of a step, of a load, of a new pool and of a fork's copy may.
    fn wait(&self, event: Event) -> Result<(), DeviceError>;

    /// Forgets an event.
    fn forget(&self, event: Event);
}

/// Waits for an event, and forgets it.
pub(crate) fn end_of(driver: &dyn Driver, event: Event) -> Result<(), DeviceError> {
    let waited = driver.wait(event);
    driver.forget(event);
    waited
}

/// Device memory that is freed with this.
#[derive(Debug)]
pub(crate) struct Buffer {
    driver: Arc<dyn Driver>,
    at: Address,
    of: Use,
    bytes: u64,
}

impl Buffer {
    /// Allocates workspace.
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: usize, what: &str) -> Result<Self, DeviceError> {
        Self::of(Use::Workspace, driver, bytes, what)
    }

    /// Allocates memory that counts as this use.
    pub(crate) fn of(of: Use, driver: &Arc<dyn Driver>, bytes: usize, what: &str) -> Result<Self, DeviceError> {
        let bytes = bytes.max(1);
        let at = driver.alloc(bytes, what)?;
        driver.in_use().counter(of).fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Self { driver: driver.clone(), at, of, bytes: bytes as u64 })
    }

    pub(crate) fn at(&self) -> Address {
        self.at
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.driver.in_use().counter(self.of).fetch_sub(self.bytes, Ordering::Relaxed);
        self.driver.free(self.at);
    }
}
