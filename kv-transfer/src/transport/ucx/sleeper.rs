//! Sleeping until UCX has something to do, or somebody calls.

use crate::ucx::Worker;
use mio::{Events, Poll, Token, Waker};
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::time::Duration;

/// UCX reports its workers as number 0.
const WAKER: Token = Token(1);

/// An epoll set to which any number of workers report.
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

    /// Something that ends a sleep from another thread. One for each sleeper.
    pub(crate) fn waker(&self) -> Result<Waker, Error> {
        Waker::new(self.poll.registry(), WAKER)
    }

    /// Waits for one of the workers that report here, all of which are to be given, for the waker, or for `timeout`.
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
