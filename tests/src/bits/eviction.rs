//! Forces the hazard of a get: between the pin and the first read, the blocks being read are given to another sequence.

use super::case::Read;
use super::side::Side;
use super::world::PATIENCE;
use baton_kv_cache::SharedPool;
use baton_kv_transfer::{HoldPoint, KvTransfer, TransferHooks};
use baton_memory::PoolMemory;
use baton_types::RequestId;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How long D holds a pin that it reports as held throughout.
pub(super) const PRETENDED_PIN_MS: u64 = 1;

/// Delays P's reads until no block of D's pool is pinned or cached, and all of it is overwritten.
pub(super) struct Eviction {
    read: Read,
    pool: SharedPool,
    memory: Arc<dyn PoolMemory>,
    /// D's transfer, once it exists: it ends its pins.
    pub(super) owner: Arc<OnceLock<KvTransfer>>,
    /// Number of gets affected.
    pub(super) forced: Arc<AtomicUsize>,
}

impl Eviction {
    pub(super) fn of(d: &Side, read: Read) -> Self {
        let (owner, forced) = Default::default();
        Self { read, pool: d.engine.pool(), memory: d.memory.clone(), owner, forced }
    }
}

impl TransferHooks for Eviction {
    /// All of this runs on the thread that reads next. It receives the owner's report on the pin only after the reads.
    fn hold(&self, point: HoldPoint, request_id: &RequestId) -> bool {
        if point != HoldPoint::Gets {
            return false;
        }
        if let (Read::Evicted, Some(owner)) = (self.read, self.owner.get()) {
            owner.cancel(request_id, "the blocks are needed");
        }
        let deadline = Instant::now() + PATIENCE;
        // Nothing else runs on D: these requests run one after another.
        while self.pool.counts().referenced > 0 {
            assert!(Instant::now() < deadline, "D does not let go of {request_id}");
            std::thread::yield_now();
        }
        self.pool.clear_cache();
        let overwritten = self.memory.write_by(deadline, 0, &vec![0x11; self.memory.bytes()]);
        overwritten.expect("the pool's device works");
        self.forced.fetch_add(1, Ordering::SeqCst);
        false
    }
}
