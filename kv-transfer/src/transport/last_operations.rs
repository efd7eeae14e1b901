//! Operations on the pool of a connection that has ended. A device cannot be told to forget them, so somebody must wait.

use super::incoming::Incoming;
use baton_memory::Pending;

pub(super) struct LastOperations {
    incoming: Incoming,
    reads: Vec<Pending<Vec<u8>>>,
}

impl LastOperations {
    /// Writes of the peer, and reads of what was to be sent to it.
    pub(super) fn new(incoming: Incoming, reads: Vec<Pending<Vec<u8>>>) -> Self {
        Self { incoming, reads }
    }

    /// Whether all have ended: nothing is stored any more, and nothing is read. If not, the transport's thread is woken when one ends.
    pub(super) fn have_ended(&mut self) -> bool {
        let waker = self.incoming.pool().waker();
        self.reads.retain_mut(|read| read.poll_or_wake(waker).is_none());
        self.incoming.has_ended() && self.reads.is_empty()
    }
}
