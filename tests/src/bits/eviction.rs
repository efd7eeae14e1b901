//! The hazard of a get, forced: between pin and first read, the blocks that are read become somebody else's.

use super::case::Read;
use super::side::Side;
use baton_kv_cache::SharedPool;
use baton_kv_transfer::{Phase, Pinning, Region, TransferHooks};
use baton_types::{PoolMemory, RequestId};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How long D holds a pin where it is to end while P reads.
pub(super) const PIN_MS: u64 = 30;

/// Holds P's reads until nothing of D's pool is pinned or cached, and all of it is written over.
pub(super) struct Eviction {
    pool: SharedPool,
    region: Arc<Region>,
    /// Gets that this happened to.
    pub(super) forced: Arc<AtomicUsize>,
}

impl Eviction {
    pub(super) fn of(d: &Side) -> Self {
        Self { pool: d.engine.pool(), region: d.region.clone(), forced: Arc::default() }
    }
}

impl TransferHooks for Eviction {
    fn hold(&self, phase: Phase, _: &RequestId) -> bool {
        if phase != Phase::Reads {
            return false;
        }
        self.pool.clear_cache();
        if self.pool.counts().referenced > 0 {
            return true;
        }
        // Nobody else runs on D: these requests come in turn.
        self.region.write(0, &vec![0x11; self.region.len()]);
        self.forced.fetch_add(1, Ordering::SeqCst);
        false
    }
}

/// What D answers to a reader whose pin has ended.
pub(super) struct Owner(pub(super) Read);

impl TransferHooks for Owner {
    fn pinning(&self) -> Pinning {
        if self.0 == Read::Unguarded { Pinning::Pretended } else { Pinning::Bounded }
    }
}
