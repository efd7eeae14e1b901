//! The pool as shared by threads: allocation, notifications when blocks are returned, and the cache's changes for its followers.

use crate::cache::{Change, ChangeCursor};
use crate::cached_pool::{CachedPool, Reserve, Table};
use crate::{BlockCounts, BlockState, CacheConfig, CacheCounts, Lease, PoolError, PoolShape, PrefixHash};
use baton_types::{BlockId, BlockTables, GroupBlocks};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

type Listener = Arc<dyn Fn() + Send + Sync>;

/// A pool, with a prefix cache if it was created with one. Clones refer to the same pool.
#[derive(Clone)]
pub struct SharedPool(Arc<Inner>);

struct Inner {
    shape: PoolShape,
    state: Mutex<CachedPool>,
    on_freed: RwLock<Vec<Listener>>,
    on_changed: RwLock<Vec<Listener>>,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl SharedPool {
    /// A pool without a prefix cache, see [`crate::BlockPool::try_new`].
    pub fn try_new(shape: PoolShape) -> Result<Self, PoolError> {
        Self::of(shape, None)
    }

    /// A pool whose full blocks, once stored, stay cached until their memory is needed or they expire.
    pub fn with_cache(shape: PoolShape, cache: CacheConfig) -> Result<Self, PoolError> {
        Self::of(shape, Some(cache))
    }

    fn of(shape: PoolShape, cache: Option<CacheConfig>) -> Result<Self, PoolError> {
        let state = Mutex::new(CachedPool::try_new(shape.clone(), cache)?);
        Ok(Self(Arc::new(Inner { shape, state, on_freed: RwLock::default(), on_changed: RwLock::default() })))
    }

    pub fn shape(&self) -> &PoolShape {
        &self.0.shape
    }

    pub fn groups(&self) -> usize {
        self.0.shape.groups.len()
    }

    /// Blocks by state, over all groups.
    pub fn counts(&self) -> BlockCounts {
        self.lock().counts()
    }

    /// Blocks of one group by state.
    pub fn counts_of(&self, group: usize) -> BlockCounts {
        self.lock().pool().counts_of(group)
    }

    /// Contents of the cache, in blocks of one group; zero if there is no cache.
    pub fn cache_counts(&self) -> CacheCounts {
        self.lock().cache_counts()
    }

    /// Blocks of each group available for the next lease: free ones, and unused cached ones.
    pub fn available(&self) -> Vec<usize> {
        self.lock().available()
    }

    /// The value of [`SharedPool::available`] if these leases were dropped. Blocks that they share with other leases stay held, and so do
    /// those that a pin may keep.
    pub fn available_without<'a>(&self, leases: impl Iterator<Item = &'a Lease>) -> Vec<usize> {
        self.lock().available_without(leases.flat_map(Lease::held))
    }

    /// The smallest number of [`SharedPool::available`].
    #[doc(hidden)] // For tests.
    pub fn free_min(&self) -> usize {
        self.available().into_iter().min().unwrap_or(0)
    }

    /// Blocks quarantined under `owner`, over all groups.
    #[doc(hidden)] // For simulations.
    pub fn quarantined_by(&self, owner: u64) -> usize {
        self.lock().pool().quarantined_by(owner)
    }

    /// Whether leases hold the block, or a peer may still write it.
    #[doc(hidden)] // For simulations.
    pub fn is_held(&self, group: usize, block: BlockId) -> bool {
        let state = self.lock().pool().state(group, block);
        matches!(state, BlockState::Referenced { .. } | BlockState::Quarantined { .. })
    }

    /// Leases `blocks_per_group[g]` blocks of each group, or none at all.
    ///
    /// # Panics
    /// If `blocks_per_group` has another number of groups than the pool.
    pub fn try_lease(&self, blocks_per_group: &[usize]) -> Option<Lease> {
        self.try_lease_keeping(blocks_per_group, 0)
    }

    /// Like [`SharedPool::try_lease`], but leaves `free_min` blocks of each group free, so that running sequences can grow. The margin is
    /// waived while no block is referenced, so that a request that fits the empty pool is not refused forever.
    #[doc(hidden)] // For tests.
    pub fn try_lease_keeping(&self, blocks_per_group: &[usize], free_min: usize) -> Option<Lease> {
        self.lease(|state| {
            let blocks = state.allocate_keeping(blocks_per_group, &vec![free_min; blocks_per_group.len()])?;
            let (whole, next) = (vec![0; blocks.0.len()], GroupBlocks(vec![Vec::new(); blocks.0.len()]));
            Some(Table { tables: BlockTables::from_start(blocks), cached: 0, known: 0, whole, next })
        })
    }

    /// Leases blocks, the first of which come from the cache, or none at all.
    pub fn try_reserve(&self, wanted: Reserve<'_>) -> Option<Lease> {
        self.lease(|state| state.reserve(wanted))
    }

    fn lease(&self, take: impl FnOnce(&mut CachedPool) -> Option<Table>) -> Option<Lease> {
        let table = self.change(take)?;
        Some(Lease::new(self.clone(), table))
    }

    /// Runs an operation that may evict or store, and notifies the cache's followers if it did.
    pub(crate) fn change<T>(&self, act: impl FnOnce(&mut CachedPool) -> T) -> T {
        let mut state = self.lock();
        let before = state.changed();
        let result = act(&mut state);
        let changed = state.changed() != before;
        drop(state);
        if changed {
            self.notify_changed();
        }
        result
    }

    /// Tokens of the longest cached prefix of `hashes`, in whole blocks. The blocks may be evicted right afterwards.
    pub fn cached_tokens(&self, hashes: &[PrefixHash]) -> usize {
        self.lock().cached_tokens(hashes)
    }

    /// The blocks of that cached prefix which the next position needs.
    #[doc(hidden)] // For simulations.
    pub fn cached_blocks(&self, hashes: &[PrefixHash]) -> BlockTables {
        self.lock().cached_blocks(hashes)
    }

    /// Moves the idle end of a prefix to the front of the eviction queue: it is not expected to be used again soon.
    pub fn demote(&self, hashes: &[PrefixHash]) {
        self.lock().demote(hashes);
    }

    /// Evicts expired blocks, and ends expired pins. Call it periodically.
    pub fn expire(&self, now: Instant) {
        self.taken_out(|state| state.expire(now));
    }

    /// Evicts everything that may be evicted.
    pub fn clear_cache(&self) {
        self.taken_out(CachedPool::clear);
    }

    /// Ends the pins of all unused blocks, for a sequence that could never proceed otherwise; returns whether there were any.
    pub fn waive_pins(&self) -> bool {
        let waived = self.lock().waive_pins();
        if waived {
            self.notify_freed();
        }
        waived
    }

    fn taken_out(&self, take: impl FnOnce(&mut CachedPool) -> bool) {
        let mut state = self.lock();
        let room = state.available();
        let any = take(&mut state);
        // The end of a pin makes blocks available.
        let more = is_more(&room, &state.available());
        drop(state);
        if any {
            self.notify_changed();
        }
        if more {
            self.notify_freed();
        }
    }

    /// At most `max` changes of the cache from a position on, and the position after them. `None` if some of them were dropped, so that a
    /// snapshot is due; also `None` if there is no cache.
    pub fn changes_since(&self, cursor: ChangeCursor, max: usize) -> Option<(Vec<Change>, ChangeCursor)> {
        self.lock().changes_since(cursor, max)
    }

    /// Hashes of all cached blocks, in no order, and the position after all changes so far; `None` if there is no cache.
    pub fn snapshot(&self) -> Option<(Vec<PrefixHash>, ChangeCursor)> {
        self.lock().snapshot()
    }

    /// Calls `listener` after blocks became free or were quarantined, on the thread that did it and outside the pool's lock. It must return
    /// at once (set a flag, wake a thread). Listeners live as long as the pool: add them at start, not per request.
    pub fn on_freed(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.0.on_freed.write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(listener));
    }

    /// Calls `listener` after the cache changed, under the conditions of [`SharedPool::on_freed`].
    pub fn on_changed(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.0.on_changed.write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(listener));
    }

    /// Locks the state. It stays valid even after a panic under the lock: each block changes together with its count.
    pub(crate) fn lock(&self) -> MutexGuard<'_, CachedPool> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn give_back(&self, tables: &BlockTables) {
        if tables.total() > 0 && self.lock().let_go(tables) {
            self.notify_freed();
        }
    }

    /// Returns blocks that are not cached.
    pub(crate) fn give_back_uncached(&self, blocks: &GroupBlocks) {
        if blocks.total() > 0 && self.lock().let_go_uncached(blocks) {
            self.notify_freed();
        }
    }

    /// Runs an operation that may return some blocks and take others, and notifies of both.
    pub(crate) fn exchange<T>(&self, act: impl FnOnce(&mut CachedPool) -> T) -> T {
        let (result, more) = self.change(|state| {
            let before = state.available();
            let result = act(state);
            (result, is_more(&before, &state.available()))
        });
        if more {
            self.notify_freed();
        }
        result
    }

    pub(crate) fn notify_freed(&self) {
        tell(&self.0.on_freed);
    }

    pub(crate) fn notify_changed(&self) {
        tell(&self.0.on_changed);
    }
}

/// Whether any group has more available blocks than before.
fn is_more(before: &[usize], after: &[usize]) -> bool {
    before.iter().zip(after).any(|(before, after)| after > before)
}

fn tell(listeners: &RwLock<Vec<Listener>>) {
    let listeners = listeners.read().unwrap_or_else(PoisonError::into_inner).clone();
    listeners.iter().for_each(|listener| listener());
}

impl fmt::Debug for SharedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedPool").field(&self.counts()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateBefore;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn counts(free: usize, referenced: usize, quarantined: usize) -> BlockCounts {
        BlockCounts { total: free + referenced + quarantined, free, referenced, cached: 0, quarantined }
    }

    #[test]
    fn dropping_a_lease_frees_and_tells() {
        let pool = SharedPool::try_new(PoolShape::full(2, 4, 16)).unwrap();
        let told = Arc::new(AtomicUsize::new(0));
        let seen = told.clone();
        let inside = pool.clone();
        pool.on_freed(move || {
            // The lock is not held: a listener may access the pool.
            assert!(inside.counts().free > 0);
            seen.fetch_add(1, Ordering::Relaxed);
        });
        let mut lease = pool.try_lease(&[1, 2]).unwrap();
        assert_eq!(pool.counts(), counts(5, 3, 0));
        assert!(lease.hold(0..64, StateBefore::Replaced));
        assert!(!lease.hold(0..65, StateBefore::Replaced), "the second group is full");
        assert_eq!((pool.counts(), lease.blocks_end()), (counts(0, 8, 0), 4));
        assert_eq!(told.load(Ordering::Relaxed), 0);
        drop(lease);
        assert_eq!((pool.counts(), told.load(Ordering::Relaxed)), (counts(8, 0, 0), 1));
    }

    #[test]
    fn only_release_ends_a_quarantine() {
        let pool = SharedPool::try_new(PoolShape::full(1, 4, 16)).unwrap();
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
        let pool = SharedPool::try_new(PoolShape::full(1, 8, 16)).unwrap();
        let whole = pool.try_lease_keeping(&[8], 2).expect("an empty pool takes what fits it");
        drop(whole);
        let _running = pool.try_lease(&[1]).unwrap();
        assert!(pool.try_lease_keeping(&[6], 2).is_none());
        assert!(pool.try_lease_keeping(&[5], 2).is_some());
    }

    #[test]
    fn who_waits_for_the_margin_is_told_of_a_quarantine() {
        let pool = SharedPool::try_new(PoolShape::full(1, 8, 16)).unwrap();
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
