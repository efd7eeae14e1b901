//! Bytes that one connection sends out of memory that is not the host's: read into buffers first, within fixed bounds.

use super::pool::{Pool, STAGED_BYTES_MAX, STAGED_OPERATIONS_MAX, keep};
use crate::pool_turns::{OPERATION_MAX, PLACE_MAX};
use baton_memory::{Pending, Rows};
use std::time::Instant;

/// Bytes of the pool that are to be sent: read into a buffer when there is room for it.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) from: usize,
    pub(super) len: usize,
    stage: Stage,
    /// When its read must have a place in the device, from the first attempt on.
    place_by: Option<Instant>,
}

#[derive(Debug)]
enum Stage {
    Waiting,
    /// Until this instant.
    Reading(Pending<Vec<u8>>, Instant),
    Ready(Vec<u8>),
    /// The device failed. The connection is closed for it.
    Failed,
}

impl Staged {
    pub(super) fn new(from: usize, len: usize) -> Self {
        Self { from, len, stage: Stage::Waiting, place_by: None }
    }

    /// The bytes, once they are here.
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match &self.stage {
            Stage::Ready(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The read that runs, if one does.
    pub(super) fn into_read(self) -> Option<Pending<Vec<u8>>> {
        match self.stage {
            Stage::Reading(read, _) => Some(read),
            _ => None,
        }
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        match self.stage {
            Stage::Ready(bytes) => bytes,
            _ => Vec::new(),
        }
    }
}

/// Buffers of the bytes that one connection sends.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    bytes: usize,
    entries: usize,
    free: Vec<Vec<u8>>,
}

impl Outgoing {
    /// Advances one entry of a queue, in the order of the queue. Returns whether its bytes are here; later entries may be advanced either
    /// way, until one finds no room.
    pub(super) fn advance(&mut self, pool: &Pool, staged: &mut Staged, now: Instant) -> Result<Progress, String> {
        if matches!(staged.stage, Stage::Waiting) {
            let fits = self.bytes + staged.len <= STAGED_BYTES_MAX && self.entries < STAGED_OPERATIONS_MAX;
            if self.entries > 0 && !fits {
                return Ok(Progress::NoRoom);
            }
            let place_by = *staged.place_by.get_or_insert(now + PLACE_MAX);
            let buffer = self.free.pop().unwrap_or_default();
            match pool.start_read(Rows::run(staged.from, staged.len), buffer) {
                Ok(read) => staged.stage = Stage::Reading(read, now + OPERATION_MAX),
                // Others fill the device.
                Err(buffer) => {
                    keep(&mut self.free, buffer);
                    return match now > place_by {
                        true => Err("the pool's device is busy: it has no room for a read".into()),
                        false => Ok(Progress::NoRoom),
                    };
                }
            }
            (self.bytes, self.entries) = (self.bytes + staged.len, self.entries + 1);
        }
        if let Stage::Reading(read, until) = &mut staged.stage {
            match read.poll_or_wake(pool.waker()) {
                Some(Ok(bytes)) => staged.stage = Stage::Ready(bytes),
                Some(Err(error)) => {
                    staged.stage = Stage::Failed;
                    return Err(format!("cannot read the pool: {error}"));
                }
                None if now > *until => {
                    return Err("the pool's device does not answer a read".into());
                }
                None => return Ok(Progress::Runs),
            }
        }
        Ok(Progress::Ready)
    }

    /// The bytes of an entry were sent; its buffer may be used again.
    pub(super) fn sent(&mut self, staged: Staged) {
        self.freed(staged.len);
        keep(&mut self.free, staged.into_bytes());
    }

    /// The buffer of an entry of this length, which others may have sent, is freed.
    pub(super) fn freed(&mut self, len: usize) {
        (self.bytes, self.entries) = (self.bytes - len, self.entries - 1);
    }
}

/// State of an entry after [`Outgoing::advance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Ready,
    Runs,
    NoRoom,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool_turns::SharedPoolMemory;
    use crate::transport::pool::STAGE_BYTES;
    use crate::transport::pool::tests::{remote, soon};
    use baton_memory::{RemoteConfig, RemotePool};
    use std::task::Waker;
    use std::time::Duration;

    /// So many reads are begun of entries of this length, until there is no room.
    fn reads_at_once(entries: usize, len: usize) -> usize {
        let (memory, pool) = remote();
        let mut outgoing = Outgoing::default();
        memory.hold();
        let mut puts: Vec<_> = (0..entries).map(|_| Staged::new(0, len)).collect();
        let now = Instant::now();
        let states = puts.iter_mut().map(|put| outgoing.advance(&pool, put, now).unwrap());
        let begun = states.take_while(|state| *state == Progress::Runs).count();
        assert!(begun < entries);
        memory.release();
        soon(|| outgoing.advance(&pool, &mut puts[0], now).unwrap() == Progress::Ready);
        assert_eq!(outgoing.advance(&pool, &mut puts[begun], now).unwrap(), Progress::NoRoom);
        outgoing.sent(puts.remove(0));
        assert_ne!(outgoing.advance(&pool, &mut puts[begun - 1], now).unwrap(), Progress::NoRoom);
        begun
    }

    #[test]
    fn reads_that_run_are_bounded_in_bytes_and_in_number() {
        assert_eq!(reads_at_once(9, STAGE_BYTES), STAGED_BYTES_MAX / STAGE_BYTES);
        assert_eq!(reads_at_once(1000, 1), STAGED_OPERATIONS_MAX);
    }

    #[test]
    fn a_read_waits_for_room_in_the_device() {
        let memory = RemotePool::new(1 << 20, RemoteConfig { operations_max: 1, ..RemoteConfig::default() }).unwrap();
        let pool = Pool::new(SharedPoolMemory::new(memory.clone()), Waker::noop().clone());
        let (mut outgoing, mut put, now) = (Outgoing::default(), Staged::new(0, 8), Instant::now());
        memory.hold();
        let mut other = pool.start_read(Rows::run(0, 8), Vec::new()).unwrap();
        let buffer = Vec::with_capacity(STAGE_BYTES);
        let at = buffer.as_ptr();
        outgoing.free.push(buffer);
        for _ in 0..3 {
            assert_eq!(outgoing.advance(&pool, &mut put, now), Ok(Progress::NoRoom));
            assert_eq!(outgoing.free.iter().map(|free| free.as_ptr()).collect::<Vec<_>>(), [at], "its buffer is kept");
        }
        assert!(outgoing.advance(&pool, &mut put, now + 2 * PLACE_MAX).is_err(), "but not forever");
        memory.release();
        soon(|| other.poll_now().is_some());
        soon(|| outgoing.advance(&pool, &mut put, now) == Ok(Progress::Ready));
        assert_eq!(put.bytes().unwrap().as_ptr(), at);
    }

    #[test]
    fn the_wait_for_a_place_takes_nothing_from_the_time_to_read() {
        let (memory, pool) = remote();
        let (mut outgoing, mut put, now) = (Outgoing::default(), Staged::new(0, 8), Instant::now());
        memory.hold();
        put.place_by = Some(now + Duration::from_secs(1));
        assert_eq!(outgoing.advance(&pool, &mut put, now), Ok(Progress::Runs));
        assert_eq!(outgoing.advance(&pool, &mut put, now + OPERATION_MAX), Ok(Progress::Runs));
        assert!(outgoing.advance(&pool, &mut put, now + OPERATION_MAX + Duration::from_secs(1)).is_err());
        memory.release();
    }

    #[test]
    fn a_device_that_fails_is_told() {
        let (_memory, pool) = remote();
        let (mut outgoing, mut put) = (Outgoing::default(), Staged::new(1 << 20, 8));
        soon(|| outgoing.advance(&pool, &mut put, Instant::now()).is_err());
    }
}
