//! A persistent set of threads that share the tasks of one operation at a time.
//!
//! Only microseconds pass between the operations of a step, so threads spin for a moment before they park. Tasks are dealt in contiguous
//! shares, one a thread: a thread meets the same part of a weight in every step, and reads it as one stream. Who is done with its own share
//! takes tasks of the others. So any thread may run any task, and no result may depend on which.
//!
//! A job is handed over by one atomic word: no thread takes a lock unless somebody is parked.

mod cores;

use parking_lot::{Condvar, Mutex};
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tasks per thread, so that a slow thread leaves some of its share to the others.
pub(super) const TASKS_PER_THREAD: usize = 4;

/// How long a thread spins for what comes next before it parks: longer than the gap between two operations, shorter than a time slice.
const SPIN: Duration = Duration::from_micros(60);

/// Bits of [`Common::state`]: threads inside of the job, whether it may be entered, and above them the number of jobs so far.
const INSIDE: u64 = (1 << 16) - 1;
const OPEN: u64 = 1 << 16;
const POSTED: u64 = 1 << 17;

/// What one call of [`Threads::run`] does.
#[derive(Clone, Copy)]
struct Job {
    /// The caller's closure. Valid while the job is open or a thread is inside.
    task: *const (dyn Fn(usize) + Sync),
    tasks: usize,
    /// Into how many shares they are divided.
    shares: usize,
}

impl Job {
    /// The first task of share `i`.
    fn share(&self, i: usize) -> usize {
        (self.tasks as u128 * i as u128 / self.shares as u128) as usize
    }
}

/// The next task of a share, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Share(AtomicUsize);

/// What all threads see.
struct Common {
    state: AtomicU64,
    /// Written by the caller of [`Threads::run`] while the job is closed and nobody is inside.
    job: UnsafeCell<Option<Job>>,
    /// One of each thread, the caller's first.
    shares: Box<[Share]>,
    /// Workers that are parked, or about to be. Changed under `park`.
    parked: AtomicUsize,
    /// Whether the caller is parked until the last worker leaves.
    caller_waits: AtomicBool,
    park: Mutex<()>,
    wake: Condvar,
    done: Condvar,
    stop: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `job` is written only as its field says, and read only by threads that entered after it was opened; its pointer is of a closure
// that is `Sync`.
unsafe impl Send for Common {}
// SAFETY: as above.
unsafe impl Sync for Common {}

/// The threads. Dropping them joins all workers.
pub(super) struct Threads {
    common: Arc<Common>,
    workers: Vec<JoinHandle<()>>,
    /// One operation at a time.
    turn: Mutex<()>,
}

impl Threads {
    /// `count` threads, the caller of [`Threads::run`] being one of them. Workers are pinned where [`cores`] says.
    pub(super) fn start(count: usize) -> std::io::Result<Self> {
        let mut threads = Self::of(count);
        let cores = cores::one_each(count);
        for i in 1..count {
            let (common, core) = (threads.common.clone(), cores.get(i).copied());
            let serve = move || {
                core.into_iter().for_each(cores::pin);
                common.serve(i);
            };
            threads.workers.push(std::thread::Builder::new().name(format!("kernels-{i}")).spawn(serve)?);
        }
        Ok(threads)
    }

    /// The caller's thread alone.
    pub(super) fn none() -> Self {
        Self::of(1)
    }

    fn of(count: usize) -> Self {
        let common = Common {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            shares: (0..count).map(|_| Share::default()).collect(),
            parked: AtomicUsize::new(0),
            caller_waits: AtomicBool::new(false),
            park: Mutex::new(()),
            wake: Condvar::new(),
            done: Condvar::new(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        };
        Self { common: Arc::new(common), workers: Vec::new(), turn: Mutex::new(()) }
    }

    pub(super) fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` for every `i < tasks`, each once, and returns when all are done. Each thread takes a share of neighbouring tasks first.
    /// A task must not call this again.
    ///
    /// # Panics
    /// If a task panicked.
    pub(super) fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.run_in(self.count(), tasks, task);
    }

    /// As [`Threads::run`], but all threads take the tasks in their order, for tasks of which the first are the longest.
    pub(super) fn run_in_order(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.run_in(1, tasks, task);
    }

    fn run_in(&self, shares: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(task);
        }
        let _turn = self.turn.lock();
        // SAFETY: only the lifetime changes, and `close` below runs before this frame ends, unwinding or not.
        let task =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(task) };
        let job = Job { task, tasks, shares };
        self.common.post(job);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.common.work(job, 0)));
        if outcome.is_err() {
            self.common.abandon(tasks);
        }
        self.common.close();
        if let Err(panic) = outcome {
            self.common.panicked.store(false, Ordering::Relaxed);
            std::panic::resume_unwind(panic);
        }
        assert!(!self.common.panicked.swap(false, Ordering::Relaxed), "a kernel task panicked");
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.common.stop.store(true, Ordering::SeqCst);
        self.common.wake_parked();
        for worker in self.workers.drain(..) {
            worker.join().ok(); // Its panics were reported by `run`.
        }
    }
}

impl Common {
    fn post(&self, job: Job) {
        // SAFETY: the job is closed and the last `close` saw nobody inside; who enters now sees it closed, and does not look.
        unsafe { *self.job.get() = Some(job) };
        for (i, share) in self.shares.iter().enumerate().take(job.shares) {
            share.0.store(job.share(i), Ordering::Relaxed);
        }
        self.state.fetch_add(POSTED | OPEN, Ordering::SeqCst);
        self.wake_parked();
    }

    /// Runs tasks until none is left, those of thread `me` first.
    fn work(&self, job: Job, me: usize) {
        let me = me.min(job.shares - 1);
        for i in (me..job.shares).chain(0..me) {
            let (next, end) = (&self.shares[i].0, job.share(i + 1));
            // Looking first leaves the line of a finished share to whoever has it.
            while next.load(Ordering::Relaxed) < end {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= end {
                    break;
                }
                // SAFETY: `Threads::run` returns only after every thread that entered the job has left it, so the closure lives.
                unsafe { (*job.task)(task) };
            }
        }
    }

    /// Leaves no task to anybody.
    fn abandon(&self, tasks: usize) {
        self.shares.iter().for_each(|share| share.0.store(tasks, Ordering::Relaxed));
    }

    /// Closes the job and waits for the workers inside it. Each has at most one task left to finish.
    fn close(&self) {
        self.state.fetch_sub(OPEN, Ordering::SeqCst);
        let is_empty = || self.state.load(Ordering::SeqCst) & INSIDE == 0;
        if spin_until(&is_empty) {
            return;
        }
        // A worker that lost its core may need this one.
        let mut park = self.park.lock();
        self.caller_waits.store(true, Ordering::SeqCst);
        while !is_empty() {
            self.done.wait(&mut park);
        }
        self.caller_waits.store(false, Ordering::SeqCst);
    }

    fn wake_parked(&self) {
        if self.parked.load(Ordering::SeqCst) > 0 {
            drop(self.park.lock());
            self.wake.notify_all();
        }
    }

    /// Serves as worker `me` until the stop.
    fn serve(&self, me: usize) {
        let mut seen = 0;
        loop {
            self.wait_for_job(seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let before = self.state.fetch_add(1, Ordering::SeqCst);
            seen = before / POSTED;
            if before & OPEN != 0 {
                // SAFETY: it was open when this thread entered, so it is not written before this thread leaves.
                let job = unsafe { *self.job.get() };
                let work = || job.into_iter().for_each(|job| self.work(job, me));
                if catch_unwind(AssertUnwindSafe(work)).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                    self.abandon(job.map_or(0, |job| job.tasks));
                }
            }
            let after = self.state.fetch_sub(1, Ordering::SeqCst) - 1;
            if after & (OPEN | INSIDE) == 0 && self.caller_waits.load(Ordering::SeqCst) {
                drop(self.park.lock());
                self.done.notify_one();
            }
        }
    }

    /// Waits until more than `seen` jobs have been posted, or until the stop. The stop is no job: a worker that entered late would count it
    /// among those it has seen, and wait for ever.
    fn wait_for_job(&self, seen: u64) {
        let is_over = || self.stop.load(Ordering::SeqCst) || self.state.load(Ordering::SeqCst) / POSTED != seen;
        if spin_until(&is_over) {
            return;
        }
        let mut park = self.park.lock();
        self.parked.fetch_add(1, Ordering::SeqCst);
        while !is_over() {
            self.wake.wait(&mut park);
        }
        self.parked.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Spins until `holds`, at most for [`SPIN`]. Whether it does.
fn spin_until(holds: &impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..32 {
            if holds() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() >= SPIN {
            return holds();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let threads = Threads::start(3).unwrap();
        for tasks in [0, 1, 2, 3, 7, 100] {
            for _ in 0..200 {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                let count = |i: usize| _ = counts[i].fetch_add(1, Ordering::Relaxed);
                threads.run(tasks, &count);
                threads.run_in_order(tasks, &count);
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2));
            }
        }
    }

    #[test]
    fn parked_threads_wake_for_a_job_and_for_the_end() {
        let threads = Threads::start(3).unwrap();
        for _ in 0..20 {
            while threads.common.parked.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_micros(50));
            }
            // All three must meet: no thread can run two of these tasks.
            let meeting = std::sync::Barrier::new(3);
            threads.run(3, &|_| {
                meeting.wait();
            });
        }
        drop(threads);
    }

    #[test]
    fn a_caller_that_waits_long_parks_and_is_woken() {
        let threads = Threads::start(2).unwrap();
        for _ in 0..20 {
            let meeting = std::sync::Barrier::new(2);
            let slow = std::thread::current().id();
            threads.run(2, &|_| {
                meeting.wait();
                if std::thread::current().id() != slow {
                    std::thread::sleep(SPIN * 4);
                }
            });
        }
        assert!(!threads.common.caller_waits.load(Ordering::SeqCst));
    }

    /// Time that another thread surely needs less than, to send its wake-up before anybody waits. The lock should keep it from that.
    const MOMENT: Duration = Duration::from_millis(50);
    /// Many times what a wake-up takes on a busy machine.
    const LOST: Duration = Duration::from_secs(30);

    #[test]
    fn a_worker_that_is_about_to_park_hears_of_a_job() {
        let common = Threads::none().common.clone();
        std::thread::scope(|scope| {
            // As `wait_for_job`, with the job between the last look and the wait.
            let mut park = common.park.lock();
            common.parked.fetch_add(1, Ordering::SeqCst);
            scope.spawn(|| common.post(Job { task: &|_| {}, tasks: 1, shares: 1 }));
            std::thread::sleep(MOMENT);
            assert!(!common.wake.wait_for(&mut park, LOST).timed_out(), "the wake-up is lost");
        });
    }

    #[test]
    fn a_worker_ends_whatever_it_has_counted() {
        let (common, (ended, end)) = (Threads::none().common.clone(), std::sync::mpsc::channel());
        // As a worker that is stopped while it enters its last job: it has counted all that was ever posted.
        common.stop.store(true, Ordering::SeqCst);
        std::thread::spawn(move || {
            common.wait_for_job(0);
            ended.send(()).unwrap();
        });
        assert_eq!(end.recv_timeout(LOST), Ok(()), "it waits for a job that nobody posts");
    }

    #[test]
    fn a_caller_that_is_about_to_park_hears_of_the_end() {
        static IS_INSIDE: AtomicBool = AtomicBool::new(false);
        static MAY_LEAVE: AtomicBool = AtomicBool::new(false);
        fn wait_for(flag: &AtomicBool) {
            while !flag.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
        fn task(_: usize) {
            IS_INSIDE.store(true, Ordering::SeqCst);
            wait_for(&MAY_LEAVE);
        }
        let threads = Threads::start(2).unwrap();
        let common = &threads.common;
        common.post(Job { task: &task, tasks: 1, shares: 1 });
        wait_for(&IS_INSIDE);
        // As `close`, with the end of the task between the last look and the wait.
        common.state.fetch_sub(OPEN, Ordering::SeqCst);
        let mut park = common.park.lock();
        common.caller_waits.store(true, Ordering::SeqCst);
        MAY_LEAVE.store(true, Ordering::SeqCst);
        std::thread::sleep(MOMENT);
        assert!(!common.done.wait_for(&mut park, LOST).timed_out(), "the wake-up is lost");
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
