//! The state of pool and cache under one lock: every operation that moves a lease's blocks between the two.
//!
//! A *row* is the blocks of a lease at one index of its tables.

mod reserve;

use crate::cache::{Change, ChangeCursor, EntryId, Keep, PrefixCache};
use crate::{
    BlockCounts, BlockPool, BlockState, CacheConfig, CacheCounts, PoolError, PoolGroup, PoolShape, PrefixHash,
    StateBefore,
};
use baton_types::{BlockId, BlockTable, BlockTables, GroupBlocks};
pub use reserve::{Fill, Reserve};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// The part of a table to cache.
#[derive(Clone, Copy)]
pub(crate) struct Computed<'a> {
    /// Hashes of its prefixes, one per 16 tokens.
    pub(crate) hashes: &'a [PrefixHash],
    /// Number of leading tokens whose KV is complete.
    pub(crate) tokens: usize,
    pub(crate) keep: Keep,
    pub(crate) now: Instant,
    /// Index of the first whole block, by group.
    pub(crate) whole: &'a [usize],
    /// Whether the state may be cached, by group; of no meaning where there are none.
    pub(crate) checkpoints: &'a [bool],
}

/// Result of a reservation.
pub(crate) struct Table {
    pub(crate) tables: BlockTables,
    /// Rows that were cached.
    pub(crate) cached: usize,
    /// Rows that were cached, if states are not counted.
    pub(crate) known: usize,
    /// Index of the first block that may be stored, by group.
    pub(crate) whole: Vec<usize>,
    /// Blocks for the next states.
    pub(crate) next: GroupBlocks,
}

#[derive(Clone, Debug)]
pub(crate) struct CachedPool {
    shape: PoolShape,
    pool: BlockPool,
    cache: Option<PrefixCache>,
}

impl CachedPool {
    pub(crate) fn try_new(shape: PoolShape, cache: Option<CacheConfig>) -> Result<Self, PoolError> {
        let blocks: Vec<u32> = shape.groups.iter().map(|group| group.blocks).collect();
        let pool = BlockPool::try_new(&blocks)?;
        // States alone do not say which prefixes there are.
        let cache = cache.filter(|_| !shape.main().is_empty()).map(|config| PrefixCache::new(config, &shape));
        Ok(Self { shape, pool, cache })
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    fn evictable_of(&self, group: usize) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.evictable_of(group))
    }

    /// Available blocks of each group: free ones, and idle cached ones.
    pub(crate) fn available(&self) -> Vec<usize> {
        (0..self.pool.groups()).map(|group| self.pool.free_of(group) + self.evictable_of(group)).collect()
    }

    /// Takes the blocks, or none at all. Evicts cached blocks if too few are free. They follow the last ones of the tables to grow, if there
    /// are free ones.
    pub(crate) fn allocate(&mut self, per_group: &[usize], after: Option<&[Option<BlockId>]>) -> Option<GroupBlocks> {
        assert_eq!(per_group.len(), self.pool.groups(), "groups of the request");
        let available = self.available();
        if per_group.iter().zip(available).any(|(wanted, available)| *wanted > available) {
            return None;
        }
        for (group, wanted) in per_group.iter().enumerate() {
            while self.pool.free_of(group) < *wanted {
                self.evict_of(group)?;
            }
        }
        self.pool.allocate(per_group, after)
    }

    /// Evicts a block of a group, the oldest.
    fn evict_of(&mut self, group: usize) -> Option<()> {
        let cache = self.cache.as_mut()?;
        if cache.is_main(group) {
            let oldest = cache.oldest()?;
            self.evict(oldest);
            return Some(());
        }
        let oldest = cache.oldest_of(group)?;
        let block = cache.evict_side(group, oldest)?;
        self.pool.evict(group, block);
        // Without this block, no hit may end here any more.
        let mut next = Some(oldest);
        while let Some(id) = next.and_then(|id| self.cache.as_ref()?.useless(id)) {
            next = self.cache.as_ref().and_then(|cache| cache.parent(id));
            self.evict(id);
        }
        Some(())
    }

    /// Takes blocks as [`CachedPool::allocate`], if `keep_free` remain.
    pub(crate) fn allocate_keeping(&mut self, per_group: &[usize], keep_free: &[usize]) -> Option<GroupBlocks> {
        self.leaves(per_group, &self.available(), keep_free).then(|| self.allocate(per_group, None))?
    }

    fn leaves(&self, wanted: &[usize], available: &[usize], keep_free: &[usize]) -> bool {
        let keep_free = keep_free.iter().copied().chain(std::iter::repeat(0));
        let mut groups = wanted.iter().zip(available).zip(keep_free);
        let leaves = groups.all(|((wanted, available), kept)| *available >= wanted.saturating_add(kept));
        leaves || self.pool.counts().referenced == 0
    }

    /// Returns tables; reports whether more blocks are available than before.
    pub(crate) fn let_go(&mut self, tables: &BlockTables) -> bool {
        // From the last row on, so that leaves are evicted first.
        rows_of(tables).rev().map(|row| self.let_go_row(tables, row, None)).filter(|last| *last).count() > 0
    }

    /// Returns blocks that are not cached; reports whether more are available than before.
    pub(crate) fn let_go_uncached(&mut self, blocks: &GroupBlocks) -> bool {
        let mut last = false;
        for (group, blocks) in blocks.0.iter().enumerate() {
            for block in blocks {
                last |= self.pool.dereference(group, *block, false);
            }
        }
        last
    }

    /// Returns one row; blocks that are not cached are quarantined, where an owner is given.
    fn let_go_row(&mut self, tables: &BlockTables, row: usize, mut barred: Option<(u64, &mut GroupBlocks)>) -> bool {
        let (mut last, mut idle) = (false, None);
        for (group, table) in tables.0.iter().enumerate() {
            let Some(block) = table.get(row) else { continue };
            let entry = self.entry_of(group, block);
            match (&mut barred, entry) {
                (Some((owner, own)), None) => {
                    self.pool.quarantine(group, block, *owner);
                    own.0[group].push(block);
                    continue;
                }
                _ if !self.pool.dereference(group, block, entry.is_some()) => continue,
                _ => last = true,
            }
            match (&mut self.cache, entry) {
                (Some(cache), Some(id)) if cache.is_main(group) => idle = Some(id),
                (Some(cache), Some(id)) => cache.wait_side(group, id),
                _ => {}
            }
        }
        if let (Some(id), Some(cache)) = (idle, &mut self.cache) {
            cache.wait(id);
        }
        last
    }

    /// Returns the blocks of a group before an index: no later position of the sequence needs them.
    pub(crate) fn retire(&mut self, tables: &mut BlockTables, group: usize, first: usize) {
        let table = &mut tables.0[group];
        let count = first.saturating_sub(table.first).min(table.blocks.len());
        let retired: Vec<BlockId> = table.blocks.drain(..count).collect();
        table.first += count;
        for block in retired {
            let entry = self.entry_of(group, block);
            let last = self.pool.dereference(group, block, entry.is_some());
            if let (true, Some(id), Some(cache)) = (last, entry, &mut self.cache) {
                cache.retire(group, id);
            }
        }
    }

    /// Blocks of each group to add for these positions. Without a block for the next state, one that nobody else may use is written in place.
    pub(crate) fn missing(
        &self,
        tables: &BlockTables,
        next: &GroupBlocks,
        positions: &Range<usize>,
        state: StateBefore,
    ) -> Vec<usize> {
        let PoolShape { block_tokens, groups } = &self.shape;
        let of = |(group, shape): (usize, &PoolGroup)| {
            let table = &tables.0[group];
            if shape.kind.is_by_position() {
                return shape.kind.live(positions.clone(), *block_tokens).end.saturating_sub(table.end());
            }
            let has = table.blocks.len() > 1 || !next.0[group].is_empty();
            let must = || {
                state == StateBefore::Kept || table.blocks.iter().any(|block| self.entry_of(group, *block).is_some())
            };
            usize::from(!has && state.needs_another(shape.kind, positions, *block_tokens) && must())
        };
        groups.iter().enumerate().map(of).collect()
    }

    /// A sequence went on from a state. If that is no checkpoint, its block is for the next one. One that a later checkpoint takes the place
    /// of is the first to make room.
    pub(crate) fn settle(&mut self, group: usize, block: BlockId, is_replaceable: bool, next: &mut Vec<BlockId>) {
        let Some(entry) = self.entry_of(group, block) else { return next.push(block) };
        let last = self.pool.dereference(group, block, true);
        if let (true, Some(cache)) = (last, &mut self.cache) {
            cache.retire_state(group, entry, is_replaceable);
        }
        if next.is_empty() {
            let mut one = vec![0; self.pool.groups()];
            one[group] = 1;
            next.extend(self.allocate(&one, None).into_iter().flat_map(|mut blocks| blocks.0.swap_remove(group)));
        }
    }

    fn entry_of(&self, group: usize, block: BlockId) -> Option<EntryId> {
        self.cache.as_ref()?.by_block(group, block)
    }

    /// Caches the whole blocks that hold the computed tokens. A row that is cached already, from another lease, is replaced by the cached
    /// one; the replaced blocks go to `spare`, because they may still be read. A cached row that lacks a block gets it.
    ///
    /// The first `stored` rows are cached and kept already. Returns how many are now, and how many of those had not been stored before.
    pub(crate) fn store(
        &mut self,
        tables: &mut BlockTables,
        spare: &mut GroupBlocks,
        stored: usize,
        computed: &Computed<'_>,
    ) -> (usize, usize) {
        let Some(cache) = &mut self.cache else { return (0, 0) };
        let Computed { hashes, tokens, keep, now, whole, checkpoints } = *computed;
        cache.at(now);
        let rows = tables.0.iter().map(BlockTable::end).min().unwrap_or(0).min(tokens / cache.block_tokens());
        let main = cache.first_main();
        let entry_of = |cache: &PrefixCache, tables: &BlockTables, row: usize| {
            tables.0[main].get(row).and_then(|block| cache.by_block(main, block))
        };
        // With windows alone, rows before the table have left it: they are not needed.
        let start = stored.max(tables.0[main].first).max(whole[main]);
        let mut parent = start.checked_sub(1).and_then(|row| entry_of(cache, tables, row));
        let (mut done, mut added) = (stored, 0);
        let stores =
            checkpoints.iter().enumerate().map(|(group, is_checkpoint)| !cache.is_state(group) || *is_checkpoint);
        let stores: Vec<bool> = stores.collect();
        for row in start..rows {
            let Some(hash) = cache.hash_of(hashes, row) else { break };
            let known = entry_of(cache, tables, row);
            let there = cache.by_hash(&hash);
            assert!(known.is_none() || known == there, "block {row} of a table is cached under another hash");
            let id = match there {
                Some(there) => {
                    self.pool.join(cache, (there, row), tables, spare, computed);
                    there
                }
                None => {
                    added += 1;
                    let blocks = tables.0.iter().zip(whole).zip(&stores);
                    let blocks =
                        blocks.map(|((table, whole), stores)| table.get(row).filter(|_| row >= *whole && *stores));
                    cache.add(hash, parent.filter(|_| cache.is_tree()), keep.ttl, blocks)
                }
            };
            cache.keep(id, keep);
            (parent, done) = (Some(id), row + 1);
        }
        (done, added)
    }

    /// Blocks of each group that would be available if these were returned.
    pub(crate) fn available_without(&self, blocks: impl Iterator<Item = (usize, BlockId)>) -> Vec<usize> {
        let mut held: Vec<HashMap<BlockId, u32>> = vec![HashMap::new(); self.pool.groups()];
        blocks.for_each(|(group, block)| *held[group].entry(block).or_default() += 1);
        let mut available = self.available();
        for (group, held) in held.iter().enumerate() {
            let is_last = |block: BlockId, by: u32| self.pool.state(group, block) == BlockState::Referenced { by };
            let pinned = |block: BlockId| self.cache.as_ref().is_some_and(|cache| cache.is_pinned(group, block));
            available[group] += held.iter().filter(|(block, by)| is_last(**block, **by) && !pinned(**block)).count();
        }
        available
    }

    /// Second tables that share these rows of each group.
    pub(crate) fn share(&mut self, tables: &BlockTables, rows: &[Range<usize>]) -> BlockTables {
        let shared = tables.0.iter().zip(rows).enumerate().map(|(group, (table, rows))| {
            let blocks: Vec<BlockId> = rows.clone().filter_map(|row| table.get(row)).collect();
            blocks.iter().for_each(|block| self.pool.reference(group, *block));
            BlockTable { first: rows.start, blocks }
        });
        BlockTables(shared.collect())
    }

    /// Quarantines the blocks that only these tables hold, and returns the others. Returns the quarantined ones.
    pub(crate) fn quarantine(&mut self, tables: &BlockTables, owner: u64) -> GroupBlocks {
        let mut own = GroupBlocks(vec![Vec::new(); tables.0.len()]);
        for row in rows_of(tables).rev() {
            self.let_go_row(tables, row, Some((owner, &mut own)));
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
        let row = cache.evict(id);
        free_row(&mut self.pool, &row);
    }

    /// Ends the pins of all unused blocks; returns whether there were any.
    pub(crate) fn waive_pins(&mut self) -> bool {
        self.cache.as_mut().is_some_and(PrefixCache::waive_pins)
    }

    /// Evicts everything that may be evicted; returns whether there was anything.
    pub(crate) fn clear(&mut self) -> bool {
        let groups = 0..self.pool.groups();
        groups.map(|group| std::iter::from_fn(|| self.evict_of(group)).count()).sum::<usize>() > 0
    }

    pub(crate) fn demote(&mut self, hashes: &[PrefixHash]) {
        if let Some(cache) = &mut self.cache {
            cache.demote(hashes);
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

#[cfg(test)]
impl CachedPool {
    /// The blocks of every entry.
    pub(crate) fn entries(&self) -> Vec<(PrefixHash, Vec<Option<BlockId>>)> {
        let Some(cache) = &self.cache else { return Vec::new() };
        let row = |hash: &PrefixHash| cache.by_hash(hash).map(|id| cache.blocks(id).to_vec());
        cache.hashes().into_iter().filter_map(|hash| Some((hash, row(&hash)?))).collect()
    }
}

/// Indices that any of the tables has.
fn rows_of(tables: &BlockTables) -> Range<usize> {
    let first = tables.0.iter().map(|table| table.first).min().unwrap_or(0);
    first..tables.0.iter().map(BlockTable::end).max().unwrap_or(0)
}

fn free_row(pool: &mut BlockPool, row: &[Option<BlockId>]) {
    let blocks = row.iter().enumerate().filter_map(|(group, block)| Some((group, (*block)?)));
    blocks.for_each(|(group, block)| pool.evict(group, block));
}

impl BlockPool {
    /// A lease whose row has the same contents as a cached one goes on with the cached blocks, and gives the entry those that it lacks.
    fn join(
        &mut self,
        cache: &mut PrefixCache,
        (id, row): (EntryId, usize),
        tables: &mut BlockTables,
        spare: &mut GroupBlocks,
        computed: &Computed<'_>,
    ) {
        for (group, table) in tables.0.iter_mut().enumerate() {
            let Some(own) = table.get(row) else { continue };
            match cache.blocks(id)[group] {
                Some(cached) if cached == own => {}
                // It goes on with its own, which it may write.
                Some(_) if cache.is_state(group) => {}
                Some(cached) => {
                    cache.hold(group, id);
                    self.reference(group, cached);
                    let place = row - table.first;
                    spare.0[group].push(std::mem::replace(&mut table.blocks[place], cached));
                }
                None if row < computed.whole[group] => {}
                None if cache.is_state(group) && !computed.checkpoints[group] => {}
                None => cache.complete(id, group, own),
            }
        }
    }
}
