//! The verifier of a service: one thread.

use super::{Job, Verifier};
use baton_memory::PoolMemory;
use baton_types::KvPoolMap;
use crossbeam_channel::{Sender, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

/// The queue needs no bound of its own: [`Verifier`] bounds the number of jobs.
pub(crate) struct VerifierThread {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl VerifierThread {
    pub(crate) fn start(memory: Arc<dyn PoolMemory>, map: KvPoolMap) -> std::io::Result<Self> {
        let (jobs, receiver) = unbounded::<Job>();
        let work = move || {
            for job in receiver {
                let inbox = job.inbox.clone();
                // The panic hook has reported the panic; the progress thread fails what waits for a sum.
                if catch_unwind(AssertUnwindSafe(|| job.run(&*memory, &map))).is_err() {
                    return inbox.fail();
                }
            }
        };
        let thread = std::thread::Builder::new().name("kv-checksum".into()).spawn(work)?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
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
    fn drop(&mut self) {
        self.jobs = None;
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
    use baton_memory::HostPool;
    use baton_types::{BlockTables, Dtype, KvLayout};

    #[test]
    fn a_panic_is_told() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 1).unwrap();
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let mut verifier = VerifierThread::start(HostPool::new(map.bytes()).unwrap(), map).unwrap();
        let runs = vec![SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] }];
        let no_blocks = Arc::new(BlockTables::default());
        let mut submit = || {
            let work = Work::Check { tokens: 16, blocks: no_blocks.clone(), heads: Arc::default(), runs: runs.clone() };
            verifier.submit(Job { inbox: inbox.clone(), key: HandoffKey(1), work });
        };
        assert!(!inbox.has_failed());
        submit();
        submit();
        drop(verifier); // Joins the thread.
        assert!(inbox.has_failed());
        assert!(!inbox.may_sleep(), "the progress thread is to see it");
    }
}
