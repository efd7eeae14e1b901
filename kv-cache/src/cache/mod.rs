//! The prefix cache of one pool: which whole blocks are cached under which hash, and in which order they are evicted.
//!
//! ```text
//! store ──> in use ── last lease gone ──> evictable, oldest first ── evict, TTL ──> free
//!             ^  └──────── pinned ──────> kept until the pin ends ──┐
//!             └────────────────────── a lease finds it <────────────┘
//! ```
//!
//! A lease that holds a cached block holds all blocks before it. So after an idle block there are only idle blocks: queues are filled from
//! the deepest block up, and their order alone evicts leaves first. A block that a lease holds is never in a queue.

mod changes;
mod entries;

use crate::{HASH_TOKENS, PrefixHash};
use baton_types::BlockId;
pub(crate) use changes::Changes;
pub use changes::{Change, ChangeCursor};
pub(crate) use entries::EntryId;
use entries::{Entries, Line, Pinned};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

/// Bounds of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Tokens of a block: a multiple of [`HASH_TOKENS`].
    pub block_tokens: usize,
    /// Most blocks that may be pinned in total.
    pub pinned_max: usize,
    /// Most blocks that the pins of one owner may hold.
    pub pinned_of_one_max: usize,
    /// Changes kept for followers; one that is further behind takes a snapshot.
    pub changes_max: usize,
}

/// How long blocks are kept once they are unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Time after which unused blocks are evicted; they may be evicted earlier to free blocks.
    pub ttl: Duration,
    /// Until the pin ends, blocks are not evicted for either reason.
    pub pin: Option<Pin>,
}

impl Keep {
    /// Keeps blocks for `ttl`, without a pin.
    pub const fn idle(ttl: Duration) -> Self {
        Self { ttl, pin: None }
    }
}

/// A pin on a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The owner whose quota it counts towards: a label of the tenant.
    pub owner: u64,
    /// When the pin ends.
    pub until: Instant,
}

/// Contents and counters of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Cached blocks, in use or not; the blocks of all groups count once.
    pub blocks: usize,
    /// Cached blocks that no lease holds and that may be evicted.
    pub evictable: usize,
    /// Those that are pinned, in use or not.
    pub pinned: usize,
    /// Blocks stored since the start.
    pub stored: u64,
    /// Blocks evicted to free blocks, since the start.
    pub evicted: u64,
    /// Blocks that expired, since the start.
    pub expired: u64,
    /// Blocks that were not pinned because the quota was used up, since the start.
    pub unpinned: u64,
}

/// Hashes are uniformly distributed, so they need no further hashing.
#[derive(Clone, Copy, Debug, Default)]
struct SpreadHasher(u64);

impl Hasher for SpreadHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().take(8).for_each(|b| self.0 = self.0 << 8 | u64::from(*b));
    }

    fn write_usize(&mut self, _len: usize) {}
}

/// The cache. Pools without caching have none.
#[derive(Clone, Debug)]
pub(crate) struct PrefixCache {
    config: CacheConfig,
    by_hash: HashMap<PrefixHash, EntryId, BuildHasherDefault<SpreadHasher>>,
    entries: Entries,
    /// By block of the first group.
    entry_of: Vec<Option<EntryId>>,
    pinned_by: HashMap<u64, usize>,
    changes: Changes,
    counts: CacheCounts,
    /// The latest time passed in.
    now: Option<Instant>,
}

impl PrefixCache {
    pub(crate) fn new(config: CacheConfig, groups: usize, blocks: u32) -> Self {
        Self {
            config,
            by_hash: HashMap::default(),
            entries: Entries::new(groups),
            entry_of: vec![None; blocks as usize],
            pinned_by: HashMap::new(),
            changes: Changes::new(config.changes_max),
            counts: CacheCounts::default(),
            now: None,
        }
    }

    /// Groups of [`HASH_TOKENS`] in a block.
    fn stride(&self) -> usize {
        self.config.block_tokens / HASH_TOKENS
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.config.block_tokens
    }

    /// Hash of the block at `index` of a prompt, if the hashes cover all of it.
    pub(crate) fn hash_of(&self, hashes: &[PrefixHash], index: usize) -> Option<PrefixHash> {
        hashes.get((index + 1) * self.stride() - 1).copied()
    }

    /// The cached blocks that a prompt begins with, at most `blocks_max`.
    pub(crate) fn find(&self, hashes: &[PrefixHash], blocks_max: usize) -> Vec<EntryId> {
        let hash = |index| self.hash_of(hashes, index);
        (0..blocks_max).map_while(|index| self.by_hash.get(&hash(index)?).copied()).collect()
    }

    pub(crate) fn by_hash(&self, hash: &PrefixHash) -> Option<EntryId> {
        self.by_hash.get(hash).copied()
    }

    pub(crate) fn by_block(&self, first_group: BlockId) -> Option<EntryId> {
        self.entry_of[first_group.0 as usize]
    }

    pub(crate) fn blocks(&self, id: EntryId) -> &[BlockId] {
        self.entries.blocks(id)
    }

    /// Number of blocks that may be evicted.
    pub(crate) fn evictable(&self) -> usize {
        self.entries.waiting(Line::Evictable)
    }

    /// Whether the block may be evicted.
    pub(crate) fn is_evictable(&self, id: EntryId) -> bool {
        self.entries.of(id).line() == Some(Line::Evictable)
    }

    /// Whether a block stays cached even while unused.
    pub(crate) fn is_pinned(&self, first_group: BlockId) -> bool {
        self.by_block(first_group).is_some_and(|id| self.entries.of(id).pinned.is_some())
    }

    /// Advances the time, which never goes back, and returns it.
    pub(crate) fn at(&mut self, now: Instant) -> Instant {
        *self.now.insert(self.now.map_or(now, |known| known.max(now)))
    }

    /// A lease holds the block from now on.
    pub(crate) fn hold(&mut self, id: EntryId) {
        self.entries.leave_line(id);
    }

    /// The last lease dropped the block.
    pub(crate) fn wait(&mut self, id: EntryId) {
        // Every cached block was stored at some time, so a time is known.
        if let Some(now) = self.now {
            self.entries.wait(id, now);
        }
    }

    /// Caches a block that a lease holds and that continues `parent`.
    pub(crate) fn add(
        &mut self,
        hash: PrefixHash,
        parent: Option<EntryId>,
        ttl: Duration,
        blocks: impl Iterator<Item = BlockId>,
    ) -> EntryId {
        let id = self.entries.add(hash, parent, ttl, blocks);
        self.entry_of[self.entries.blocks(id)[0].0 as usize] = Some(id);
        self.by_hash.insert(hash, id);
        self.counts.stored += 1;
        self.changes.push(true, hash);
        id
    }

    /// Extends how long a block that a lease holds is kept. The first blocks of a prefix are pinned first, while the quota lasts.
    pub(crate) fn keep(&mut self, id: EntryId, keep: Keep) {
        let entry = self.entries.of_mut(id);
        entry.ttl = entry.ttl.max(keep.ttl);
        let (had, parent) = (entry.pinned, entry.parent);
        let Some(pin) = keep.pin else { return };
        // Never longer than its parent, which could not be evicted before it.
        let before = parent.map(|parent| self.entries.of(parent).pinned.map(|pinned| pinned.until));
        let until = match before {
            None => Some(pin.until),
            Some(before) => before.map(|before| before.min(pin.until)),
        };
        let until = until.filter(|_| had.is_some() || self.takes_pin(pin.owner));
        let Some(until) = until else {
            self.counts.unpinned += 1;
            return;
        };
        // A tenant's hashes are its own, so only one label pins them.
        let owner = had.map_or(pin.owner, |had| had.owner);
        if had.is_none() {
            *self.pinned_by.entry(owner).or_default() += 1;
            self.counts.pinned += 1;
        }
        let until = had.map_or(until, |had| had.until.max(until));
        self.entries.of_mut(id).pinned = Some(Pinned { owner, until });
    }

    fn takes_pin(&self, owner: u64) -> bool {
        let of_one = self.pinned_by.get(&owner).copied().unwrap_or_default();
        self.counts.pinned < self.config.pinned_max && of_one < self.config.pinned_of_one_max
    }

    /// Ends the pin of a block.
    fn unpin(&mut self, id: EntryId) {
        let Some(pinned) = self.entries.of_mut(id).pinned.take() else { return };
        self.counts.pinned -= 1;
        if let Some(of_one) = self.pinned_by.get_mut(&pinned.owner) {
            *of_one -= 1;
            if *of_one == 0 {
                self.pinned_by.remove(&pinned.owner);
            }
        }
        if self.entries.of(id).line().is_some() {
            self.wait(id);
        }
    }

    /// Ends the pins of idle blocks; returns whether there were any.
    pub(crate) fn waive_pins(&mut self) -> bool {
        let pinned = self.entries.in_line(Line::Pinned);
        pinned.iter().for_each(|id| self.unpin(*id));
        !pinned.is_empty()
    }

    /// The block to evict next.
    pub(crate) fn oldest(&self) -> Option<EntryId> {
        self.entries.first(Line::Evictable)
    }

    /// Evicts a block.
    ///
    /// # Panics
    /// If it is pinned.
    pub(crate) fn evict(&mut self, id: EntryId) {
        assert!(self.entries.of(id).pinned.is_none(), "a pinned block makes room");
        self.counts.evicted += 1;
        self.remove(id);
    }

    fn remove(&mut self, id: EntryId) {
        let (hash, block) = (self.entries.of(id).hash, self.entries.blocks(id)[0]);
        self.entries.remove(id);
        self.by_hash.remove(&hash);
        self.entry_of[block.0 as usize] = None;
        self.changes.push(false, hash);
    }

    /// Ends expired pins and evicts expired blocks; returns these blocks, in rows with one of each group.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Vec<BlockId>> {
        let now = self.at(now);
        if self.counts.pinned > 0 {
            // Idle ones in queue order, so that leaves stay in front.
            let (idle, all) = (self.entries.in_line(Line::Pinned), self.entry_of.iter().flatten().copied());
            let pinned: Vec<EntryId> = idle.into_iter().chain(all).collect();
            for id in pinned {
                if self.entries.of(id).pinned.is_some_and(|pinned| pinned.until <= now) {
                    self.unpin(id);
                }
            }
        }
        let mut over = self.entries.over(now);
        let mut rows = Vec::with_capacity(over.len());
        while let Some(id) = over.pop() {
            // Leaves first: they were kept at most as long. A pinned leaf keeps what it continues.
            let entry = self.entries.of(id);
            if entry.children == 0 && entry.is_over(now) {
                over.extend(entry.parent);
                rows.push(self.entries.blocks(id).to_vec());
                self.counts.expired += 1;
                self.remove(id);
            }
        }
        rows
    }

    /// Moves the idle end of a prefix to the front of the queue: no continuation is expected.
    pub(crate) fn chill(&mut self, hashes: &[PrefixHash]) {
        let chain = self.find(hashes, usize::MAX);
        let mut next = 0;
        let cold = chain.iter().rev().take_while(|id| {
            let entry = self.entries.of(**id);
            let is_end = entry.children == next;
            next = 1;
            is_end && entry.line() == Some(Line::Evictable)
        });
        let cold: Vec<EntryId> = cold.copied().collect();
        cold.into_iter().rev().for_each(|id| self.entries.wait_in_front(id));
    }

    pub(crate) fn counts(&self) -> CacheCounts {
        CacheCounts { blocks: self.entries.len(), evictable: self.evictable(), ..self.counts }
    }

    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Hashes of all cached blocks.
    pub(crate) fn hashes(&self) -> Vec<PrefixHash> {
        self.by_hash.keys().copied().collect()
    }
}
