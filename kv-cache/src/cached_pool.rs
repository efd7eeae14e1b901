//! The state of pool and cache under one lock: every operation that moves a lease's blocks between the two.
//!
//! A *table* is the blocks of one lease, by group, in the order of the tokens they hold. A *row* is its blocks at one index.

use crate::cache::{Change, ChangeCursor, EntryId, Keep, PrefixCache};
use crate::{BlockCounts, BlockPool, BlockState, CacheConfig, CacheCounts, PoolError, PrefixHash};
use baton_types::{BlockId, GroupBlocks};
use std::collections::HashMap;
use std::time::Instant;

/// A request for the blocks of one sequence.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct Reserve<'a> {
    /// Hashes of its prefixes, one per 16 tokens; empty if it does not use the cache.
    pub hashes: &'a [PrefixHash],
    /// Most tokens to take from the cache. One less than the sequence has, because the logits of the last token are needed.
    pub reuse_tokens_max: usize,
    /// Blocks of each group, including those from the cache.
    pub blocks: usize,
    /// Blocks of each group that must stay free for others; waived while no block is referenced.
    pub keep_free: usize,
    pub now: Instant,
}

/// The part of a table to cache.
#[derive(Clone, Copy)]
pub(crate) struct Computed<'a> {
    /// Hashes of its prefixes, one per 16 tokens.
    pub(crate) hashes: &'a [PrefixHash],
    /// Number of leading tokens whose KV is complete.
    pub(crate) tokens: usize,
    pub(crate) keep: Keep,
    pub(crate) now: Instant,
}

/// Result of a reservation.
pub(crate) struct Table {
    pub(crate) blocks: GroupBlocks,
    /// Rows that were cached.
    pub(crate) cached: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct CachedPool {
    pool: BlockPool,
    cache: Option<PrefixCache>,
}

impl CachedPool {
    pub(crate) fn try_new(groups: usize, blocks: u32, cache: Option<CacheConfig>) -> Result<Self, PoolError> {
        let pool = BlockPool::try_new(groups, blocks)?;
        Ok(Self { pool, cache: cache.map(|config| PrefixCache::new(config, groups, blocks)) })
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    fn evictable(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::evictable)
    }

    /// Available blocks of the group that has the fewest: free ones, and idle cached ones.
    pub(crate) fn available(&self) -> usize {
        self.pool.free_min() + self.evictable()
    }

    /// Takes the blocks, or none at all. Evicts cached blocks if too few are free.
    pub(crate) fn allocate(&mut self, per_group: &[usize], after: Option<&GroupBlocks>) -> Option<GroupBlocks> {
        assert_eq!(per_group.len(), self.pool.groups(), "groups of the request");
        let lacking = |pool: &BlockPool| {
            let each = per_group.iter().enumerate().map(|(g, n)| n.saturating_sub(pool.free_of(g)));
            each.max().unwrap_or(0)
        };
        if lacking(&self.pool) > self.evictable() {
            return None;
        }
        while lacking(&self.pool) > 0 {
            let oldest = self.cache.as_ref().and_then(PrefixCache::oldest)?;
            self.evict(oldest);
        }
        self.pool.allocate(per_group, after)
    }

    /// Takes blocks as [`CachedPool::allocate`], if `keep_free` remain.
    pub(crate) fn allocate_keeping(&mut self, per_group: &[usize], keep_free: usize) -> Option<GroupBlocks> {
        let most = per_group.iter().copied().max().unwrap_or(0);
        self.leaves(most, self.available(), keep_free).then(|| self.allocate(per_group, None))?
    }

    fn leaves(&self, wanted: usize, available: usize, keep_free: usize) -> bool {
        self.pool.counts().referenced == 0 || available >= wanted.saturating_add(keep_free)
    }

    pub(crate) fn reserve(&mut self, wanted: Reserve<'_>) -> Option<Table> {
        let found = self.find(wanted.hashes, wanted.reuse_tokens_max, wanted.blocks);
        let fresh = wanted.blocks - found.len();
        // Blocks that it found cached cannot be evicted for it.
        let idle = self.cache.as_ref().map_or(0, |cache| found.iter().filter(|id| cache.is_evictable(**id)).count());
        let available = self.available() - idle;
        if available < fresh || !self.leaves(fresh, available, wanted.keep_free) {
            return None;
        }
        let groups = self.pool.groups();
        let mut blocks = GroupBlocks(vec![Vec::with_capacity(wanted.blocks); groups]);
        if let Some(cache) = &mut self.cache {
            cache.at(wanted.now);
            for id in &found {
                cache.hold(*id);
                for (group, block) in cache.blocks(*id).iter().enumerate() {
                    self.pool.reference(group, *block);
                    blocks.0[group].push(*block);
                }
            }
        }
        let more = self.allocate(&vec![fresh; groups], Some(&blocks)).expect("as many are there");
        blocks.0.iter_mut().zip(more.0).for_each(|(have, more)| have.extend(more));
        Some(Table { blocks, cached: found.len() })
    }

    fn find(&self, hashes: &[PrefixHash], tokens_max: usize, blocks_max: usize) -> Vec<EntryId> {
        let Some(cache) = &self.cache else { return Vec::new() };
        cache.find(hashes, blocks_max.min(tokens_max / cache.block_tokens()))
    }

    /// Tokens of the longest cached prefix, in whole blocks.
    pub(crate) fn cached_tokens(&self, hashes: &[PrefixHash]) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        cache.find(hashes, usize::MAX).len() * cache.block_tokens()
    }

    /// The blocks of the longest cached prefix.
    pub(crate) fn cached_blocks(&self, hashes: &[PrefixHash]) -> GroupBlocks {
        let mut blocks = GroupBlocks(vec![Vec::new(); self.pool.groups()]);
        let Some(cache) = &self.cache else { return blocks };
        for id in cache.find(hashes, usize::MAX) {
            blocks.0.iter_mut().zip(cache.blocks(id)).for_each(|(group, block)| group.push(*block));
        }
        blocks
    }

    /// Returns a table; reports whether more blocks are available than before.
    pub(crate) fn let_go(&mut self, table: &GroupBlocks) -> bool {
        let rows = table.0.iter().map(Vec::len).max().unwrap_or(0);
        // From the last row on, so that leaves are evicted first.
        (0..rows).rev().map(|row| self.let_go_row(table, row)).filter(|last| *last).count() > 0
    }

    fn let_go_row(&mut self, table: &GroupBlocks, row: usize) -> bool {
        let entry = self.entry_of(table, row);
        let mut last = false;
        for (group, blocks) in table.0.iter().enumerate() {
            if let Some(block) = blocks.get(row) {
                last |= self.pool.dereference(group, *block, entry.is_some());
            }
        }
        if let (true, Some(id), Some(cache)) = (last, entry, &mut self.cache) {
            cache.wait(id);
        }
        last
    }

    fn entry_of(&self, table: &GroupBlocks, row: usize) -> Option<EntryId> {
        self.cache.as_ref()?.by_block(*table.0[0].get(row)?)
    }

    /// Caches the whole blocks that hold the computed tokens. A row that is cached already, from another lease, is replaced by the cached
    /// one; the replaced row goes to `spare`, because it may still be read.
    ///
    /// The first `stored` rows are cached and kept already. Returns how many are now, and how many of those had not been stored before.
    pub(crate) fn store(
        &mut self,
        table: &mut GroupBlocks,
        spare: &mut GroupBlocks,
        stored: usize,
        computed: &Computed<'_>,
    ) -> (usize, usize) {
        let Some(cache) = &mut self.cache else { return (0, 0) };
        let Computed { hashes, tokens, keep, now } = *computed;
        cache.at(now);
        let rows = table.0.iter().map(Vec::len).min().unwrap_or(0).min(tokens / cache.block_tokens());
        let mut parent = stored.checked_sub(1).and_then(|row| cache.by_block(table.0[0][row]));
        let (mut done, mut added) = (stored, 0);
        for row in stored..rows {
            let Some(hash) = cache.hash_of(hashes, row) else { break };
            let known = cache.by_block(table.0[0][row]);
            let id = match (known, cache.by_hash(&hash)) {
                (Some(known), there) => {
                    assert!(there == Some(known), "block {row} of a table is cached under another hash");
                    known
                }
                (None, Some(there)) => {
                    cache.hold(there);
                    for (group, &block) in cache.blocks(there).iter().enumerate() {
                        self.pool.reference(group, block);
                        spare.0[group].push(std::mem::replace(&mut table.0[group][row], block));
                    }
                    there
                }
                (None, None) => {
                    added += 1;
                    let blocks = table.0.iter().map(|group| group[row]);
                    cache.add(hash, parent, keep.ttl, blocks)
                }
            };
            cache.keep(id, keep);
            (parent, done) = (Some(id), row + 1);
        }
        (done, added)
    }

    /// Blocks of each group that would be available if these tables were returned.
    pub(crate) fn available_without<'a>(&self, tables: impl Iterator<Item = &'a GroupBlocks>) -> usize {
        let mut held: HashMap<BlockId, u32> = HashMap::new();
        // Rows of all groups move together, so the first group represents them.
        tables.flat_map(|table| &table.0[0]).for_each(|block| *held.entry(*block).or_default() += 1);
        let only = |(block, by): &(&BlockId, &u32)| self.pool.state(0, **block) == BlockState::Referenced { by: **by };
        let pinned = |block: &BlockId| self.cache.as_ref().is_some_and(|cache| cache.is_pinned(*block));
        self.available() + held.iter().filter(only).filter(|(block, _)| !pinned(block)).count()
    }

    /// A second table that shares the first `rows` rows.
    pub(crate) fn share(&mut self, table: &GroupBlocks, rows: usize) -> GroupBlocks {
        let shared = GroupBlocks(table.0.iter().map(|group| group[..rows].to_vec()).collect());
        for (group, blocks) in shared.0.iter().enumerate() {
            blocks.iter().for_each(|block| self.pool.reference(group, *block));
        }
        shared
    }

    /// Quarantines the rows that only this table holds, and returns the others. Returns the quarantined ones.
    pub(crate) fn quarantine(&mut self, table: &GroupBlocks, owner: u64) -> GroupBlocks {
        let mut own = GroupBlocks(vec![Vec::new(); table.0.len()]);
        let rows = table.0.iter().map(Vec::len).max().unwrap_or(0);
        for row in (0..rows).rev() {
            if self.entry_of(table, row).is_some() {
                self.let_go_row(table, row);
                continue;
            }
            for (group, blocks) in table.0.iter().enumerate() {
                if let Some(&block) = blocks.get(row) {
                    self.pool.quarantine(group, block, owner);
                    own.0[group].push(block);
                }
            }
        }
        own
    }

    pub(crate) fn release(&mut self, blocks: &GroupBlocks, owner: u64) {
        self.pool.release(blocks, owner);
    }

    /// Evicts blocks that were idle for too long; returns whether there were any.
    pub(crate) fn expire(&mut self, now: Instant) -> bool {
        let Some(cache) = &mut self.cache else { return false };
        let rows = cache.expire(now);
        rows.iter().for_each(|row| free_row(&mut self.pool, row));
        !rows.is_empty()
    }

    fn evict(&mut self, id: EntryId) {
        let Some(cache) = &mut self.cache else { return };
        let row = cache.blocks(id).to_vec();
        cache.evict(id);
        free_row(&mut self.pool, &row);
    }

    /// Ends the pins of all unused blocks; returns whether there were any.
    pub(crate) fn waive_pins(&mut self) -> bool {
        self.cache.as_mut().is_some_and(PrefixCache::waive_pins)
    }

    /// Evicts everything that may be evicted; returns whether there was anything.
    pub(crate) fn clear(&mut self) -> bool {
        let mut any = false;
        while let Some(oldest) = self.cache.as_ref().and_then(PrefixCache::oldest) {
            self.evict(oldest);
            any = true;
        }
        any
    }

    pub(crate) fn chill(&mut self, hashes: &[PrefixHash]) {
        if let Some(cache) = &mut self.cache {
            cache.chill(hashes);
        }
    }

    pub(crate) fn counts(&self) -> BlockCounts {
        self.pool.counts()
    }

    pub(crate) fn cache_counts(&self) -> CacheCounts {
        self.cache.as_ref().map(PrefixCache::counts).unwrap_or_default()
    }

    pub(crate) fn changes_since(&self, cursor: ChangeCursor, max: usize) -> Option<(Vec<Change>, ChangeCursor)> {
        self.cache.as_ref()?.changes().since(cursor, max)
    }

    /// Hashes of all cached blocks, and the position in the log of changes after them.
    pub(crate) fn snapshot(&self) -> Option<(Vec<PrefixHash>, ChangeCursor)> {
        let cache = self.cache.as_ref()?;
        Some((cache.hashes(), cache.changes().end()))
    }

    /// Number of changes so far, to detect new ones.
    pub(crate) fn changed(&self) -> Option<ChangeCursor> {
        Some(self.cache.as_ref()?.changes().end())
    }
}

fn free_row(pool: &mut BlockPool, row: &[BlockId]) {
    row.iter().enumerate().for_each(|(group, block)| pool.evict(group, *block));
}
