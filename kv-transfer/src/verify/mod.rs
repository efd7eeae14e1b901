//! Checksums, computed and compared elsewhere than on the progress thread: a port, and the thread behind it in a service.

mod thread;
pub(crate) mod work;

pub(crate) use thread::VerifierThread;

use crate::inbox::Inbox;
use crate::role::{HandoffKey, Input};
use baton_types::{KvPoolMap, PoolMemory};
use std::sync::Arc;
use work::Work;

/// Does what it is given, at once, later or on another thread, but in order. There is never more to do than the pool has granules: every
/// job is a part of a live handoff, and no part comes twice. Sums are of copies that this side posts; checks passed `Coverage`.
pub trait Verifier {
    /// Takes a job; [`Job::run`] is to be called for it.
    fn submit(&mut self, job: Job);
}

/// One thing to sum or to compare.
pub struct Job {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) key: HandoffKey,
    pub(crate) work: Work,
}

impl Job {
    /// Does it over this pool, and tells the driver, which takes it in with its next turn.
    pub fn run(self, memory: &dyn PoolMemory, map: &KvPoolMap) {
        self.inbox.input(self.key, Input::Verified(self.work.run(memory, map)));
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({})", self.key)
    }
}
