//! A persistent set of threads that share the tasks of one operation at a time.
//!
//! Only microseconds pass between the operations of a step, so workers spin for a moment before they park. Tasks are claimed from a
//! counter: any thread may run any task, and no result may depend on which.

use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for more work before it parks: longer than the gap between two operations, shorter than a time slice.
const SPIN: Duration = Duration::from_micros(60);

/// Claims and task function of one call of [`Threads::run`].
struct Job {
    /// The caller's closure. Valid while the job is in [`Slot::job`] or a worker counts in [`Slot::active`].
    task: *const (dyn Fn(usize) + Sync),
    tasks: usize,
    next: AtomicUsize,
}

impl Job {
    fn work(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.tasks {
                return;
            }
            // SAFETY: `Threads::run` returns only after every thread that entered the job has left it, so the closure lives.
            unsafe { (*self.task)(index) };
        }
    }
}

#[derive(Default)]
struct Slot {
    job: Option<*const Job>,
    stop: bool,
}

// SAFETY: the pointer is dereferenced only by workers that entered under the lock, while `Threads::run` keeps the job alive.
unsafe impl Send for Slot {}

#[derive(Default)]
struct Common {
    slot: Mutex<Slot>,
    wake: Condvar,
    /// Number of jobs posted so far; spinning workers watch it.
    posted: AtomicU64,
    /// Workers inside the current job. Raised under the lock of `slot`.
    active: AtomicUsize,
    panicked: AtomicBool,
}

/// The threads. Dropping them joins all workers.
pub(super) struct Threads {
    common: Arc<Common>,
    workers: Vec<JoinHandle<()>>,
    /// One operation at a time.
    turn: Mutex<()>,
}

impl Threads {
    /// `count` threads, the caller of [`Threads::run`] being one of them.
    pub(super) fn start(count: usize) -> std::io::Result<Self> {
        let mut threads = Self::none();
        for i in 1..count {
            let common = threads.common.clone();
            threads
                .workers
                .push(std::thread::Builder::new().name(format!("kernels-{i}")).spawn(move || common.serve())?);
        }
        Ok(threads)
    }

    /// The caller's thread alone.
    pub(super) fn none() -> Self {
        Self { common: Arc::default(), workers: Vec::new(), turn: Mutex::new(()) }
    }

    pub(super) fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` for every `i < tasks`, each once, and returns when all are done.
    ///
    /// # Panics
    /// If a task panicked.
    pub(super) fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(task);
        }
        let _turn = self.turn.lock();
        // SAFETY: only the lifetime changes, and `leave` below runs before this frame ends, unwinding or not.
        let task =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(task) };
        let job = Job { task, tasks, next: AtomicUsize::new(0) };
        self.common.post(&job);
        let outcome = catch_unwind(AssertUnwindSafe(|| job.work()));
        if outcome.is_err() {
            job.next.store(tasks, Ordering::Relaxed);
        }
        self.common.leave();
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        assert!(!self.common.panicked.swap(false, Ordering::Relaxed), "a kernel task panicked");
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.common.slot.lock().stop = true;
        self.common.posted.fetch_add(1, Ordering::Release);
        self.common.wake.notify_all();
        for worker in self.workers.drain(..) {
            worker.join().ok(); // Its panics were reported by `run`.
        }
    }
}

impl Common {
    fn post(&self, job: &Job) {
        let mut slot = self.slot.lock();
        slot.job = Some(job);
        self.posted.fetch_add(1, Ordering::Release);
        self.wake.notify_all();
    }

    /// Withdraws the job and waits for the workers inside it. Each has at most one task left to finish.
    fn leave(&self) {
        self.slot.lock().job = None;
        let mut spins = 0u32;
        while self.active.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    fn serve(&self) {
        let mut seen = 0;
        loop {
            self.spin_for_work(seen);
            let mut slot = self.slot.lock();
            let job = loop {
                if slot.stop {
                    return;
                }
                let posted = self.posted.load(Ordering::Acquire);
                match slot.job {
                    Some(job) if posted != seen => {
                        seen = posted;
                        break job;
                    }
                    // Withdrawn before this worker came, or no new job.
                    _ if posted != seen => seen = posted,
                    _ => self.wake.wait(&mut slot),
                }
            };
            self.active.fetch_add(1, Ordering::Relaxed);
            drop(slot);
            // SAFETY: entered under the lock while the job was posted; `leave` waits until `active` falls again.
            let job = unsafe { &*job };
            if catch_unwind(AssertUnwindSafe(|| job.work())).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
                job.next.store(job.tasks, Ordering::Relaxed);
            }
            self.active.fetch_sub(1, Ordering::Release);
        }
    }

    fn spin_for_work(&self, seen: u64) {
        let start = Instant::now();
        while self.posted.load(Ordering::Acquire) == seen && start.elapsed() < SPIN {
            for _ in 0..32 {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let threads = Threads::start(3).unwrap();
        for tasks in [0, 1, 2, 7, 100] {
            for _ in 0..50 {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                threads.run(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_survive() {
        let threads = Threads::start(2).unwrap();
        let failed = catch_unwind(AssertUnwindSafe(|| threads.run(64, &|i| assert_ne!(i, 40, "expected by the test"))));
        assert!(failed.is_err());
        let done = AtomicUsize::new(0);
        threads.run(64, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 64);
    }
}
