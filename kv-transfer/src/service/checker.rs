//! The thread that computes checksums, on both sides, so that the progress thread never does.

use super::inbox::{Command, Inbox};
use crate::Region;
use crate::checksum::layer_sums;
use crate::message::SumRun;
use crate::shard::Heads;
use baton_types::{GroupBlocks, KvPoolMap};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Work for the thread.
pub(super) enum Job {
    /// Sum what is being sent.
    Sum {
        key: u64,
        epoch: u32,
        group: usize,
        layer: usize,
        tokens: Range<u32>,
        blocks: Arc<GroupBlocks>,
        heads: Arc<Heads>,
        /// Keeps the blocks from reuse while they are read.
        hold: Arc<dyn Any + Send + Sync>,
    },
    /// Compare what arrived with what was sent.
    Check { key: u64, tokens: u32, blocks: Arc<GroupBlocks>, heads: Arc<Heads>, runs: Vec<SumRun> },
}

/// The queue has no bound of its own: every job is a part of a live handoff, and no part comes twice. Sums are of copies that we post
/// ourselves; checks passed `Coverage`, which takes each granule of a layer once. So there are never more than the pool has granules.
pub(super) struct Checker {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Checker {
    pub(super) fn start(region: Arc<Region>, map: KvPoolMap, inbox: Arc<Inbox>) -> std::io::Result<Self> {
        let (jobs, receiver) = unbounded();
        let work = move || {
            let worker = Worker { region, map, inbox };
            // Reported by the panic's own hook; the progress thread fails what waits for a sum.
            if catch_unwind(AssertUnwindSafe(|| worker.run(&receiver))).is_err() {
                worker.inbox.fail();
            }
        };
        let thread = std::thread::Builder::new().name("kv-checksum".into()).spawn(work)?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    pub(super) fn submit(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            jobs.send(job).ok(); // The thread is gone after a panic only, of which the progress thread knows.
        }
    }
}

impl Drop for Checker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // A panic there was reported by its own hook.
        }
    }
}

struct Worker {
    region: Arc<Region>,
    map: KvPoolMap,
    inbox: Arc<Inbox>,
}

impl Worker {
    fn run(&self, jobs: &Receiver<Job>) {
        for job in jobs {
            match job {
                Job::Sum { key, epoch, group, layer, tokens, blocks, heads, hold } => {
                    let first_granule = tokens.start / crate::checksum::GRANULE;
                    let sums = layer_sums(&*self.region, &self.map, &blocks.0[group], &heads, group, layer, tokens);
                    drop(hold);
                    let run = SumRun { group: group as u8, layer: layer as u16, first_granule, sums };
                    self.inbox.push(Command::Summed { key, epoch, run });
                }
                Job::Check { key, tokens, blocks, heads, runs } => {
                    let result =
                        runs.iter().try_fold(0, |sums, run| Ok(sums + self.check(tokens, &blocks, &heads, run)?));
                    self.inbox.push(Command::Checked { key, result });
                }
            }
        }
    }

    /// How many sums of the run were found right, or where the first wrong one is.
    fn check(&self, tokens: u32, blocks: &GroupBlocks, heads: &Heads, run: &SumRun) -> Result<u64, String> {
        let (group, layer) = (usize::from(run.group), usize::from(run.layer));
        let shape = self.map.layout().groups().get(group).filter(|g| layer < g.layers.len());
        let planes = shape.map(|g| g.planes.len()).ok_or("checksums of a layer that does not exist")?;
        let granule = crate::checksum::GRANULE;
        let granules = run.sums.len() / planes;
        let start = run.first_granule.checked_mul(granule).filter(|&start| start < tokens);
        let start = start.filter(|_| granules > 0 && run.sums.len().is_multiple_of(planes));
        let start = start.ok_or("checksums of positions that were not reserved")?;
        let end = (u64::from(start) + granules as u64 * u64::from(granule)).min(u64::from(tokens)) as u32;
        let found = layer_sums(&*self.region, &self.map, &blocks.0[group], heads, group, layer, start..end);
        if found.len() != run.sums.len() {
            return Err("checksums of positions that were not reserved".into());
        }
        match found.iter().zip(&run.sums).position(|(a, b)| a != b) {
            None => Ok(found.len() as u64),
            Some(at) => {
                let name = self.map.layout().groups()[group].planes[at % planes].name();
                let token = start + (at / planes) as u32 * granule;
                Err(format!("group {group}, layer {layer} of it, plane {name}, tokens from {token}: checksum differs"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{Dtype, KvLayout};

    #[test]
    fn a_panic_is_told() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 1).unwrap();
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let checker = Checker::start(Region::anonymous(map.bytes()).unwrap(), map, inbox.clone()).unwrap();
        let no_blocks = Arc::new(GroupBlocks::default());
        let job = || Job::Check {
            key: 1,
            tokens: 16,
            blocks: no_blocks.clone(),
            heads: Arc::default(),
            runs: vec![SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] }],
        };
        assert!(!inbox.has_failed());
        checker.submit(job());
        checker.submit(job());
        drop(checker); // Joins the thread.
        assert!(inbox.has_failed());
        assert!(!inbox.may_sleep(), "the progress thread is to see it");
    }
}
