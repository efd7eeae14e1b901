//! A KV pool in device memory. Its operations run on a copy stream, through lanes of page-locked memory; one thread serves them.

mod lane;
mod work;

use super::RemoteWrites;
use super::driver::{Address, Buffer, Command, Driver, Purpose, Use, end_of};
use crate::device::DeviceError;
use baton_memory::{MemoryError, NoRoom, Pending, PoolMemory, Rows};
use baton_types::MemoryKind;
use lane::{LANES, Lane};
use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use work::{Operation, Work};

/// Most operations that wait for a lane or have one.
const OPERATIONS_MAX: usize = 1024;

/// Pause between polls while lanes are busy: copies take from five microseconds up.
const PAUSE: Duration = Duration::from_micros(5);

/// Polls without a pause after the last change.
const SPINS: u32 = 200;

/// A pool in the memory of a GPU.
pub(super) struct CudaPool {
    driver: Arc<dyn Driver>,
    memory: Arc<Buffer>,
    bytes: usize,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Operation>,
    /// Operations that have a lane.
    running: usize,
    stop: bool,
}

impl CudaPool {
    /// What a pool takes beside its blocks.
    pub(super) const BYTES_BESIDE: usize = LANES * Lane::BYTES;

    /// Allocates zeroed memory and starts the thread of its operations.
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Arc<Self>, DeviceError> {
        let memory = Arc::new(Buffer::of(Use::Pool, driver, bytes, "the KV pool")?);
        let stream = driver.stream(Purpose::Copies)?;
        // Stale KV counts for nothing, but a peer may read it: never what another process has left.
        driver.enqueue(stream, &Command::Clear { at: memory.at(), bytes })?;
        // What a NIC stores is ordered behind no stream.
        end_of(&**driver, driver.record(stream)?)?;
        let lanes = (0..LANES).map(|_| Lane::new(driver, stream, memory.at())).collect::<Result<Vec<_>, _>>()?;
        let queue = Arc::<Queue>::default();
        let served = queue.clone();
        let thread = std::thread::Builder::new().name("gpu-memory".into()).spawn(move || served.serve(lanes));
        let thread = thread.map_err(|error| DeviceError::Failed(format!("cannot start a thread: {error}")))?;
        Ok(Arc::new(Self { driver: driver.clone(), memory, bytes, queue, thread: Some(thread) }))
    }

    /// The pool of this driver that `memory` is, if it is one.
    pub(super) fn of(memory: &Arc<dyn PoolMemory>, driver: &Arc<dyn Driver>) -> Option<Arc<Self>> {
        let pool: Arc<Self> = memory.clone().into_any().downcast().ok()?;
        Arc::ptr_eq(&pool.driver, driver).then_some(pool)
    }

    /// Where it begins.
    pub(super) fn at(&self) -> Address {
        self.memory.at()
    }

    /// Adds an operation, unless there is no room.
    fn push(&self, work: Work) -> Result<(), (usize, Work)> {
        let mut state = self.queue.state.lock();
        let running = state.waiting.len() + state.running;
        if running >= OPERATIONS_MAX {
            return Err((running, work));
        }
        state.waiting.push_back(Operation::new(work));
        drop(state);
        self.queue.changed.notify_one();
        Ok(())
    }
}

impl Queue {
    /// The thread: gives lanes to operations, and ends those whose copies have come.
    fn serve(&self, mut lanes: Vec<Lane>) {
        let mut quiet = 0;
        loop {
            let mut state = self.state.lock();
            while state.waiting.is_empty() && state.running == 0 && !state.stop {
                self.changed.wait(&mut state);
            }
            if state.stop {
                return;
            }
            for lane in lanes.iter_mut().filter(|lane| lane.is_free()) {
                let Some(operation) = state.waiting.pop_front() else { break };
                state.running += 1;
                lane.take(operation);
                quiet = 0;
            }
            drop(state);
            let ended = lanes.iter_mut().filter_map(Lane::advance).filter(|ended| *ended).count();
            if ended > 0 {
                self.state.lock().running -= ended;
                quiet = 0;
                continue;
            }
            quiet += 1;
            if quiet > SPINS {
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Checks that rows and a buffer belong together.
fn checked(rows: &Rows, bytes: usize, data: usize) -> Result<(), MemoryError> {
    rows.check(bytes)?;
    if rows.len() != data {
        return Err(MemoryError::Length { rows: rows.len(), data });
    }
    Ok(())
}

impl PoolMemory for CudaPool {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda(self.driver.gpu().ordinal)
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dma_address(&self) -> Option<u64> {
        (self.driver.gpu().remote_writes != RemoteWrites::Unsupported).then_some(self.at().0)
    }

    fn show_remote_writes(&self) -> Result<(), MemoryError> {
        self.driver.show_remote_writes().map_err(|error| MemoryError::Failed(error.to_string()))
    }

    fn try_read(&self, from: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        if let Err(error) = from.check(self.bytes) {
            return Ok(Pending::ended(Err(error)));
        }
        let (pending, end) = Pending::running();
        match self.push(Work::Read { from, into, end }) {
            Ok(()) => Ok(pending),
            Err((running, Work::Read { into: buffer, .. })) => Err(NoRoom { running, buffer }),
            Err(_) => unreachable!("the work comes back as it was"),
        }
    }

    fn try_write(&self, to: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        if let Err(error) = checked(&to, self.bytes, data.len()) {
            return Ok(Pending::ended(Err(error)));
        }
        let (pending, end) = Pending::running();
        match self.push(Work::Write { to, data, end }) {
            Ok(()) => Ok(pending),
            Err((running, Work::Write { data: buffer, .. })) => Err(NoRoom { running, buffer }),
            Err(_) => unreachable!("the work comes back as it was"),
        }
    }

    fn copy(&self, from: Rows, to: Rows) -> Pending<()> {
        if let Err(error) = from.check(self.bytes).and_then(|()| checked(&to, self.bytes, from.len())) {
            return Pending::ended(Err(error));
        }
        let (pending, end) = Pending::running();
        match self.push(Work::Copy { from, to, end }) {
            Ok(()) => pending,
            Err((running, _)) => Pending::ended(Err(MemoryError::Busy { running })),
        }
    }

    fn try_checksum(&self, rows: Vec<Rows>) -> Result<Pending<Vec<u64>>, NoRoom<Vec<Rows>>> {
        if let Some(error) = rows.iter().find_map(|rows| rows.check(self.bytes).err()) {
            return Ok(Pending::ended(Err(error)));
        }
        let (pending, end) = Pending::running();
        match self.push(Work::Checksum { rows, sums: Vec::new(), end }) {
            Ok(()) => Ok(pending),
            Err((running, Work::Checksum { rows: buffer, .. })) => Err(NoRoom { running, buffer }),
            Err(_) => unreachable!("the work comes back as it was"),
        }
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Drop for CudaPool {
    fn drop(&mut self) {
        self.queue.state.lock().stop = true;
        self.queue.changed.notify_all();
        // It ends within one poll; what it held ends with an error.
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl fmt::Debug for CudaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaPool").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Gpu;
    use crate::cuda::driver::recorder::Recorder;
    use crate::numerics::{Half, TensorCore};
    use std::time::Instant;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    /// Pieces of a lane end within rows, and a list of sums is longer than one launch.
    #[test]
    fn operations_of_several_pieces_are_those_of_one() {
        let driver: Arc<dyn Driver> = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
        let pool = CudaPool::new(&driver, 3 << 20).unwrap();
        let rows = Rows { start: 5, row_bytes: 1001, stride: 1500, rows: 2000 };
        let data: Vec<u8> = (0..rows.len()).map(|i| ((i * 31) >> 3) as u8 | 1).collect();
        PoolMemory::write(&*pool, rows, data.clone()).wait(soon()).unwrap();
        let mut want = vec![0; pool.bytes()];
        let mut at = 0;
        for place in rows.places(0, rows.len()) {
            want[place.clone()].copy_from_slice(&data[at..at + place.len()]);
            at += place.len();
        }
        assert!(PoolMemory::read(&*pool, Rows::run(0, pool.bytes()), Vec::new()).wait(soon()).unwrap() == want);
        assert!(PoolMemory::read(&*pool, rows, Vec::new()).wait(soon()).unwrap() == data);
        let lists: Vec<Rows> = (0..5000).map(|i| Rows::run(i * 500 + 5, 40)).collect();
        let sums: Vec<u64> = lists.iter().map(|rows| baton_memory::checksum::sum(&want[rows.place(0)])).collect();
        assert!(PoolMemory::checksum(&*pool, lists).wait(soon()).unwrap() == sums);
    }

    #[test]
    fn nics_get_no_address_where_the_device_may_not_see_what_they_store() {
        for (remote_writes, reachable) in
            [(RemoteWrites::Unsupported, false), (RemoteWrites::Flushed, true), (RemoteWrites::Ordered, true)]
        {
            let usual = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
            let gpu = Gpu { remote_writes, ..usual.gpu().clone() };
            let driver: Arc<dyn Driver> = Recorder::open(gpu, Half::Bf16, |_| Ok(Vec::new())).unwrap();
            let address = CudaPool::new(&driver, 4096).unwrap().dma_address();
            assert_eq!(address.is_some(), reachable, "{remote_writes:?}");
        }
    }

    /// Its upload would otherwise read the next operation's bytes, and store them in blocks that others may have by then.
    #[test]
    fn an_operation_that_fails_ends_behind_what_was_enqueued_for_it() {
        let recorder = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
        let driver: Arc<dyn Driver> = recorder.clone();
        let pool = CudaPool::new(&driver, 4096).unwrap();
        assert_eq!(recorder.waiting(), 0, "the pool is cleared");
        recorder.refuse_launches(true);
        let rows = Rows { start: 0, row_bytes: 8, stride: 16, rows: 4 };
        let written = PoolMemory::write(&*pool, rows, vec![7; 32]).wait(soon());
        assert!(matches!(written, Err(MemoryError::Failed(_))), "{written:?}");
        assert_eq!(recorder.waiting(), 0, "its bytes and its rows were uploaded before that");
        // The lane goes on.
        let read = PoolMemory::read(&*pool, Rows::run(0, 64), Vec::new()).wait(soon());
        assert_eq!(read.unwrap(), [0; 64]);
    }

    /// As above, where nothing tells its end at first.
    #[test]
    fn an_operation_whose_event_can_not_be_recorded_ends_behind_what_was_enqueued_for_it() {
        let recorder = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
        let driver: Arc<dyn Driver> = recorder.clone();
        let pool = CudaPool::new(&driver, 4096).unwrap();
        recorder.refuse_events(5);
        PoolMemory::write(&*pool, Rows::run(0, 64), vec![7; 64]).wait(soon()).unwrap();
        assert_eq!(recorder.waiting(), 0, "it is stored");
        PoolMemory::write(&*pool, Rows::run(1024, 64), vec![9; 64]).wait(soon()).unwrap();
        let read = PoolMemory::read(&*pool, Rows::run(0, 64), Vec::new()).wait(soon());
        assert_eq!(read.unwrap(), [7; 64]);
    }
}
