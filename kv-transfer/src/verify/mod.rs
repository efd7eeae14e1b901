//! The port for computing and comparing checksums outside of the progress thread, and the thread that implements it in a service.

mod thread;
pub(crate) mod work;

pub(crate) use thread::VerifierThread;

use crate::checksum::Summer;
use crate::inbox::Inbox;
use crate::pool_turns::Turns;
use crate::role::{HandoffKey, Input};
use baton_memory::PoolMemory;
use baton_types::KvPoolMap;
use std::sync::{Arc, Weak};
use work::Work;

/// Runs its jobs in order: at once, later or on another thread. No more jobs have work to do than the pool has granules: every such job is a
/// part of a live handoff, and no part comes twice; those of handoffs that are over are passed by. Sums are of copies that this side posts;
/// checks passed `Coverage`.
pub trait Verifier {
    /// Accepts a job; the implementation runs [`Job::run`].
    fn submit(&mut self, job: Job);
}

/// One job: to sum or to compare.
pub struct Job {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) key: HandoffKey,
    /// Gone when the handoff is over.
    pub(crate) life: Weak<()>,
    pub(crate) work: Work,
}

/// Whether the handoff with this life is over.
fn has_ended(life: &Weak<()>) -> bool {
    life.strong_count() == 0
}

impl Job {
    fn is_over(&self) -> bool {
        has_ended(&self.life)
    }

    /// Runs the job over this pool, which nobody else uses at the same time, and reports to the driver, which processes the result in its
    /// next turn. Does nothing for a handoff that is over: a peer that begins and ends handoffs leaves no work behind.
    pub fn run(self, memory: &dyn PoolMemory, map: &KvPoolMap) {
        self.run_in_turn(memory, &Turns::default(), map);
    }

    /// The same where others use the memory too.
    pub(crate) fn run_in_turn(self, memory: &dyn PoolMemory, turns: &Turns, map: &KvPoolMap) {
        let life = self.life;
        let is_over = || has_ended(&life);
        if is_over() {
            return;
        }
        self.inbox.input(self.key, Input::Verified(self.work.run(&Summer::new(memory, turns, &is_over), map)));
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({})", self.key)
    }
}
