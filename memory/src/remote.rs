//! Memory of a remote device, stood in for by host memory that is mapped twice.
//!
//! The device's kernels compute on one mapping. The other one, which is all that the rest of the process could know the address of, may not
//! be accessed at all: code that takes the pool for host memory ends the process instead of passing its tests. Operations run on a thread of
//! the pool, late: a read takes its bytes, and a write stores them, only then. Writes take longer than reads, so a read that does not wait
//! for the write before it finds the bytes of before.

use crate::{Completer, HostPool, MemoryError, NoRoom, Pending, PoolError, PoolMemory, Rows};
use baton_types::MemoryKind;
use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Delays and bounds of a [`RemotePool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// From the start of a read or a checksum to the instant at which it takes its bytes.
    pub read_delay: Duration,
    /// From the start of a write or a copy to the instant at which its bytes are stored.
    pub write_delay: Duration,
    /// Most operations that run; more fail.
    pub operations_max: usize,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        let (read_delay, write_delay) = (Duration::from_micros(30), Duration::from_micros(120));
        Self { read_delay, write_delay, operations_max: 1 << 16 }
    }
}

/// Pool memory that the host reaches only by operations.
pub struct RemotePool {
    /// The device's own mapping.
    device: Arc<HostPool>,
    /// The mapping that nobody may access.
    alias: Arc<HostPool>,
    config: RemoteConfig,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
    #[cfg(any(test, feature = "testing"))]
    passes_for_host: bool,
}

/// What runs when an operation is due.
type Work = Box<dyn FnOnce(&HostPool) + Send>;

#[derive(Default)]
struct State {
    /// By the instant at which they are due, then in order of their start.
    waiting: BTreeMap<(Instant, u64), Work>,
    started: u64,
    /// One is taken from `waiting` and has not ended. Its place is free already, so whoever its end wakes finds room.
    ends: bool,
    held: bool,
    stop: bool,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    /// The thread: each operation when it is due.
    fn serve(&self, device: &HostPool) {
        let mut state = self.state.lock();
        while !state.stop {
            let next = state.waiting.keys().next().map(|(due, _)| *due).filter(|_| !state.held);
            match next {
                Some(due) if due <= Instant::now() => {
                    if let Some((_, work)) = state.waiting.pop_first() {
                        state.ends = true;
                        drop(state);
                        work(device);
                        state = self.state.lock();
                        state.ends = false;
                        self.changed.notify_all();
                    }
                }
                Some(due) => drop(self.changed.wait_until(&mut state, due)),
                None => self.changed.wait(&mut state),
            }
        }
    }
}

impl RemotePool {
    /// Maps zeroed memory twice and starts the thread of its operations.
    ///
    /// # Errors
    /// If the system refuses memory or a thread.
    pub fn new(bytes: usize, config: RemoteConfig) -> Result<Arc<Self>, PoolError> {
        Self::start(bytes, config).map(Arc::new)
    }

    fn start(bytes: usize, config: RemoteConfig) -> Result<Self, PoolError> {
        let (device, alias) = HostPool::with_alias(bytes)?;
        let queue = Arc::<Queue>::default();
        let (served, mapped) = (queue.clone(), device.clone());
        let thread = std::thread::Builder::new().name("remote-memory".into()).spawn(move || served.serve(&mapped));
        let thread = Some(thread.map_err(|source| PoolError { bytes, source })?);
        Ok(Self {
            device,
            alias,
            config,
            queue,
            thread,
            #[cfg(any(test, feature = "testing"))]
            passes_for_host: false,
        })
    }

    /// A pool with a defect: it says that it is memory of the host, at the address of the alias. For tests that show what becomes of it.
    ///
    /// # Errors
    /// As [`RemotePool::new`].
    #[cfg(any(test, feature = "testing"))]
    pub fn passing_for_host(bytes: usize, config: RemoteConfig) -> Result<Arc<Self>, PoolError> {
        // Read, so that no linker drops it.
        std::hint::black_box(MARKER);
        let mut pool = Self::start(bytes, config)?;
        pool.passes_for_host = true;
        Ok(Arc::new(pool))
    }

    /// The remote pool that `memory` is, if it is one.
    pub fn of(memory: &Arc<dyn PoolMemory>) -> Option<Arc<Self>> {
        memory.clone().into_any().downcast().ok()
    }

    /// The memory as the device's kernels see it. Only the device that allocated the pool may use it.
    pub fn device_side(&self) -> &Arc<HostPool> {
        &self.device
    }

    /// Number of operations that have started and whose place is not free. The last one may still move its bytes; see
    /// [`RemotePool::end_all`].
    pub fn running(&self) -> usize {
        self.queue.state.lock().waiting.len()
    }

    /// Stops operations before they take or store bytes, for tests that inspect the state before that.
    pub fn hold(&self) {
        self.hold_all(true);
    }

    /// Resumes operations after [`RemotePool::hold`].
    pub fn release(&self) {
        self.hold_all(false);
    }

    /// Resumes operations until all that have started have ended, and holds those that come after. Whether that was by `deadline`.
    pub fn end_all(&self, deadline: Instant) -> bool {
        let mut state = self.queue.state.lock();
        state.held = false;
        self.queue.changed.notify_all();
        self.queue.changed.wait_while_until(&mut state, |state| state.ends || !state.waiting.is_empty(), deadline);
        state.held = true;
        !state.ends && state.waiting.is_empty()
    }

    fn hold_all(&self, held: bool) {
        self.queue.state.lock().held = held;
        self.queue.changed.notify_all();
    }

    fn run<B: Send + 'static, T: Send + 'static>(
        &self,
        delay: Duration,
        buffer: B,
        work: impl FnOnce(&HostPool, B) -> Result<T, MemoryError> + Send + 'static,
    ) -> Result<Pending<T>, NoRoom<B>> {
        let mut state = self.queue.state.lock();
        if state.waiting.len() >= self.config.operations_max {
            return Err(NoRoom { running: state.waiting.len(), buffer });
        }
        let (pending, completer): (_, Completer<T>) = Pending::running();
        state.started += 1;
        let at = (Instant::now() + delay, state.started);
        state.waiting.insert(at, Box::new(move |device| completer.complete(work(device, buffer))));
        drop(state);
        self.queue.changed.notify_all();
        Ok(pending)
    }
}

/// `cargo xtask hazards` searches binaries for this text.
#[cfg(any(test, feature = "testing"))]
#[used]
static MARKER: &str = "BATON_TESTING_HAZARD memory";

impl PoolMemory for RemotePool {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Remote
    }

    fn bytes(&self) -> usize {
        self.alias.bytes()
    }

    fn try_read(&self, from: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        self.run(self.config.read_delay, into, move |device, into| device.read_now(&from, into))
    }

    fn try_write(&self, to: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        self.run(self.config.write_delay, data, move |device, data| device.write_now(&to, data))
    }

    fn copy(&self, from: Rows, to: Rows) -> Pending<()> {
        let copy = self.run(self.config.write_delay, (), move |device, ()| device.copy_now(&from, &to));
        copy.unwrap_or_else(NoRoom::ended)
    }

    fn try_checksum(&self, rows: Vec<Rows>) -> Result<Pending<Vec<u64>>, NoRoom<Vec<Rows>>> {
        self.run(self.config.read_delay, rows, |device, rows| device.checksum_now(&rows))
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        #[cfg(any(test, feature = "testing"))]
        if self.passes_for_host {
            return self.alias.clone();
        }
        self
    }
}

impl Drop for RemotePool {
    fn drop(&mut self) {
        self.queue.state.lock().stop = true;
        self.queue.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // The panic hook has reported a panic there.
        }
        // Operations that have not run fail with their completers.
        self.queue.state.lock().waiting.clear();
    }
}

impl fmt::Debug for RemotePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemotePool({} bytes)", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn operations_take_and_store_bytes_late() {
        let remote = RemotePool::new(4096, RemoteConfig::default()).unwrap();
        let memory: Arc<dyn PoolMemory> = remote.clone();
        let inspect = || {
            let mut bytes = [0; 8];
            remote.device_side().copy_out(100, &mut bytes);
            bytes
        };
        remote.hold();
        let mut write = memory.write(Rows::run(100, 8), vec![7; 8]);
        let mut read = memory.read(Rows::run(100, 8), Vec::new());
        std::thread::sleep(Duration::from_millis(20));
        assert!(write.poll_now().is_none() && read.poll_now().is_none());
        assert_eq!(remote.running(), 2);
        assert_eq!(inspect(), [0; 8]);
        remote.release();
        assert_eq!(write.wait(soon()).unwrap(), [7; 8]);
        assert_eq!(inspect(), [7; 8]);
        // It started before the write had ended, and did not wait for it.
        assert_eq!(read.wait(soon()).unwrap(), [0; 8]);
        assert_eq!(memory.read(Rows::run(100, 8), Vec::new()).wait(soon()).unwrap(), [7; 8]);
        memory.copy(Rows::run(96, 16), Rows::run(200, 16)).wait(soon()).unwrap();
        let sums = memory.checksum(vec![Rows::run(96, 16), Rows::run(200, 16)]).wait(soon()).unwrap();
        assert_eq!(sums, [checksum::sum(&[[0; 4].as_slice(), &[7; 8], &[0; 4]].concat()); 2]);
    }

    #[test]
    fn what_has_ended_has_its_result() {
        let remote = RemotePool::new(4096, RemoteConfig::default()).unwrap();
        for _ in 0..200 {
            remote.hold();
            let mut write = remote.write(Rows::run(100, 8), vec![7; 8]);
            assert!(remote.end_all(soon()) && remote.running() == 0);
            assert_eq!(write.poll_now(), Some(Ok(vec![7; 8])));
            let mut held = remote.write(Rows::run(100, 8), vec![7; 8]);
            assert_eq!((remote.running(), held.poll_now()), (1, None));
        }
        let slow = RemoteConfig { write_delay: Duration::from_secs(3600), ..RemoteConfig::default() };
        let remote = RemotePool::new(4096, slow).unwrap();
        let _late = remote.write(Rows::run(100, 8), vec![7; 8]);
        assert!(!remote.end_all(Instant::now()));
    }

    #[test]
    fn it_is_no_host_memory() {
        let memory: Arc<dyn PoolMemory> = RemotePool::new(4096, RemoteConfig::default()).unwrap();
        assert!(HostPool::of(&memory).is_none() && RemotePool::of(&memory).is_some());
        assert_eq!(memory.kind(), MemoryKind::Remote);
    }

    #[test]
    fn operations_that_cannot_run_end() {
        let config = RemoteConfig { operations_max: 1, ..RemoteConfig::default() };
        let remote = RemotePool::new(4096, config).unwrap();
        let outside = remote.read(Rows::run(4090, 8), Vec::new()).wait(soon());
        assert_eq!(outside, Err(MemoryError::Outside { start: 4090, bytes: 4096 }));
        remote.hold();
        let left = remote.read(Rows::run(0, 8), Vec::new());
        let more = remote.read(Rows::run(0, 8), Vec::new()).wait(soon());
        assert_eq!(more, Err(MemoryError::Busy { running: 1 }));
        // What an operation was to own comes back as it was.
        let (data, rows) = (vec![7; 8], vec![Rows::run(0, 8); 2]);
        let at = (data.as_ptr(), rows.as_ptr());
        let data = remote.try_write(Rows::run(0, 8), data).unwrap_err();
        let rows = remote.try_checksum(rows).unwrap_err().buffer;
        assert_eq!((data.running, data.buffer.as_ptr(), rows.as_ptr()), (1, at.0, at.1));
        let into = remote.try_read(Rows::run(0, 8), data.buffer).unwrap_err().buffer;
        assert_eq!((into.as_ptr(), into), (at.0, vec![7; 8]));
        drop(remote);
        assert!(matches!(left.wait(soon()), Err(MemoryError::Failed(_))));
    }
}
