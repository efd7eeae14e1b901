//! The verifier of a service: one thread.

use super::{Job, Verifier};
use crate::device::Device;
use baton_types::KvPoolMap;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for the jobs that are left at the end. Jobs take longer only where the device hangs; then none of them begins any more.
const END_MAX: Duration = Duration::from_secs(1);

/// The queue needs no bound of its own: [`Verifier`] bounds the number of jobs.
pub(crate) struct VerifierThread {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
    /// Jobs that have not begun are dropped.
    given_up: Arc<AtomicBool>,
}

impl VerifierThread {
    pub(crate) fn start(device: Arc<Device>, map: KvPoolMap) -> std::io::Result<Self> {
        let (jobs, receiver) = unbounded::<Job>();
        let (ends, ended) = bounded(0);
        let given_up = Arc::<AtomicBool>::default();
        let is_given_up = given_up.clone();
        let work = move || {
            let _ends: Sender<()> = ends;
            for job in receiver {
                if is_given_up.load(Ordering::Acquire) {
                    continue;
                }
                let inbox = job.inbox.clone();
                // The panic hook has reported the panic; the progress thread fails what waits for a sum.
                if catch_unwind(AssertUnwindSafe(|| job.run_in_turn(&*device.memory, &device.turns, &map))).is_err() {
                    return inbox.fail();
                }
            }
        };
        let thread = std::thread::Builder::new().name("kv-checksum".into()).spawn(work)?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), ended, given_up })
    }
}

impl Verifier for VerifierThread {
    fn submit(&mut self, job: Job) {
        if let Some(jobs) = &self.jobs {
            jobs.send(job).ok(); // The thread ends early only after a panic, which the progress thread is notified of.
        }
    }
}

impl Drop for VerifierThread {
    /// Waits for the jobs, but not for a device that hangs: its thread ends after the job that runs, which keeps the blocks that it reads.
    fn drop(&mut self) {
        self.jobs = None;
        if self.ended.recv_timeout(END_MAX) == Err(RecvTimeoutError::Timeout) {
            self.given_up.store(true, Ordering::Release);
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
        let mut verifier = VerifierThread::start(Device::new(memory.clone()), map.clone()).unwrap();
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
        drop(verifier);
        assert!(begin.elapsed() < 10 * END_MAX);
        assert_eq!(Arc::strong_count(&hold), 4, "what is read is held");
        memory.release();
        while Arc::strong_count(&hold) > 1 {
            assert!(begin.elapsed() < 20 * END_MAX, "never let go");
            std::thread::yield_now();
        }
        assert_eq!(inbox.drain().len(), 1, "no other job began");
    }

    #[test]
    fn a_job_of_a_handoff_that_is_over_does_nothing() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 1).unwrap();
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let mut verifier = VerifierThread::start(Device::new(HostPool::new(map.bytes()).unwrap()), map).unwrap();
        // Would panic, as below.
        let runs = vec![SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] }];
        let work = Work::Check { tokens: 16, blocks: Arc::default(), heads: Arc::default(), runs };
        let life = Arc::downgrade(&Arc::new(()));
        verifier.submit(Job { inbox: inbox.clone(), key: HandoffKey(1), life, work });
        drop(verifier); // Joins the thread.
        assert!(!inbox.has_failed() && inbox.drain().is_empty());
    }

    #[test]
    fn a_panic_is_told() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 1).unwrap();
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let mut verifier = VerifierThread::start(Device::new(HostPool::new(map.bytes()).unwrap()), map).unwrap();
        let runs = vec![SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] }];
        let no_blocks = Arc::new(BlockTables::default());
        let mut submit = |alive: &Arc<()>| {
            let work = Work::Check { tokens: 16, blocks: no_blocks.clone(), heads: Arc::default(), runs: runs.clone() };
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
