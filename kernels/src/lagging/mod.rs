//! A device that behaves like the worst one: it works on its own thread, late, and until a layer's KV is really stored, the rows that will
//! hold it are NaN. Code that reads KV before its fence, or relies on any other order, gets visible garbage.
//!
//! Its pools are remote memory ([`RemotePool`]): the inner device computes on a mapping of its own, and nobody else can address the pool.
//!
//! Rows are already poisoned when a step is launched (and again when the stream reaches it), unless a step that was launched earlier still
//! reads them, which is legal on an in-order stream.

mod executable;
mod poison;
mod stream;

use crate::device::{
    Bounds, Device, DeviceError, DeviceInfo, Executable, Rope, RopeTable, Weight, WeightShape, WeightSpec,
};
use crate::program::Program;
use baton_memory::{PoolMemory, RemoteConfig, RemotePool};
use baton_types::KvPoolMap;
use executable::LateExecutable;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;
use stream::Stream;

/// Delays and bounds of a [`Lagging`] device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LagConfig {
    /// Pause before each step and each layer.
    pub delay: Duration,
    /// Most pending steps and copies; launching more blocks.
    pub queue_max: usize,
    /// Longest wait for room in the queue, or for earlier work.
    pub deadline: Duration,
    /// Delays of reads and writes of its pools.
    pub memory: RemoteConfig,
}

impl Default for LagConfig {
    fn default() -> Self {
        let (delay, deadline) = (Duration::from_micros(50), Duration::from_secs(60));
        Self { delay, queue_max: 16, deadline, memory: RemoteConfig::default() }
    }
}

/// A device that delays each step and poisons KV that is not ready, see the [module](self).
pub struct Lagging {
    inner: Arc<dyn Device>,
    config: LagConfig,
    /// The streams of its executables.
    streams: Mutex<Vec<Weak<Stream>>>,
}

impl Lagging {
    /// Runs the programs of `inner` on threads of their own. `inner` must not be used directly from here on.
    #[allow(clippy::new_ret_no_self)] // Devices are shared by nature.
    pub fn new(inner: Arc<dyn Device>, config: LagConfig) -> Arc<Self> {
        Arc::new(Self { inner, config, streams: Mutex::default() })
    }

    /// Stops all streams before the next step, layer or copy, for tests that inspect the state before a fence.
    pub fn hold(&self) {
        self.hold_all(true);
    }

    /// Resumes the streams after [`Lagging::hold`].
    pub fn release(&self) {
        self.hold_all(false);
    }

    fn hold_all(&self, held: bool) {
        self.streams.lock().iter().filter_map(Weak::upgrade).for_each(|stream| stream.hold(held));
    }
}

impl Device for Lagging {
    fn info(&self) -> DeviceInfo {
        let info = self.inner.info();
        DeviceInfo { name: format!("lagging {}", info.name), asynchronous: true, ..info }
    }

    fn load(&self, spec: &WeightSpec<'_>) -> Result<Weight, DeviceError> {
        self.inner.load(spec)
    }

    fn cached(&self, shape: &WeightShape<'_>) -> Option<Weight> {
        self.inner.cached(shape)
    }

    fn load_rope(&self, table: RopeTable) -> Result<Rope, DeviceError> {
        self.inner.load_rope(table)
    }

    fn alloc_pool(&self, map: &KvPoolMap) -> Result<Arc<dyn PoolMemory>, DeviceError> {
        let pool = RemotePool::new(map.bytes(), self.config.memory).map_err(DeviceError::pool)?;
        Ok(pool)
    }

    fn compile(&self, program: Program, bounds: Bounds) -> Result<Box<dyn Executable>, DeviceError> {
        let inner = self.inner.compile(program.clone(), bounds)?;
        let late = LateExecutable::start(inner, program, bounds, self.config)?;
        let mut streams = self.streams.lock();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(late.stream()));
        Ok(Box::new(late))
    }
}
