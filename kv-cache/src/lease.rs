//! Ownership of blocks by value: dropping a [`Lease`] frees its blocks, dropping a [`Quarantined`] does not.

use crate::{BlockCounts, BlockPool, PoolError};
use baton_types::GroupBlocks;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

type Listener = Arc<dyn Fn() + Send + Sync>;

/// A [`BlockPool`] that threads share. Clones are the same pool.
#[derive(Clone)]
pub struct SharedPool(Arc<Inner>);

struct Inner {
    pool: Mutex<BlockPool>,
    on_freed: RwLock<Vec<Listener>>,
}

impl SharedPool {
    /// See [`BlockPool::try_new`].
    pub fn try_new(groups: usize, blocks: u32) -> Result<Self, PoolError> {
        let pool = Mutex::new(BlockPool::try_new(groups, blocks)?);
        Ok(Self(Arc::new(Inner { pool, on_freed: RwLock::default() })))
    }

    /// Number of groups.
    pub fn groups(&self) -> usize {
        self.lock().groups()
    }

    /// Blocks in each group.
    pub fn blocks_per_group(&self) -> u32 {
        self.lock().blocks()
    }

    /// Blocks by state, over all groups.
    pub fn counts(&self) -> BlockCounts {
        self.lock().counts()
    }

    /// Free blocks of the group that has the fewest: what the next lease can be made of.
    pub fn free_min(&self) -> usize {
        self.lock().free_min()
    }

    /// Blocks quarantined under `owner`, over all groups: what a bound per peer compares with.
    pub fn quarantined_by(&self, owner: u64) -> usize {
        self.lock().quarantined_by(owner)
    }

    /// Leases `blocks_per_group[g]` blocks of each group, or none at all.
    ///
    /// # Panics
    /// If `blocks_per_group` has another number of groups than the pool.
    pub fn try_lease(&self, blocks_per_group: &[usize]) -> Option<Lease> {
        self.try_lease_keeping(blocks_per_group, 0)
    }

    /// Like [`SharedPool::try_lease`], but leaves `free_min` blocks of each group free, so that running sequences can grow.
    /// The margin is waived while nothing is referenced: what fits the empty pool is not refused for ever.
    pub fn try_lease_keeping(&self, blocks_per_group: &[usize], free_min: usize) -> Option<Lease> {
        let mut pool = self.lock();
        let most = blocks_per_group.iter().copied().max().unwrap_or(0);
        if pool.counts().referenced > 0 && pool.free_min() < most.saturating_add(free_min) {
            return None;
        }
        let blocks = pool.allocate(blocks_per_group, None)?;
        drop(pool);
        Some(Lease { pool: self.clone(), blocks })
    }

    /// Calls `listener` after blocks became free or were quarantined, on the thread that did it and outside the pool's lock. It must
    /// return at once (set a flag, wake a thread). Listeners live as long as the pool: add them at start, not per request.
    pub fn on_freed(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.0.on_freed.write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(listener));
    }

    /// The books. They hold even after a panic under the lock: each block moves together with its count.
    fn lock(&self) -> MutexGuard<'_, BlockPool> {
        self.0.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify_freed(&self) {
        let listeners = self.0.on_freed.read().unwrap_or_else(PoisonError::into_inner).clone();
        listeners.iter().for_each(|listener| listener());
    }
}

impl fmt::Debug for SharedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedPool").field(&self.counts()).finish()
    }
}

/// Blocks that this value owns. Dropping it frees them.
pub struct Lease {
    pool: SharedPool,
    blocks: GroupBlocks,
}

impl Lease {
    /// The blocks, in the order of the tokens they hold.
    pub fn blocks(&self) -> &GroupBlocks {
        &self.blocks
    }

    /// Adds `n` blocks in each group, or none at all (`false`).
    pub fn grow(&mut self, n: usize) -> bool {
        let per_group = vec![n; self.blocks.0.len()];
        let Some(more) = self.pool.lock().allocate(&per_group, Some(&self.blocks)) else { return false };
        self.blocks.0.iter_mut().zip(more.0).for_each(|(have, more)| have.extend(more));
        true
    }

    /// Blocks in each group that has the fewest: `block_tokens` times this is what the lease can hold.
    pub fn blocks_min(&self) -> usize {
        self.blocks.0.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// A second owner of the same blocks: the defect that ownership by value rules out, for tests that show that it would be found.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn alias(&self) -> Self {
        Self { pool: self.pool.clone(), blocks: self.blocks.clone() }
    }

    /// Sets the blocks aside because `owner` (a label for one peer) may still write them. They are counted as quarantined
    /// until [`Quarantined::release`].
    pub fn quarantine(mut self, owner: u64) -> Quarantined {
        let blocks = std::mem::take(&mut self.blocks);
        self.pool.lock().quarantine(&blocks, owner);
        // The margin of `try_lease_keeping` is waived once nothing is referenced: who waits for that looks again.
        self.pool.notify_freed();
        Quarantined { pool: self.pool.clone(), blocks, owner }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.blocks.total() > 0 {
            self.pool.lock().free(&self.blocks);
            self.pool.notify_freed();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.blocks).finish()
    }
}

/// Blocks that a peer may still write. Dropping this value leaves them counted as quarantined for good, which is the safe
/// side: only [`Quarantined::release`], called by whoever knows the fence to hold, frees them.
#[must_use = "dropping it leaves the blocks quarantined for ever"]
pub struct Quarantined {
    pool: SharedPool,
    blocks: GroupBlocks,
    owner: u64,
}

impl Quarantined {
    /// The blocks.
    pub fn blocks(&self) -> &GroupBlocks {
        &self.blocks
    }

    /// The label of the peer that may still write.
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// Frees the blocks: the owner can provably no longer write them.
    pub fn release(self) {
        self.pool.lock().release(&self.blocks, self.owner);
        self.pool.notify_freed();
    }
}

impl fmt::Debug for Quarantined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantined").field("blocks", &self.blocks).field("owner", &self.owner).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn counts(free: usize, referenced: usize, quarantined: usize) -> BlockCounts {
        BlockCounts { total: free + referenced + quarantined, free, referenced, cached: 0, quarantined }
    }

    #[test]
    fn dropping_a_lease_frees_and_tells() {
        let pool = SharedPool::try_new(2, 4).unwrap();
        let told = Arc::new(AtomicUsize::new(0));
        let seen = told.clone();
        let inside = pool.clone();
        pool.on_freed(move || {
            // The lock is not held: a listener may look at the pool.
            assert!(inside.counts().free > 0);
            seen.fetch_add(1, Ordering::Relaxed);
        });
        let mut lease = pool.try_lease(&[1, 2]).unwrap();
        assert_eq!(pool.counts(), counts(5, 3, 0));
        assert!(lease.grow(2));
        assert!(!lease.grow(1), "the second group is full");
        assert_eq!((pool.counts(), lease.blocks_min()), (counts(1, 7, 0), 3));
        assert_eq!(told.load(Ordering::Relaxed), 0);
        drop(lease);
        assert_eq!((pool.counts(), told.load(Ordering::Relaxed)), (counts(8, 0, 0), 1));
    }

    #[test]
    fn only_release_ends_a_quarantine() {
        let pool = SharedPool::try_new(1, 4).unwrap();
        let held = pool.try_lease(&[3]).unwrap().quarantine(9);
        assert_eq!((pool.counts(), pool.quarantined_by(9)), (counts(1, 0, 3), 3));
        assert!(pool.try_lease(&[2]).is_none());
        held.release();
        assert_eq!(pool.counts(), counts(4, 0, 0));
        drop(pool.try_lease(&[1]).unwrap().quarantine(9));
        assert_eq!(pool.counts(), counts(3, 0, 1));
    }

    #[test]
    fn the_margin_is_kept_only_while_something_runs() {
        let pool = SharedPool::try_new(1, 8).unwrap();
        let whole = pool.try_lease_keeping(&[8], 2).expect("an empty pool takes what fits it");
        drop(whole);
        let _running = pool.try_lease(&[1]).unwrap();
        assert!(pool.try_lease_keeping(&[6], 2).is_none());
        assert!(pool.try_lease_keeping(&[5], 2).is_some());
    }

    #[test]
    fn who_waits_for_the_margin_is_told_of_a_quarantine() {
        let pool = SharedPool::try_new(1, 8).unwrap();
        let told = Arc::new(AtomicUsize::new(0));
        let seen = told.clone();
        pool.on_freed(move || _ = seen.fetch_add(1, Ordering::Relaxed));
        let running = pool.try_lease(&[2]).unwrap();
        assert!(pool.try_lease_keeping(&[6], 2).is_none());
        let _quarantined = running.quarantine(7);
        assert_eq!(told.load(Ordering::Relaxed), 1);
        assert!(pool.try_lease_keeping(&[6], 2).is_some(), "nothing is referenced any more");
    }
}
