//! The hazard of a get, forced: between pin and first read, the blocks that are read become somebody else's.

use super::case::Read;
use super::side::Side;
use super::world::PATIENCE;
use baton_kv_cache::SharedPool;
use baton_kv_transfer::{HoldPoint, KvTransfer, Region, TransferHooks};
use baton_types::{PoolMemory, RequestId};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How long D holds a pin that it says to have held all along.
pub(super) const PRETENDED_PIN_MS: u64 = 1;

/// Stands before P's reads until nothing of D's pool is pinned or cached, and all of it is written over.
pub(super) struct Eviction {
    read: Read,
    pool: SharedPool,
    region: Arc<Region>,
    /// D's transfer, once it is there: it takes its pins back.
    pub(super) owner: Arc<OnceLock<KvTransfer>>,
    /// Gets that this happened to.
    pub(super) forced: Arc<AtomicUsize>,
}

impl Eviction {
    pub(super) fn of(d: &Side, read: Read) -> Self {
        let (owner, forced) = Default::default();
        Self { read, pool: d.engine.pool(), region: d.region.clone(), owner, forced }
    }
}

impl TransferHooks for Eviction {
    /// All of it happens on the thread that reads next, which hears what the owner says of its pin after the reads only.
    fn hold(&self, point: HoldPoint, request_id: &RequestId) -> bool {
        if point != HoldPoint::Gets {
            return false;
        }
        if let (Read::Evicted, Some(owner)) = (self.read, self.owner.get()) {
            owner.cancel(request_id, "the blocks are needed");
        }
        let deadline = Instant::now() + PATIENCE;
        // Nobody else runs on D: these requests come in turn.
        while self.pool.counts().referenced > 0 {
            assert!(Instant::now() < deadline, "D does not let go of {request_id}");
            std::thread::yield_now();
        }
        self.pool.clear_cache();
        self.region.write(0, &vec![0x11; self.region.len()]);
        self.forced.fetch_add(1, Ordering::SeqCst);
        false
    }
}
