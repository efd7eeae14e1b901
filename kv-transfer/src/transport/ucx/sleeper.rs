//! Sleeping until UCX has something to do, or somebody calls.

use crate::ucx::Worker;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use std::io::{Error, ErrorKind};
use std::os::fd::RawFd;
use std::time::Duration;

const WORKER: Token = Token(0);
const WAKER: Token = Token(1);

/// A poll over a worker's wake-up descriptor.
pub(crate) struct Sleeper {
    poll: Poll,
    ready: Events,
    wakeup: RawFd,
}

impl Sleeper {
    /// Must not outlive the worker, whose descriptor it watches.
    pub(crate) fn new(worker: &Worker) -> Result<Self, Error> {
        let wakeup = worker.wakeup_fd().map_err(|e| Error::other(e.to_string()))?;
        let poll = Poll::new()?;
        poll.registry().register(&mut SourceFd(&wakeup), WORKER, Interest::READABLE)?;
        Ok(Self { poll, ready: Events::with_capacity(4), wakeup })
    }

    /// Something that ends a sleep from another thread. One for each sleeper.
    pub(crate) fn waker(&self) -> Result<Waker, Error> {
        Waker::new(self.poll.registry(), WAKER)
    }

    /// Waits for the worker, the waker, or `timeout`.
    pub(crate) fn sleep(&mut self, worker: &Worker, timeout: Duration) {
        if !worker.arm() {
            return; // Something came meanwhile.
        }
        // Registered anew before each sleep: mio reports edges, and UCX's descriptor may be ready already.
        let registered = self.poll.registry().reregister(&mut SourceFd(&self.wakeup), WORKER, Interest::READABLE);
        match registered.and_then(|()| self.poll.poll(&mut self.ready, Some(timeout))) {
            Err(error) if error.kind() != ErrorKind::Interrupted => tracing::error!(%error, "cannot wait for UCX"),
            _ => {}
        }
    }
}
