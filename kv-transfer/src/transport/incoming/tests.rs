//! Writes of one peer, over a device that a test holds.

use super::*;
use crate::pool_turns::SharedPoolMemory;
use crate::transport::pool::STAGE_BYTES;
use crate::transport::pool::tests::{remote, soon};
use baton_memory::{NoRoom, PoolMemory, RemoteConfig, RemotePool};
use baton_types::MemoryKind;
use std::any::Any;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// A device that works on one operation at a time.
fn one_place() -> Arc<RemotePool> {
    RemotePool::new(1 << 20, RemoteConfig { operations_max: 1, ..RemoteConfig::default() }).unwrap()
}

/// What runs ends, and what starts after it is held.
fn end_all(memory: &RemotePool) {
    assert!(memory.end_all(Instant::now() + Duration::from_secs(20)), "never");
}

#[test]
fn a_flush_waits_for_the_writes_before_it() {
    let (memory, pool) = remote();
    let mut incoming = Incoming::new(pool);
    memory.hold();
    incoming.store(64, vec![1; 64]);
    incoming.flush(7).unwrap();
    incoming.store(128, vec![2; 64]);
    assert_eq!((incoming.advance(Instant::now()), incoming.stored()), (Ok(vec![]), 0));
    memory.release();
    let mut flushed = Vec::new();
    soon(|| {
        flushed.extend(incoming.advance(Instant::now()).unwrap());
        incoming.stored() == 2
    });
    assert_eq!(flushed, [Ended::Flush(7)]);
}

#[test]
fn flushes_that_wait_are_bounded_and_those_that_are_answered_are_not() {
    let (memory, pool) = remote();
    let mut incoming = Incoming::new(pool);
    for id in 0..3 * FLUSHES_MAX as u64 {
        incoming.flush(id).unwrap();
        assert_eq!(incoming.advance(Instant::now()), Ok(vec![Ended::Flush(id)]));
    }
    memory.hold();
    incoming.store(64, vec![1; 64]);
    (0..FLUSHES_MAX as u64).for_each(|id| incoming.flush(id).unwrap());
    assert_eq!(incoming.flush(7), Err(StoreError::Flushes));
    memory.release();
}

#[test]
fn a_closed_window_waits_for_the_writes_before_it() {
    let (memory, pool) = remote();
    let mut incoming = Incoming::new(pool);
    let window = Ended::Window(TicketId(5));
    incoming.close_window(TicketId(5));
    assert_eq!(incoming.advance(Instant::now()), Ok(vec![window]));
    memory.hold();
    incoming.store(64, vec![1; 64]);
    incoming.close_window(TicketId(5));
    assert_eq!(incoming.advance(Instant::now()), Ok(vec![]));
    memory.release();
    soon(|| incoming.advance(Instant::now()).unwrap() == [window]);
}

/// The hazard: a flush that is answered while its writes are on their way.
#[test]
fn without_the_guard_a_flush_overtakes_its_writes() {
    let (memory, mut pool) = remote();
    pool.counts_unstored = true;
    let mut incoming = Incoming::new(pool);
    memory.hold();
    incoming.store(64, vec![1; 64]);
    incoming.flush(7).unwrap();
    assert_eq!((incoming.advance(Instant::now()), incoming.stored()), (Ok(vec![Ended::Flush(7)]), 1));
    let mut stored = [0; 1];
    memory.device_side().copy_out(64, &mut stored);
    assert_eq!(stored, [0]);
}

#[test]
fn a_write_that_stores_nothing_counts_after_those_before_it() {
    let (memory, pool) = remote();
    let mut incoming = Incoming::new(pool);
    incoming.is_over();
    assert_eq!(incoming.stored(), 1);
    memory.hold();
    incoming.store(64, vec![1; 64]);
    (0..3).for_each(|_| incoming.is_over());
    assert_eq!((incoming.advance(Instant::now()), incoming.stored()), (Ok(vec![]), 1));
    memory.release();
    soon(|| incoming.advance(Instant::now()).is_ok() && incoming.stored() == 5);
}

#[test]
fn after_a_write_that_failed_nothing_counts_and_no_flush_is_answered() {
    let (memory, pool) = remote();
    let mut incoming = Incoming::new(pool);
    memory.hold();
    incoming.store(64, vec![1; 64]);
    incoming.store((1 << 20) - 8, vec![0; 64]);
    incoming.flush(7).unwrap();
    incoming.store(128, vec![2; 64]);
    incoming.is_over();
    memory.release();
    soon(|| incoming.advance(Instant::now()).is_err());
    soon(|| incoming.has_ended());
    assert!(matches!(incoming.advance(Instant::now()), Err(StoreError::Failed(_))), "it fails from then on");
    assert_eq!(incoming.stored(), 1);
}

#[test]
fn writes_that_are_being_stored_are_bounded() {
    let (memory, pool) = remote();
    let (mut large, mut small) = (Incoming::new(pool.clone()), Incoming::new(pool));
    memory.hold();
    (0..8).for_each(|_| large.store(0, vec![0; STAGE_BYTES]));
    (0..STAGED_OPERATIONS_MAX).for_each(|_| small.store(0, vec![0; 1]));
    assert_eq!((large.has_room(), small.has_room()), (false, false));
    // What stores nothing takes no room, however much comes of it.
    (0..1_000_000).for_each(|_| small.is_over());
    assert_eq!(small.queue.len(), STAGED_OPERATIONS_MAX + 1);
    memory.release();
    let now = Instant::now();
    soon(|| large.advance(now).unwrap().is_empty() && large.has_room());
    soon(|| small.advance(now).unwrap().is_empty() && small.has_room());
    // A transport that does not stop.
    memory.hold();
    (0..=WRITES_MAX).for_each(|_| small.store(0, vec![0; 1]));
    assert_eq!(small.advance(now), Err(StoreError::Writes));
    assert!(small.queue.len() <= WRITES_MAX + 1);
    memory.release();
    soon(|| small.has_ended());
}

#[test]
fn a_write_waits_for_room_in_the_device() {
    let memory = one_place();
    let pool = Pool::new(SharedPoolMemory::new(memory.clone()), Waker::noop().clone());
    let (mut other, mut incoming, now) = (Incoming::new(pool.clone()), Incoming::new(pool), Instant::now());
    memory.hold();
    other.store(0, vec![1; 64]);
    incoming.store(64, vec![2; 64]);
    incoming.store(128, vec![3; 64]);
    incoming.flush(7).unwrap();
    assert_eq!((other.has_room(), incoming.has_room()), (true, false));
    assert_eq!((incoming.advance(now), incoming.stored()), (Ok(vec![]), 0));
    memory.release();
    let mut ended = Vec::new();
    soon(|| {
        ended.extend(incoming.advance(now).unwrap());
        incoming.stored() == 2
    });
    assert_eq!((ended, incoming.has_room()), (vec![Ended::Flush(7)], true));
    let mut stored = [0; 192];
    memory.device_side().copy_out(0, &mut stored);
    assert_eq!(stored.as_slice(), [[1; 64], [2; 64], [3; 64]].concat());
    // But not forever.
    memory.hold();
    other.store(0, vec![1; 64]);
    incoming.store(64, vec![2; 64]);
    assert_eq!(incoming.advance(now), Ok(vec![]));
    assert_eq!(incoming.advance(Instant::now() + 2 * PLACE_MAX), Err(StoreError::Busy));
    assert!(incoming.has_ended(), "it has not begun");
}

/// Has one place, which becomes free right after it has refused a write.
#[derive(Debug)]
struct FreeTooLate(Arc<RemotePool>);

impl PoolMemory for FreeTooLate {
    fn kind(&self) -> MemoryKind {
        self.0.kind()
    }
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
    fn try_read(&self, from: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        self.0.try_read(from, into)
    }
    fn try_write(&self, to: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        let result = self.0.try_write(to, data);
        if result.is_err() {
            end_all(&self.0);
        }
        result
    }
    fn copy(&self, from: Rows, to: Rows) -> Pending<()> {
        self.0.copy(from, to)
    }
    fn try_checksum(&self, rows: Vec<Rows>) -> Result<Pending<Vec<u64>>, NoRoom<Vec<Rows>>> {
        self.0.try_checksum(rows)
    }
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

#[test]
fn room_that_a_write_leaves_is_used_at_once() {
    let memory = one_place();
    memory.hold();
    let pool = Pool::new(SharedPoolMemory::new(Arc::new(FreeTooLate(memory.clone()))), Waker::noop().clone());
    let mut incoming = Incoming::new(pool);
    (0..2).for_each(|at| incoming.store(64 * at, vec![1; 64]));
    assert_eq!((incoming.waiting, memory.running()), (1, 0));
    assert_eq!(incoming.advance(Instant::now()), Ok(vec![]));
    assert_eq!((incoming.stored(), incoming.waiting, memory.running()), (1, 0, 1));
    memory.release();
    soon(|| incoming.advance(Instant::now()).is_ok() && incoming.stored() == 2);
}

#[test]
fn bytes_that_wait_for_room_are_copied_no_more() {
    let memory = one_place();
    let pool = Pool::new(SharedPoolMemory::new(memory.clone()), Waker::noop().clone());
    let (mut other, mut incoming) = (Incoming::new(pool.clone()), Incoming::new(pool));
    memory.hold();
    other.store(0, vec![1; 64]);
    let bytes = vec![2; STAGE_BYTES];
    let at = bytes.as_ptr();
    incoming.store(64, bytes);
    for _ in 0..3 {
        assert_eq!(incoming.advance(Instant::now()), Ok(vec![]));
        let Some(Entry::Write { write: Write::Waits { bytes, .. }, .. }) = incoming.queue.front() else {
            panic!("it waits")
        };
        assert_eq!((bytes.as_ptr(), bytes.len()), (at, STAGE_BYTES));
    }
    memory.release();
    soon(|| incoming.advance(Instant::now()).is_ok() && incoming.stored() == 1);
    let next = incoming.buffer();
    assert_eq!(next.as_ptr(), at, "and used for the next ones");
}

/// Each write has its own time for both: a device that is slow, but goes on, breaks no connection.
#[test]
fn the_wait_for_a_place_takes_nothing_from_the_time_to_run() {
    let memory = one_place();
    let mut incoming = Incoming::new(Pool::new(SharedPoolMemory::new(memory.clone()), Waker::noop().clone()));
    let step = |incoming: &mut Incoming, now, running| {
        let ended = incoming.advance(now);
        assert_eq!((ended, memory.running()), (Ok(vec![]), running));
    };
    memory.hold();
    (0..3).for_each(|at| incoming.store(64 * at, vec![1; 64]));
    let mut now = Instant::now();
    for left in [2_u64, 1, 0] {
        // It waits for a place, or behind one that does, and then it runs, each as long as it may.
        now += PLACE_MAX - Duration::from_secs(1);
        step(&mut incoming, now, 1);
        end_all(&memory);
        assert_eq!((incoming.advance(now), incoming.stored()), (Ok(vec![]), 3 - left));
        assert_eq!((memory.running() as u64, incoming.waiting as u64), (left.min(1), left.saturating_sub(1)));
    }
    incoming.store(0, vec![1; 64]);
    let late = Instant::now() + OPERATION_MAX + Duration::from_secs(1);
    assert_eq!(incoming.advance(late), Err(StoreError::Late));
    memory.release();
    soon(|| incoming.has_ended());
}

#[test]
fn a_device_that_fails_or_hangs_is_told() {
    let (memory, pool) = remote();
    let mut incoming = Incoming::new(pool.clone());
    incoming.store((1 << 20) - 8, vec![0; 64]);
    soon(|| incoming.advance(Instant::now()).is_err());
    assert!(incoming.has_ended());
    memory.hold();
    let mut incoming = Incoming::new(pool);
    incoming.store(0, vec![0; 64]);
    assert_eq!(incoming.advance(Instant::now() + 2 * OPERATION_MAX), Err(StoreError::Late));
    assert!(!incoming.has_ended());
    memory.release();
    soon(|| incoming.has_ended());
}
