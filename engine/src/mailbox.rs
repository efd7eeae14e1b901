//! What reaches the engine's runner: new sequences, wake-ups, the order to stop.

use crate::api::{Run, SequenceRequest, SequenceSink, SubmitError};
use crate::scheduler::{Prefix, SequenceKey};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, Waker};

/// An accepted sequence on its way to the runner.
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
}

#[derive(Default)]
struct State {
    submissions: Vec<Submission>,
    arrivals: u64,
    waiting: usize,
    woken: bool,
    stopped: bool,
    /// Who waits for something to come.
    waiter: Option<Waker>,
}

impl State {
    fn has_something(&self) -> bool {
        self.woken || self.stopped || !self.submissions.is_empty()
    }
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
        wake(state);
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

    /// Makes the runner look around.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        state.woken = true;
        wake(state);
    }

    /// Refuses everything from here on and makes the runner end.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.stopped = true;
        wake(state);
    }

    /// Takes what came since the last call.
    pub(crate) fn take(&self) -> Taken {
        let mut state = self.state.lock();
        state.woken = false;
        Taken { submissions: std::mem::take(&mut state.submissions), stopped: state.stopped }
    }

    /// Ready where something came since the last [`Mailbox::take`]; else whoever asked last is woken once something does.
    pub(crate) fn poll_changed(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.has_something() {
            return Poll::Ready(());
        }
        state.waiter = Some(cx.waker().clone());
        Poll::Pending
    }
}

fn wake(mut state: MutexGuard<'_, State>) {
    let waiter = state.waiter.take();
    drop(state);
    waiter.into_iter().for_each(Waker::wake);
}
