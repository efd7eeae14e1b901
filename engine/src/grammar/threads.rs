//! Threads that follow grammars, and so keep the promises of masks.

use super::Grammars;
use super::starts::Starts;
use crate::scheduler::SequenceKey;
use baton_types::{ErrorKind, RequestError, Share};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Work of one mask. It must not panic.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Threads for masks: enough for batches whose masks take a good part of a step, few beside those that compute. As many start grammars.
const THREADS_MAX: usize = 4;

/// A model's grammars, and the threads that follow them, which end with the last handle. Grammars that start have threads of their own:
/// sequences that run do not wait for their compilation.
pub(crate) struct GrammarThreads {
    grammars: Arc<dyn Grammars>,
    starts: Arc<Mutex<Starts>>,
    /// Tells one of the threads that something is to be started.
    bell: Sender<()>,
    goes_on: Sender<Job>,
    /// Sequences that have started a grammar, or are to.
    sequences: AtomicUsize,
    running_max: usize,
}

impl GrammarThreads {
    /// Starts the threads, for as many sequences in a batch.
    pub(crate) fn start(grammars: Arc<dyn Grammars>, running_max: usize) -> io::Result<Arc<Self>> {
        let threads = thread::available_parallelism().map_or(1, |cores| cores.get() / 2).clamp(1, THREADS_MAX);
        let starts = Arc::<Mutex<Starts>>::default();
        let (bell, rings) = bounded(threads);
        // A sequence has one job at a time: its next follows from a token that needed the mask before. Jobs of sequences that have ended
        // do nothing, and leave soon.
        let (goes_on, to_go_on) = bounded(2 * running_max);
        for _ in 0..threads {
            let (rings, to_start, to_go_on) = (rings.clone(), starts.clone(), to_go_on.clone());
            let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
                thread::Builder::new().name(name.into()).stack_size(grammars.stack_bytes()).spawn(work).map(drop)
            };
            spawn("grammars", Box::new(move || start_each(&rings, &to_start)))?;
            spawn("masks", Box::new(move || to_go_on.iter().for_each(|job: Job| job())))?;
        }
        let sequences = AtomicUsize::new(0);
        Ok(Arc::new(Self { grammars, starts, bell, goes_on, sequences, running_max }))
    }

    pub(crate) fn grammars(&self) -> &Arc<dyn Grammars> {
        &self.grammars
    }

    /// Whether a batch has a place for one more sequence with a grammar. Then there is no need to wait until the scheduler names it.
    pub(crate) fn have_place(&self) -> bool {
        self.sequences.load(Ordering::Relaxed) < self.running_max
    }

    /// Has a thread start a grammar, in its tenant's turn. Until [`Self::leave`], its sequence is counted.
    pub(super) fn start_one(&self, priority: i32, share: Share, job: Job) -> SequenceKey {
        self.sequences.fetch_add(1, Ordering::Relaxed);
        let place = self.starts.lock().add(priority, share, job);
        // If it is full, each thread looks again.
        let _ = self.bell.try_send(());
        place
    }

    /// A sequence has ended whose grammar may not have started.
    pub(super) fn leave(&self, place: SequenceKey) {
        self.sequences.fetch_sub(1, Ordering::Relaxed);
        self.starts.lock().remove(place);
    }

    /// Has a thread do the work of one more mask.
    pub(super) fn go_on(&self, job: Job) -> Result<(), RequestError> {
        let failed = |why: &str| RequestError::new(ErrorKind::Internal, why);
        self.goes_on.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => failed("more sequences than places wait for the masks of their grammars"),
            TrySendError::Disconnected(_) => failed("the threads for the masks of grammars have ended"),
        })
    }
}

fn start_each(rings: &Receiver<()>, starts: &Mutex<Starts>) {
    let next = || starts.lock().next();
    while rings.recv().is_ok() {
        while let Some(job) = next() {
            job();
        }
    }
}
