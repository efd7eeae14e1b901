//! An in-order stream with its own thread.

use super::LagConfig;
use crate::adapter::PackedAdapter;
use crate::device::{DeviceError, Executable};
use crate::step::{AdapterSlot, StepInput, StepOutput};
use baton_memory::PoolMemory;
use baton_types::{BlockId, FencePoll, FenceStatus, KvPoolMap};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// Work for the inner executable.
pub(super) enum Work {
    Bind(Arc<dyn PoolMemory>, Box<KvPoolMap>),
    LoadAdapter(AdapterSlot, Arc<PackedAdapter>),
    UnloadAdapter(AdapterSlot),
    Leave(Vec<usize>),
    Step(StepInput),
    Copy { group: usize, from: BlockId, to: BlockId, tokens: usize },
}

pub(super) struct Job {
    /// Poisons what the work will store; runs when the stream reaches the job, before the delay.
    pub(super) poison: Box<dyn FnOnce() + Send>,
    pub(super) work: Work,
}

#[derive(Default)]
pub(super) struct State {
    queue: VecDeque<Job>,
    enqueued: u64,
    finished: u64,
    /// Layers of the running job whose KV is stored.
    layers: u32,
    /// Outputs of finished steps, oldest first.
    outputs: VecDeque<StepOutput>,
    failed: Option<DeviceError>,
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
    /// Appends a job and returns its number. Waits while `queue_max` jobs are pending.
    pub(super) fn enqueue(&self, job: Job, config: &LagConfig) -> Result<u64, DeviceError> {
        let mut state = self.wait_for_room(config)?;
        state.queue.push_back(job);
        state.enqueued += 1;
        self.changed.notify_all();
        Ok(state.enqueued)
    }

    /// Waits while `queue_max` jobs are pending.
    pub(super) fn wait_for_room(&self, config: &LagConfig) -> Result<MutexGuard<'_, State>, DeviceError> {
        self.wait(config, "room in the queue", |state| state.queue.len() < config.queue_max)
    }

    /// Waits until everything enqueued so far is finished.
    pub(super) fn drain(&self, config: &LagConfig) -> Result<(), DeviceError> {
        let last = self.state.lock().enqueued;
        self.wait(config, "the work before", |state| state.finished >= last).map(|_| ())
    }

    /// Waits for the oldest step that was not taken yet.
    pub(super) fn output(&self, config: &LagConfig) -> Result<StepOutput, DeviceError> {
        let mut state = self.wait(config, "step", |state| !state.outputs.is_empty())?;
        Ok(state.outputs.pop_front().unwrap_or_default())
    }

    fn wait(
        &self,
        config: &LagConfig,
        what: &str,
        ready: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, DeviceError> {
        let until = Instant::now() + config.deadline;
        let mut state = self.state.lock();
        loop {
            if ready(&state) {
                return Ok(state);
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if self.changed.wait_until(&mut state, until).timed_out() && !ready(&state) {
                return Err(DeviceError::Failed(format!("no {what} within {:?}", config.deadline)));
            }
        }
    }

    pub(super) fn finished(&self) -> u64 {
        self.state.lock().finished
    }

    /// Holds or resumes the thread.
    pub(super) fn hold(&self, held: bool) {
        self.state.lock().held = held;
        self.changed.notify_all();
    }

    pub(super) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    /// The thread: jobs in order, each after a delay, until stopped or failed.
    pub(super) fn serve(&self, inner: &mut dyn Executable, config: &LagConfig) {
        while let Some(job) = self.next() {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                (job.poison)();
                std::thread::sleep(config.delay);
                self.run(inner, job.work, config)
            }));
            let mut state = self.state.lock();
            match outcome {
                Ok(Ok(output)) => {
                    state.finished += 1;
                    state.layers = 0;
                    state.outputs.extend(output);
                }
                Ok(Err(error)) => state.failed = Some(DeviceError::Failed(format!("late failure: {error}"))),
                Err(_) => state.failed = Some(DeviceError::Failed("the inner device panicked".into())),
            }
            self.changed.notify_all();
        }
    }

    fn run(
        &self,
        inner: &mut dyn Executable,
        work: Work,
        config: &LagConfig,
    ) -> Result<Option<StepOutput>, DeviceError> {
        match work {
            Work::Bind(memory, map) => inner.bind(memory, &map).map(|()| None),
            Work::LoadAdapter(slot, adapter) => inner.load_adapter(slot, adapter).map(|()| None),
            Work::UnloadAdapter(slot) => inner.unload_adapter(slot).map(|()| None),
            Work::Leave(slots) => inner.leave(&slots).map(|()| None),
            Work::Copy { group, from, to, tokens } => inner.copy_kv(group, from, to, tokens).map(|()| None),
            Work::Step(step) => {
                inner.launch(&step, &mut |layer, _| {
                    self.state.lock().layers = layer + 1;
                    std::thread::sleep(config.delay);
                    self.wait_while_held();
                })?;
                inner.finish().map(Some)
            }
        }
    }

    fn wait_while_held(&self) {
        let mut state = self.state.lock();
        while state.held && !state.stop {
            self.changed.wait(&mut state);
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

/// Done when the first `layers` layers of a step are stored.
pub(super) struct LateFence {
    pub(super) stream: Arc<Stream>,
    pub(super) job: u64,
    pub(super) layers: u32,
}

impl FencePoll for LateFence {
    fn poll(&self) -> FenceStatus {
        let state = self.stream.state.lock();
        let running = state.finished + 1 == self.job && state.layers >= self.layers;
        if state.finished >= self.job || running {
            FenceStatus::Done
        } else if state.failed.is_some() {
            FenceStatus::Failed
        } else {
            FenceStatus::Pending
        }
    }
}
