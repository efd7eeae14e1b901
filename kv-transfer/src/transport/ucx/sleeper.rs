//! Sleeps until a worker has something to do, for the bare loop of benchmarks. Services sleep on their control channel.

use crate::ucx::Worker;
use mio::{Events, Poll};
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::time::Duration;

/// An epoll set to which workers report.
pub(crate) struct Sleeper {
    poll: Poll,
    ready: Events,
}

impl Sleeper {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self { poll: Poll::new()?, ready: Events::with_capacity(64) })
    }

    /// The set, for [`Worker::new`].
    pub(crate) fn events(&self) -> Result<Rc<dyn AsRawFd>, Error> {
        Ok(Rc::new(self.poll.registry().as_fd().try_clone_to_owned()?))
    }

    /// Waits for `timeout` or for one of the workers, which must be all that report here.
    pub(crate) fn sleep<'a>(&mut self, mut workers: impl Iterator<Item = &'a Worker>, timeout: Duration) {
        if !workers.all(Worker::arm) {
            return; // Something came meanwhile.
        }
        match self.poll.poll(&mut self.ready, Some(timeout)) {
            Err(error) if error.kind() != ErrorKind::Interrupted => tracing::error!(%error, "cannot wait for UCX"),
            _ => {}
        }
    }
}
