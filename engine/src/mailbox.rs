//! What reaches the engine thread: new sequences, wake-ups, the order to stop. The thread sleeps here when nothing can run.

use crate::api::{Run, SequenceRequest, SequenceSink, SubmitError};
use crate::scheduler::{Prefix, SequenceKey};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// An accepted sequence on its way to the engine thread.
pub(crate) struct Submission {
    pub(crate) key: SequenceKey,
    pub(crate) request: SequenceRequest,
    pub(crate) prefix: Option<Prefix>,
    pub(crate) run: Run,
    pub(crate) sink: Box<dyn SequenceSink>,
    pub(crate) cancelled: Arc<AtomicBool>,
}

/// Whether a sequence takes one of the `waiting_max` places until it leaves the queue. An adopted one does not.
pub(crate) fn is_counted(run: &Run) -> bool {
    !matches!(run, Run::Adopted { .. })
}

/// Bounded by `waiting_max`: places are taken at [`Mailbox::submit`] and given back by [`Mailbox::left_queue`].
#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    submissions: Vec<Submission>,
    arrivals: u64,
    waiting: usize,
    woken: bool,
    stopped: bool,
}

/// What [`Mailbox::take`] found.
pub(crate) struct Taken {
    pub(crate) submissions: Vec<Submission>,
    pub(crate) stopped: bool,
}

impl Mailbox {
    /// Queues a sequence; `make` gets its place in the order of arrivals.
    pub(crate) fn submit(
        &self,
        waiting_max: usize,
        counted: bool,
        make: impl FnOnce(u64) -> Submission,
    ) -> Result<(), SubmitError> {
        let mut state = self.state.lock();
        if state.stopped {
            return Err(SubmitError::Stopped);
        }
        if counted && state.waiting >= waiting_max {
            return Err(SubmitError::Full { waiting: state.waiting, waiting_max });
        }
        state.waiting += usize::from(counted);
        state.arrivals += 1;
        let submission = make(state.arrivals);
        state.submissions.push(submission);
        self.changed.notify_one();
        Ok(())
    }

    /// A place in the order of arrivals for something that is no sequence yet.
    pub(crate) fn next_arrival(&self) -> u64 {
        let mut state = self.state.lock();
        state.arrivals += 1;
        state.arrivals
    }

    /// Gives `n` places in the queue back.
    pub(crate) fn left_queue(&self, n: usize) {
        self.state.lock().waiting -= n;
    }

    /// Makes the thread look around.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.woken, true) {
            self.changed.notify_one();
        }
    }

    /// Refuses everything from here on and makes the thread end.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_one();
    }

    /// Takes what came since the last call.
    pub(crate) fn take(&self) -> Taken {
        let mut state = self.state.lock();
        state.woken = false;
        Taken { submissions: std::mem::take(&mut state.submissions), stopped: state.stopped }
    }

    /// Sleeps until something comes, or until `wake_at`.
    pub(crate) fn wait(&self, wake_at: Option<Instant>) {
        let mut state = self.state.lock();
        while !state.woken && !state.stopped && state.submissions.is_empty() {
            match wake_at {
                None => self.changed.wait(&mut state),
                Some(at) => {
                    if self.changed.wait_until(&mut state, at).timed_out() {
                        return;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_before_the_wait_is_not_lost() {
        let mailbox = Mailbox::default();
        mailbox.wake();
        mailbox.wait(None); // Would hang.
        mailbox.take();
        mailbox.stop();
        mailbox.wait(None);
        assert!(mailbox.take().stopped);
    }
}
