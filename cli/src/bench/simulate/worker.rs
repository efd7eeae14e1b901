//! What both kinds of simulated workers have: a pool with its cache, a NIC, and their word to the router.

use super::clock::{Time, ns};
use baton_kv_cache::{
    CacheChange, CacheConfig, CacheUpdate, Change, ChangeCursor, HASH_TOKENS, Keep, Lease, PrefixHash, Reserve,
    SharedPool,
};
use baton_types::Incarnation;
use std::time::{Duration, Instant};

/// The only start of every worker.
pub(super) const INCARNATION: Incarnation = Incarnation(1);

/// No trace is as long.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// Time between looking for blocks whose time is over.
const SWEEP: Duration = Duration::from_secs(1);

/// What a worker stores in a pool: one block of the trace is one block of the pool, with one name. To the pool it is a block of
/// [`HASH_TOKENS`] tokens, the smallest that it knows, so that hashes are made for no more tokens than ids tell apart.
pub(super) struct Store {
    pub(super) pool: SharedPool,
    keep: Keep,
    /// When blocks whose time was over were let go last.
    swept: Option<Instant>,
    /// What the router was told of the cache.
    told: Option<ChangeCursor>,
    sequence: u64,
    /// When what is being sent has left.
    nic_free: Time,
}

/// Changes of a cache on their way to the router, and the number of the first.
pub(super) type Told = (u64, Vec<Change>);

impl Store {
    pub(super) fn new(blocks: u32, ttl: Option<Duration>) -> anyhow::Result<Self> {
        // A single step changes each block at most twice, and the router is told after each.
        let changes_max = 4 * blocks as usize;
        let config = CacheConfig { block_tokens: HASH_TOKENS, pinned_max: 0, pinned_of_one_max: 0, changes_max };
        let pool = SharedPool::with_cache(1, blocks, config)?;
        let told = pool.snapshot().map(|(_, cursor)| cursor);
        Ok(Self { pool, keep: Keep::idle(ttl.unwrap_or(FOR_EVER)), swept: None, told, sequence: 0, nic_free: 0 })
    }

    /// A lease over so many blocks, of which at most the first `reuse` come from the cache.
    pub(super) fn reserve(&self, hashes: &[PrefixHash], reuse: usize, blocks: usize, now: Instant) -> Option<Lease> {
        let reuse_tokens_max = reuse * HASH_TOKENS;
        self.pool.try_reserve(Reserve { hashes, reuse_tokens_max, blocks, keep_free: 0, now })
    }

    /// Blocks of a prompt that are cached.
    pub(super) fn cached(&self, hashes: &[PrefixHash]) -> usize {
        self.pool.cached_tokens(hashes) / HASH_TOKENS
    }

    /// The KV of all named blocks is there.
    pub(super) fn store(&self, lease: &mut Lease, hashes: &[PrefixHash], now: Instant) {
        lease.store(hashes, hashes.len() * HASH_TOKENS, self.keep, now);
        lease.let_go_of_spares();
    }

    /// Lets go of what was idle for too long, once in a while: it looks at all that is idle.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.keep.ttl < FOR_EVER && self.swept.is_none_or(|at| now.saturating_duration_since(at) >= SWEEP) {
            self.swept = Some(now);
            self.pool.expire(now);
        }
    }

    /// What changed in the cache since this was asked last.
    pub(super) fn changes(&mut self) -> Option<Told> {
        let (changes, cursor) = self.pool.changes_since(self.told?, usize::MAX)?;
        self.told = Some(cursor);
        let first = self.sequence + 1;
        self.sequence += changes.len() as u64;
        (!changes.is_empty()).then_some((first, changes))
    }

    /// Sends for so long, from `from` on and behind what was to be sent before; when it has left.
    pub(super) fn send(&mut self, from: Time, seconds: f64) -> Time {
        self.nic_free = self.nic_free.max(from) + ns(seconds);
        self.nic_free
    }
}

/// Changes as the index takes them up.
pub(super) fn updates(first: u64, changes: &[Change]) -> impl Iterator<Item = CacheUpdate<'_>> {
    changes.iter().zip(first..).map(|(change, sequence)| {
        let change = match change {
            Change::Stored(hashes) => CacheChange::Stored(hashes),
            Change::Removed(hashes) => CacheChange::Removed(hashes),
        };
        CacheUpdate { incarnation: INCARNATION, sequence, change }
    })
}
