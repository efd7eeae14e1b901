//! The pool's memory as transports see it. Bytes of host memory are copied directly. Bytes of any other memory pass through buffers that
//! asynchronous reads fill ([`super::outgoing`]) and asynchronous writes empty ([`super::incoming`]), within fixed bounds.

use crate::pool_turns::{SharedPoolMemory, User};
use baton_memory::host::Part;
use baton_memory::{HostPool, MemoryError, NoRoom, Pending, Rows};
use std::io::{IoSlice, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::task::Waker;

/// Bytes of one read or write of memory that is not the host's. Writes of peers go out in frames or messages of this size.
pub(super) const STAGE_BYTES: usize = 128 << 10;
/// Bytes of one connection in buffers, in each direction: enough to keep a device and a socket busy at the same time.
pub(super) const STAGED_BYTES_MAX: usize = 1 << 20;
/// Reads or writes of one connection, in each direction. It bounds those of few bytes each, and keeps a device busy all the same.
pub(super) const STAGED_OPERATIONS_MAX: usize = 256;

/// The memory, and the waker of the thread that runs the transport.
#[derive(Clone)]
pub(crate) struct Pool {
    shared: Arc<SharedPoolMemory>,
    host: Option<Arc<HostPool>>,
    waker: Waker,
    /// A guard that a test leaves out: writes count as stored once they have begun.
    pub(super) counts_unstored: bool,
}

impl Pool {
    pub(super) fn new(shared: Arc<SharedPoolMemory>, waker: Waker) -> Self {
        let host = HostPool::of(&shared.memory);
        Self { shared, host, waker, counts_unstored: false }
    }

    /// The memory, if it is the host's.
    pub(super) fn host(&self) -> Option<&Arc<HostPool>> {
        self.host.as_ref()
    }

    pub(super) fn bytes(&self) -> usize {
        self.shared.memory.bytes()
    }

    pub(super) fn show_remote_writes(&self) -> Result<(), MemoryError> {
        self.shared.memory.show_remote_writes()
    }

    /// Whether `range` lies within the pool.
    pub(super) fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.bytes()
    }

    /// Wakes the transport's thread when an operation ends.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Begins to read rows into a buffer. Gives it back if there is no place in the device now.
    pub(super) fn start_read(&self, from: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, Vec<u8>> {
        self.start(into, |into| self.shared.memory.try_read(from, into))
    }

    /// Begins to write rows. Gives the buffer back if there is no place in the device now.
    pub(super) fn start_write(&self, to: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, Vec<u8>> {
        self.start(data, |data| self.shared.memory.try_write(to, data))
    }

    fn start<B, T>(&self, buffer: B, start: impl FnOnce(B) -> Result<Pending<T>, NoRoom<B>>) -> Result<Pending<T>, B> {
        self.shared.turns.begin(User::Transport, Some(&self.waker), buffer, start)
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

/// Keeps a buffer for the next bytes, if it is not one of many.
pub(super) fn keep(free: &mut Vec<Vec<u8>>, buffer: Vec<u8>) {
    if free.len() < STAGED_BYTES_MAX / STAGE_BYTES {
        free.push(buffer);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use baton_memory::{RemoteConfig, RemotePool};
    use std::time::{Duration, Instant};

    /// A pool of host memory, for transports without a thread.
    pub(in crate::transport) fn host(memory: &Arc<HostPool>) -> Pool {
        Pool::new(SharedPoolMemory::new(memory.clone()), Waker::noop().clone())
    }

    pub(in crate::transport) fn remote() -> (Arc<RemotePool>, Pool) {
        let memory = RemotePool::new(1 << 20, RemoteConfig::default()).unwrap();
        (memory.clone(), Pool::new(SharedPoolMemory::new(memory), Waker::noop().clone()))
    }

    pub(in crate::transport) fn soon(mut done: impl FnMut() -> bool) {
        let by = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < by, "never");
            std::thread::yield_now();
        }
    }
}
