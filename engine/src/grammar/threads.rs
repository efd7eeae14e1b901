//! Threads that keep the promises of masks.

use baton_types::{ErrorKind, RequestError};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread;

/// Work of one mask. It must not panic.
type Job = Box<dyn FnOnce() + Send>;

/// Threads for masks: enough for batches whose masks take a good part of a step, few beside those that compute.
const THREADS_MAX: usize = 4;

/// Stack of a thread: grammars may recurse along chains of rules. Only what is used is resident.
const STACK_BYTES: usize = 256 << 20;

/// A handle of the threads, which start with the first job and end with the last handle. Grammars that start have threads of their own:
/// sequences that run do not wait for their compilation.
#[derive(Clone)]
pub(crate) struct MaskThreads {
    starts: Sender<Job>,
    goes_on: Sender<Job>,
    /// Until they have started.
    start: Arc<Mutex<Option<[Receiver<Job>; 2]>>>,
}

impl MaskThreads {
    /// For as many sequences at once.
    pub(crate) fn new(sequences_max: usize) -> Self {
        // A sequence has one job at a time: its next follows from a token that needed the mask before. Jobs of sequences that have ended
        // do nothing, and leave soon.
        let (starts, to_start) = bounded(2 * sequences_max);
        let (goes_on, to_go_on) = bounded(2 * sequences_max);
        Self { starts, goes_on, start: Arc::new(Mutex::new(Some([to_start, to_go_on]))) }
    }

    /// Has a thread do this.
    pub(crate) fn run(&self, starts: bool, job: Job) -> Result<(), RequestError> {
        let failed = |error: &dyn std::fmt::Display| RequestError::new(ErrorKind::Internal, error.to_string());
        let mut start = self.start.lock();
        if let Some(jobs) = &*start {
            let threads = thread::available_parallelism().map_or(1, |cores| cores.get() / 2).clamp(1, THREADS_MAX);
            for jobs in jobs.iter().cycle().take(2 * threads) {
                let jobs = jobs.clone();
                let thread = thread::Builder::new().name("masks".into()).stack_size(STACK_BYTES);
                thread.spawn(move || work(&jobs)).map_err(|error| failed(&error))?;
            }
            *start = None;
        }
        drop(start);
        let jobs = if starts { &self.starts } else { &self.goes_on };
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => failed(&"more sequences than places wait for the masks of their grammars"),
            TrySendError::Disconnected(_) => failed(&"the threads for the masks of grammars have ended"),
        })
    }
}

fn work(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        job();
    }
}
