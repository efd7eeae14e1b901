//! An in-order stream with its own thread.

use crate::ops::{IdsHandle, Ops, OpsError, PlanHandle};
use baton_types::{FencePoll, FenceStatus};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The inner backend's handles of the batch that the stream has reached.
#[derive(Default)]
pub(super) struct Current {
    pub(super) ids: Option<IdsHandle>,
    pub(super) plan: Option<PlanHandle>,
}

pub(super) type Work = Box<dyn FnOnce(&dyn Ops, &mut Current) -> Result<(), OpsError> + Send>;

pub(super) struct Job {
    /// Poisons the outputs; runs when the stream reaches the job, before the delay.
    pub(super) poison: Option<Work>,
    pub(super) work: Work,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    enqueued: u64,
    finished: u64,
    failed: Option<OpsError>,
    held: bool,
    stop: bool,
}

/// The queue, shared by callers, fences and the thread.
#[derive(Default)]
pub(super) struct Stream {
    state: Mutex<State>,
    changed: Condvar,
}

impl Stream {
    /// Appends a job and returns its number. Waits while `queue_max` jobs are pending, at most `deadline`.
    pub(super) fn enqueue(&self, job: Job, queue_max: usize, deadline: Duration) -> Result<u64, OpsError> {
        let mut state = self.wait(deadline, "room in the queue", |state| state.queue.len() < queue_max)?;
        state.queue.push_back(job);
        state.enqueued += 1;
        self.changed.notify_all();
        Ok(state.enqueued)
    }

    /// Waits until everything enqueued so far is finished.
    pub(super) fn drain(&self, deadline: Duration) -> Result<(), OpsError> {
        let last = self.enqueued();
        self.wait(deadline, "the work before", |state| state.finished >= last).map(|_| ())
    }

    fn wait(
        &self,
        deadline: Duration,
        what: &str,
        ready: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, OpsError> {
        let until = Instant::now() + deadline;
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if ready(&state) {
                return Ok(state);
            }
            if self.changed.wait_until(&mut state, until).timed_out() && !ready(&state) {
                return Err(OpsError::Device(format!("no {what} within {deadline:?}")));
            }
        }
    }

    pub(super) fn enqueued(&self) -> u64 {
        self.state.lock().enqueued
    }

    pub(super) fn finished(&self) -> u64 {
        self.state.lock().finished
    }

    /// Holds or resumes the thread, between jobs.
    pub(super) fn hold(&self, held: bool) {
        self.state.lock().held = held;
        self.changed.notify_all();
    }

    pub(super) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    /// The thread: jobs in order, each after `delay`, until stopped or failed.
    pub(super) fn serve(&self, inner: &dyn Ops, delay: Duration) {
        let mut current = Current::default();
        while let Some(job) = self.next() {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                if let Some(poison) = job.poison {
                    poison(inner, &mut current)?;
                }
                std::thread::sleep(delay);
                (job.work)(inner, &mut current)
            }));
            let mut state = self.state.lock();
            match outcome {
                Ok(Ok(())) => state.finished += 1,
                Ok(Err(error)) => state.failed = Some(OpsError::Device(format!("late failure: {error}"))),
                Err(_) => state.failed = Some(OpsError::Device("the inner backend panicked".into())),
            }
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if state.stop || state.failed.is_some() {
                state.queue.clear();
                return None;
            }
            if !state.held
                && let Some(job) = state.queue.pop_front()
            {
                self.changed.notify_all();
                return Some(job);
            }
            self.changed.wait(&mut state);
        }
    }
}

/// Done when the job with number `after` is.
pub(super) struct LateFence {
    pub(super) stream: Arc<Stream>,
    pub(super) after: u64,
}

impl FencePoll for LateFence {
    fn poll(&self) -> FenceStatus {
        let state = self.stream.state.lock();
        if state.finished >= self.after {
            FenceStatus::Done
        } else if state.failed.is_some() {
            FenceStatus::Failed
        } else {
            FenceStatus::Pending
        }
    }
}
