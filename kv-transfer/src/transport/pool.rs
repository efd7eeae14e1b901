//! The pool's memory as transports see it. Bytes of host memory are copied directly. Bytes of any other memory pass through buffers that
//! asynchronous reads fill and asynchronous writes empty, within fixed bounds.

use baton_memory::host::Part;
use baton_memory::{HostPool, Pending, PoolMemory, Rows};
use std::collections::VecDeque;
use std::io::{IoSlice, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Bytes of one read or write of memory that is not the host's. Writes of peers go out in frames or messages of this size.
pub(super) const STAGE_BYTES: usize = 128 << 10;
/// Bytes of one connection in buffers, in each direction: enough to keep a device and a socket busy at the same time.
pub(super) const STAGED_BYTES_MAX: usize = 1 << 20;
/// Longest life of one read or write: a device that takes longer has failed.
const OPERATION_MAX: Duration = Duration::from_secs(30);
/// Most flushes of one peer that wait for writes. A service has at most one in progress on each connection.
const FLUSHES_MAX: usize = 64;

/// The memory, and the waker of the thread that runs the transport.
#[derive(Clone)]
pub(crate) struct Pool {
    memory: Arc<dyn PoolMemory>,
    host: Option<Arc<HostPool>>,
    waker: Waker,
    /// A guard that a test leaves out: writes count as stored once they have begun.
    pub(super) counts_unstored: bool,
}

impl Pool {
    pub(super) fn new(memory: Arc<dyn PoolMemory>, waker: Waker) -> Self {
        let host = HostPool::of(&memory);
        Self { memory, host, waker, counts_unstored: false }
    }

    /// The memory, if it is the host's.
    pub(super) fn host(&self) -> Option<&Arc<HostPool>> {
        self.host.as_ref()
    }

    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Whether `range` lies within the pool.
    pub(super) fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.bytes()
    }

    /// Sends parts, in order, to a stream socket that does not block. Only host memory has parts of its own.
    pub(super) fn send_parts<S: AsFd>(&self, socket: &S, parts: &[Part<'_>]) -> std::io::Result<usize>
    where
        for<'a> &'a S: Write,
    {
        if let Some(host) = &self.host {
            return host.send_parts(socket.as_fd(), parts);
        }
        let mut socket = socket;
        socket.write_vectored(&parts.iter().map(own).collect::<Vec<_>>())
    }
}

fn own<'a>(part: &Part<'a>) -> IoSlice<'a> {
    match part {
        Part::Own(bytes) => IoSlice::new(bytes),
        Part::Pool { .. } => unreachable!("only host memory is sent from where it is"),
    }
}

/// Bytes of the pool that are to be sent: read into a buffer when there is room for it.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) from: usize,
    pub(super) len: usize,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Waiting,
    Reading(Pending<Vec<u8>>, Instant),
    Ready(Vec<u8>),
}

impl Staged {
    pub(super) fn new(from: usize, len: usize) -> Self {
        Self { from, len, stage: Stage::Waiting }
    }

    /// The bytes, once they are here.
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match &self.stage {
            Stage::Ready(bytes) => Some(bytes),
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
    free: Vec<Vec<u8>>,
}

impl Outgoing {
    /// Advances one entry of a queue, in the order of the queue. Returns whether its bytes are here; later entries may be advanced either
    /// way, until one finds no room.
    pub(super) fn advance(&mut self, pool: &Pool, staged: &mut Staged, now: Instant) -> Result<Progress, String> {
        if matches!(staged.stage, Stage::Waiting) {
            if self.bytes > 0 && self.bytes + staged.len > STAGED_BYTES_MAX {
                return Ok(Progress::NoRoom);
            }
            self.bytes += staged.len;
            let buffer = self.free.pop().unwrap_or_default();
            let read = pool.memory.read(Rows::run(staged.from, staged.len), buffer);
            staged.stage = Stage::Reading(read, now + OPERATION_MAX);
        }
        if let Stage::Reading(read, until) = &mut staged.stage {
            match read.poll_or_wake(&pool.waker) {
                Some(Ok(bytes)) => staged.stage = Stage::Ready(bytes),
                Some(Err(error)) => return Err(format!("cannot read the pool: {error}")),
                None if now > *until => return Err("the pool's device does not answer a read".into()),
                None => return Ok(Progress::Runs),
            }
        }
        Ok(Progress::Ready)
    }

    /// The bytes of an entry were sent; its buffer may be used again.
    pub(super) fn sent(&mut self, staged: Staged) {
        self.bytes -= staged.len;
        keep(&mut self.free, staged.into_bytes());
    }

    /// The bytes of an entry were passed on together with their buffer.
    pub(super) fn passed_on(&mut self, len: usize) {
        self.bytes -= len;
    }
}

/// Keeps a buffer for the next bytes, if it is not one of many.
fn keep(free: &mut Vec<Vec<u8>>, buffer: Vec<u8>) {
    if free.len() < STAGED_BYTES_MAX / STAGE_BYTES {
        free.push(buffer);
    }
}

/// State of an entry after [`Outgoing::advance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Ready,
    Runs,
    NoRoom,
}

/// Writes of one peer on their way into the pool, in the order of their arrival, and flushes that wait for those before them. Writes into
/// host memory end at once and are never in here.
pub(super) struct Incoming {
    pool: Pool,
    queue: VecDeque<Entry>,
    bytes: usize,
    flushes: usize,
    stored: u64,
    free: Vec<Vec<u8>>,
}

enum Entry {
    Write { write: Pending<Vec<u8>>, len: usize, until: Instant },
    Flush(u64),
}

impl Incoming {
    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, queue: VecDeque::new(), bytes: 0, flushes: 0, stored: 0, free: Vec::new() }
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// An empty buffer for the bytes of one write.
    pub(super) fn buffer(&mut self) -> Vec<u8> {
        self.free.pop().unwrap_or_default()
    }

    /// Begins to store bytes.
    pub(super) fn store(&mut self, offset: usize, bytes: Vec<u8>) {
        let len = bytes.len();
        let write = self.pool.memory.write(Rows::run(offset, len), bytes);
        self.bytes += len;
        self.queue.push_back(Entry::Write { write, len, until: Instant::now() + OPERATION_MAX });
    }

    /// A flush that is to be answered once everything before it is stored.
    pub(super) fn flush(&mut self, id: u64) -> Result<(), String> {
        self.flushes += 1;
        if self.flushes > FLUSHES_MAX {
            return Err("the peer asks for flushes and does not wait for the answers".into());
        }
        match self.pool.counts_unstored {
            true => self.queue.push_front(Entry::Flush(id)),
            false => self.queue.push_back(Entry::Flush(id)),
        }
        Ok(())
    }

    /// Whether there is room for more bytes of the peer.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < STAGED_BYTES_MAX
    }

    /// Number of writes that were stored.
    pub(super) fn stored(&self) -> u64 {
        match self.pool.counts_unstored {
            true => self.stored + self.queue.iter().filter(|entry| matches!(entry, Entry::Write { .. })).count() as u64,
            false => self.stored,
        }
    }

    /// Takes what has ended; returns the flushes to answer. A failure fails the connection: bytes of the peer are lost.
    pub(super) fn advance(&mut self, now: Instant) -> Result<Vec<u64>, String> {
        let mut flushed = Vec::new();
        while let Some(entry) = self.queue.front_mut() {
            let ended = match entry {
                Entry::Flush(id) => {
                    flushed.push(*id);
                    self.flushes -= 1;
                    self.queue.pop_front();
                    continue;
                }
                Entry::Write { write, until, .. } => match write.poll_or_wake(&self.pool.waker) {
                    Some(ended) => ended,
                    None if now > *until => return Err("the pool's device does not answer a write".into()),
                    None => break,
                },
            };
            if let Some(Entry::Write { len, .. }) = self.queue.pop_front() {
                self.bytes -= len;
                self.stored += 1;
            }
            let mut buffer = ended.map_err(|error| format!("cannot write the pool: {error}"))?;
            buffer.clear();
            keep(&mut self.free, buffer);
        }
        Ok(flushed)
    }

    /// Waits for what is on its way, after the connection has ended. Whether nothing can be stored any more.
    pub(super) fn has_ended(&mut self) -> bool {
        self.queue.retain_mut(|entry| match entry {
            Entry::Flush(_) => false,
            Entry::Write { write, .. } => write.poll_or_wake(&self.pool.waker).is_none(),
        });
        self.queue.is_empty()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use baton_memory::{RemoteConfig, RemotePool};

    /// A pool of host memory, for transports without a thread.
    pub(in crate::transport) fn host(memory: &Arc<HostPool>) -> Pool {
        Pool::new(memory.clone(), Waker::noop().clone())
    }

    fn remote() -> (Arc<RemotePool>, Pool) {
        let memory = RemotePool::new(1 << 20, RemoteConfig::default()).unwrap();
        (memory.clone(), Pool::new(memory, Waker::noop().clone()))
    }

    fn soon(mut done: impl FnMut() -> bool) {
        let by = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < by, "never");
            std::thread::yield_now();
        }
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
        assert_eq!(flushed, [7]);
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
        assert_eq!((incoming.advance(Instant::now()), incoming.stored()), (Ok(vec![7]), 1));
        let mut stored = [0; 1];
        memory.device_side().copy_out(64, &mut stored);
        assert_eq!(stored, [0]);
    }

    #[test]
    fn bytes_in_buffers_are_bounded() {
        let (memory, pool) = remote();
        let (mut incoming, mut outgoing) = (Incoming::new(pool.clone()), Outgoing::default());
        memory.hold();
        let mut puts: Vec<_> = (0..9).map(|_| Staged::new(0, STAGE_BYTES)).collect();
        let now = Instant::now();
        let states: Vec<_> = puts.iter_mut().map(|put| outgoing.advance(&pool, put, now).unwrap()).collect();
        assert_eq!(states, [&[Progress::Runs; 8][..], &[Progress::NoRoom]].concat());
        (0..8).for_each(|_| incoming.store(0, vec![0; STAGE_BYTES]));
        assert!(!incoming.has_room());
        memory.release();
        soon(|| outgoing.advance(&pool, &mut puts[0], now).unwrap() == Progress::Ready);
        outgoing.sent(puts.remove(0));
        assert_ne!(outgoing.advance(&pool, &mut puts[7], now).unwrap(), Progress::NoRoom);
        soon(|| incoming.advance(now).unwrap().is_empty() && incoming.has_room());
    }

    #[test]
    fn a_device_that_fails_or_hangs_is_told() {
        let (memory, pool) = remote();
        let mut incoming = Incoming::new(pool.clone());
        incoming.store((1 << 20) - 8, vec![0; 64]);
        soon(|| incoming.advance(Instant::now()).is_err());
        assert!(incoming.has_ended());
        memory.hold();
        incoming.store(0, vec![0; 64]);
        assert!(incoming.advance(Instant::now() + 2 * OPERATION_MAX).is_err());
        assert!(!incoming.has_ended());
        memory.release();
        soon(|| incoming.has_ended());
        let (mut outgoing, mut put) = (Outgoing::default(), Staged::new(1 << 20, 8));
        soon(|| outgoing.advance(&pool, &mut put, Instant::now()).is_err());
    }
}
