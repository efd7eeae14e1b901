//! The verifier of a service: one thread.

use super::{Job, Verifier};
use crate::pool_turns::SharedPoolMemory;
use baton_types::KvPoolMap;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for the jobs that are left at the end. Jobs take longer only where the device hangs; then none of them begins any more.
const END_MAX: Duration = Duration::from_secs(1);

/// Fewest jobs among which those of handoffs that are over are looked for.
const LOOKED_AT_MIN: usize = 1024;

/// Jobs that have not begun. [`Verifier`] bounds those with work to do. Those of handoffs that are over are dropped from time to time, so
/// that the queue has at most twice the jobs with work, or [`LOOKED_AT_MIN`].
#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    comes: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// With how many jobs to look for those that are over.
    look_at: usize,
    /// Others are dropped.
    closed: bool,
}

impl Queue {
    fn push(&self, job: Job) {
        let mut over = VecDeque::new();
        let mut jobs = self.jobs.lock();
        if jobs.closed {
            return;
        }
        jobs.waiting.push_back(job);
        if jobs.waiting.len() > jobs.look_at.max(LOOKED_AT_MIN) {
            let (alive, dead) = std::mem::take(&mut jobs.waiting).into_iter().partition(|job| !job.is_over());
            (jobs.waiting, over) = (alive, dead);
            jobs.look_at = 2 * jobs.waiting.len();
        }
        drop(jobs);
        drop(over); // Without the lock: what they hold may be released now.
        self.comes.notify_one();
    }

    /// Waits for the next job; `None` once the queue is closed and empty.
    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        while jobs.waiting.is_empty() && !jobs.closed {
            self.comes.wait(&mut jobs);
        }
        jobs.waiting.pop_front()
    }

    fn close(&self) {
        self.jobs.lock().closed = true;
        self.comes.notify_one();
    }

    /// Drops the jobs that have not begun.
    fn clear(&self) {
        let left = std::mem::take(&mut self.jobs.lock().waiting);
        drop(left);
    }
}

pub(crate) struct VerifierThread {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl VerifierThread {
    pub(crate) fn start(pool: Arc<SharedPoolMemory>, map: KvPoolMap) -> std::io::Result<Self> {
        let queue = Arc::<Queue>::default();
        let (ends, ended) = bounded(0);
        let jobs = queue.clone();
        let work = move || {
            let _ends: Sender<()> = ends;
            while let Some(job) = jobs.next() {
                let inbox = job.inbox.clone();
                // The panic hook has reported the panic; the progress thread fails what waits for a sum.
                if catch_unwind(AssertUnwindSafe(|| job.run_in_turn(&*pool.memory, &pool.turns, &map))).is_err() {
                    jobs.close();
                    jobs.clear();
                    return inbox.fail();
                }
            }
        };
        let thread = std::thread::Builder::new().name("kv-checksum".into()).spawn(work)?;
        Ok(Self { queue, thread: Some(thread), ended })
    }
}

impl Verifier for VerifierThread {
    /// The thread ends early only after a panic, which the progress thread is notified of; then the job is dropped.
    fn submit(&mut self, job: Job) {
        self.queue.push(job);
    }
}

impl Drop for VerifierThread {
    /// Waits for the jobs, but not for a device that hangs: its thread ends after the job that runs, which keeps the blocks that it reads.
    fn drop(&mut self) {
        self.queue.close();
        if self.ended.recv_timeout(END_MAX) == Err(RecvTimeoutError::Timeout) {
            self.queue.clear();
            return tracing::warn!("the pool's device does not end its checksums; the service stops without them");
        }
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // The panic hook has reported a panic there.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inbox::Inbox;
    use crate::message::SumRun;
    use crate::role::HandoffKey;
    use crate::verify::work::Work;
    use baton_memory::{HostPool, RemoteConfig, RemotePool};
    use baton_types::{BlockId, BlockTables, Dtype, GroupBlocks, KvLayout};
    use std::time::Instant;

    #[test]
    fn a_stop_waits_for_no_device_that_hangs() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 1).unwrap();
        let memory = RemotePool::new(map.bytes(), RemoteConfig::default()).unwrap();
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let mut verifier = VerifierThread::start(SharedPoolMemory::new(memory.clone()), map.clone()).unwrap();
        let heads =
            crate::heads::Cut::new(map.layout(), crate::HeadShard::WHOLE, crate::HeadShard::WHOLE).unwrap().source;
        let blocks = Arc::new(BlockTables::from_start(GroupBlocks(vec![vec![BlockId(0)]])));
        let (hold, alive) = (Arc::new(()), Arc::new(()));
        memory.hold();
        for _ in 0..3 {
            let (blocks, heads, hold) = (blocks.clone(), heads.clone(), hold.clone());
            let work = Work::Sum { epoch: 0, group: 0, layer: 0, tokens: 0..16, blocks, heads, hold };
            verifier.submit(Job { inbox: inbox.clone(), key: HandoffKey(1), life: Arc::downgrade(&alive), work });
        }
        let begin = Instant::now();
        while memory.running() == 0 {
            assert!(begin.elapsed() < 20 * END_MAX, "never begun");
            std::thread::yield_now();
        }
        let begin = Instant::now();
        drop(verifier);
        assert!(begin.elapsed() < 10 * END_MAX);
        assert_eq!(Arc::strong_count(&hold), 2, "what is read is held, and nothing else");
        memory.release();
        let mut reports = inbox.drain().len();
        while reports == 0 {
            assert!(begin.elapsed() < 20 * END_MAX, "never reported");
            std::thread::yield_now();
            reports = inbox.drain().len();
        }
        assert_eq!((reports, Arc::strong_count(&hold)), (1, 1), "no other job began, and nothing is held");
    }

    #[test]
    fn a_job_of_a_handoff_that_is_over_does_nothing() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 1).unwrap();
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let mut verifier =
            VerifierThread::start(SharedPoolMemory::new(HostPool::new(map.bytes()).unwrap()), map).unwrap();
        // Would panic, as below.
        let runs = vec![SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] }];
        let work = Work::Check { tokens: 16, blocks: Arc::default(), heads: Arc::default(), runs, unseen: false };
        let life = Arc::downgrade(&Arc::new(()));
        verifier.submit(Job { inbox: inbox.clone(), key: HandoffKey(1), life, work });
        drop(verifier); // Joins the thread.
        assert!(!inbox.has_failed() && inbox.drain().is_empty());
    }

    #[test]
    fn jobs_of_handoffs_that_are_over_do_not_fill_the_queue() {
        let (queue, inbox) = (Queue::default(), Arc::new(Inbox::new(1, Box::new(|| {}))));
        let alive = Arc::new(());
        let job = |key, alive: &Arc<()>| Job {
            inbox: inbox.clone(),
            key: HandoffKey(key),
            life: Arc::downgrade(alive),
            work: Work::Check {
                tokens: 16,
                blocks: Arc::default(),
                heads: Arc::default(),
                runs: Vec::new(),
                unseen: false,
            },
        };
        let waiting = || queue.jobs.lock().waiting.len();
        for key in 0..20_000 {
            let ends = Arc::new(());
            queue.push(job(key, if key % 10 == 0 { &alive } else { &ends }));
            assert!(waiting() <= LOOKED_AT_MIN.max(2 * (1 + key as usize / 10)), "{} jobs wait", waiting());
        }
        queue.close();
        let left: Vec<_> =
            std::iter::from_fn(|| queue.next()).filter(|job| !job.is_over()).map(|job| job.key.0).collect();
        assert_eq!(left, (0..20_000).step_by(10).collect::<Vec<_>>(), "in order, and none is lost");
    }

    #[test]
    fn a_panic_is_told() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 1).unwrap();
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let mut verifier =
            VerifierThread::start(SharedPoolMemory::new(HostPool::new(map.bytes()).unwrap()), map).unwrap();
        let runs = vec![SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] }];
        let no_blocks = Arc::new(BlockTables::default());
        let mut submit = |alive: &Arc<()>| {
            let work = Work::Check {
                tokens: 16,
                blocks: no_blocks.clone(),
                heads: Arc::default(),
                runs: runs.clone(),
                unseen: false,
            };
            verifier.submit(Job { inbox: inbox.clone(), key: HandoffKey(1), life: Arc::downgrade(alive), work });
        };
        let alive = Arc::new(());
        submit(&alive);
        submit(&alive);
        drop(verifier); // Joins the thread.
        assert!(inbox.has_failed());
        assert!(!inbox.may_sleep(), "the progress thread is to see it");
    }
}
