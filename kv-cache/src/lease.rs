//! Ownership of blocks by value: dropping a [`Lease`] returns its blocks, dropping a [`Quarantined`] does not.

use crate::cached_pool::{Computed, Table};
use crate::{Keep, PoolGroup, PoolShape, PrefixHash, SharedPool};
use baton_types::{BlockId, BlockTable, BlockTables, GroupBlocks, GroupKind, seeded};
use std::fmt;
use std::ops::Range;
use std::time::Instant;

/// Blocks of one sequence. Blocks that came from the prefix cache, or were stored in it, are shared and never written again; the rest
/// belong to this lease alone. Dropping it returns all of them.
pub struct Lease {
    pool: SharedPool,
    tables: BlockTables,
    /// Rows that were cached before this lease was made.
    cached: usize,
    /// Rows that were cached before this lease was made, if states are not counted.
    known: usize,
    /// Rows that are known to be cached: the next store begins after them.
    stored: usize,
    /// Rows that this lease stored and that were not cached before.
    added: usize,
    /// Blocks that were replaced by cached ones; they may still be read.
    spare: GroupBlocks,
    /// Index of the first block that is filled whole, by group.
    whole: Vec<usize>,
    /// Blocks for the states behind the next steps. Mostly one in each group of states, so that a sequence never waits for it.
    next: GroupBlocks,
    /// The state before the last held positions is kept beside the one behind them, so that they can be undone.
    is_undoable: bool,
}

/// What happens to the state before the positions that a sequence computes next. Nothing of it matters in groups without states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateBefore {
    /// It is changed in place, unless it is behind whole blocks, where it may be cached.
    Replaced,
    /// It stays until [`Lease::settle`], so that [`Lease::undo`] can go back to it.
    Kept,
}

impl StateBefore {
    /// Whether the state behind these positions takes another block than the one before.
    pub(crate) fn needs_another(self, kind: GroupKind, positions: &Range<usize>, block_tokens: usize) -> bool {
        let is_kept = self == Self::Kept && positions.start > 0;
        is_kept || kind.live(positions.clone(), block_tokens).len() > 1
    }
}

/// A copy that a forked sequence needs before it continues: of the block that both sequences would write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForkCopy {
    /// Source of the KV, one block of each group.
    pub from: GroupBlocks,
    /// Destination: blocks of the new lease.
    pub to: GroupBlocks,
    /// Number of its tokens to copy.
    pub tokens: usize,
}

impl Lease {
    pub(crate) fn new(pool: SharedPool, table: Table) -> Self {
        let Table { tables, cached, known, whole, next } = table;
        let spare = GroupBlocks(vec![Vec::new(); tables.0.len()]);
        Self { pool, tables, cached, known, stored: 0, added: 0, spare, whole, next, is_undoable: false }
    }

    /// The blocks, in the order of the tokens they hold.
    pub fn tables(&self) -> &BlockTables {
        &self.tables
    }

    /// The ids of its blocks.
    pub fn blocks(&self) -> GroupBlocks {
        self.tables.ids()
    }

    /// All blocks that would be returned with it, but for those that [`Lease::store`] replaced.
    pub(crate) fn held(&self) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        let tables = self.tables.0.iter().map(|table| &table.blocks);
        let groups = tables.zip(&self.next.0).enumerate();
        groups.flat_map(|(group, (table, next))| table.iter().chain(next).map(move |block| (group, *block)))
    }

    /// Number of leading blocks whose KV was present when the lease was made: cached, or shared with the lease that it is a fork of. Of a
    /// group with a window, it holds only the last of them.
    pub fn cached_blocks(&self) -> usize {
        self.cached
    }

    /// Number of leading blocks whose KV was cached when the lease was made, states aside: where this is more than
    /// [`Lease::cached_blocks`], other sequences went on from there in another way, and a state there would have been of use.
    pub fn known_blocks(&self) -> usize {
        self.known
    }

    /// Number of leading blocks that this lease has stored, with a retention time.
    pub fn kept_blocks(&self) -> usize {
        self.stored
    }

    /// Number of blocks of each group that were not cached before this lease stored them.
    pub fn added_blocks(&self) -> usize {
        self.added
    }

    /// Holds what is needed to compute these positions, none before which is computed later: first returns blocks that left their windows,
    /// then adds blocks in each group, or none at all (returns `false`). No launched step may still use the returned ones.
    ///
    /// The positions begin behind those that were [settled](Lease::settle) last.
    pub fn hold(&mut self, positions: Range<usize>, state: StateBefore) -> bool {
        let Self { pool, tables, next, .. } = self;
        let PoolShape { block_tokens, groups } = pool.shape();
        let held = pool.exchange(|pool| {
            for (group, shape) in groups.iter().enumerate().filter(|(_, shape)| shape.kind.is_by_position()) {
                pool.retire(tables, group, shape.kind.live(positions.clone(), *block_tokens).start);
            }
            let missing = pool.missing(tables, next, &positions, state);
            if missing.iter().any(|n| *n > 0) {
                let ends: Vec<_> = tables.0.iter().map(|table| table.blocks.last().copied()).collect();
                let Some(more) = pool.allocate(&missing, Some(&ends)) else { return false };
                tables.0.iter_mut().zip(more.0).for_each(|(table, more)| table.blocks.extend(more));
            }
            for (group, shape) in groups.iter().enumerate().filter(|(_, shape)| !shape.kind.is_by_position()) {
                let table = &mut tables.0[group].blocks;
                if table.len() == 1 && state.needs_another(shape.kind, &positions, *block_tokens) {
                    table.extend(next.0[group].pop());
                }
            }
            true
        });
        self.is_undoable |= held && state == StateBefore::Kept;
        held
    }

    /// A step is done: the first `tokens` tokens are computed. A state before it, where it has one, leaves the table. If it is cached, it stays so:
    /// behind more than `keep_to` positions, where the next checkpoint of the same sequence takes its place, it is the first to make room.
    pub fn settle(&mut self, tokens: usize, keep_to: usize) {
        let Self { pool, tables, next, is_undoable, .. } = self;
        let PoolShape { block_tokens, groups } = pool.shape();
        let is_undoable = std::mem::take(is_undoable);
        for (group, _) in groups.iter().enumerate().filter(|(_, shape)| !shape.kind.is_by_position()) {
            let table = &mut tables.0[group];
            let before = table.first;
            // A step that runs already may have the next block.
            if !is_undoable && before == tokens.saturating_sub(1) / block_tokens {
                continue;
            }
            let is_replaceable = (before + 1) * block_tokens > keep_to;
            if let Some(block) = table.settle(tokens, *block_tokens) {
                pool.exchange(|pool| pool.settle(group, block, is_replaceable, &mut next.0[group]));
            }
        }
    }

    /// What was held with [`StateBefore::Kept`] counts for nothing: the state is the one before again.
    pub fn undo(&mut self) {
        if !std::mem::take(&mut self.is_undoable) {
            return;
        }
        let kinds = self.pool.shape().groups.iter().map(|group| group.kind);
        for ((kind, table), next) in kinds.zip(&mut self.tables.0).zip(&mut self.next.0) {
            if !kind.is_by_position() {
                next.extend(table.blocks.split_off(1.min(table.blocks.len())));
            }
        }
    }

    /// The tables as they are once `tokens` tokens are computed: a state is where the step that was held last writes it.
    pub fn tables_behind(&self, tokens: usize) -> BlockTables {
        let PoolShape { block_tokens, groups } = self.pool.shape();
        let behind = |(group, table): (&PoolGroup, &BlockTable)| match group.kind.is_by_position() {
            true => table.clone(),
            false => BlockTable {
                first: tokens.saturating_sub(1) / block_tokens,
                blocks: table.blocks.last().copied().into_iter().collect(),
            },
        };
        BlockTables(groups.iter().zip(&self.tables.0).map(behind).collect())
    }

    /// Whether a state beside the running one is held: that before the positions of a step.
    pub fn holds_state_before(&self) -> bool {
        let mut groups = self.pool.shape().groups.iter().zip(&self.tables.0);
        groups.any(|(group, table)| !group.kind.is_by_position() && table.blocks.len() > 1)
    }

    /// Returns the blocks behind those of the first `tokens` tokens. None of them may be cached: their KV was never complete.
    pub fn give_back_after(&mut self, tokens: usize) {
        let Self { pool, tables, .. } = self;
        let PoolShape { block_tokens, groups } = pool.shape();
        let end = tokens.div_ceil(*block_tokens);
        let groups = groups.iter().zip(&mut tables.0);
        let ahead = groups.map(|(group, table)| match group.kind.is_by_position() {
            true => table.blocks.split_off(end.saturating_sub(table.first).min(table.blocks.len())),
            false => Vec::new(),
        });
        let ahead = GroupBlocks(ahead.collect());
        pool.give_back_uncached(&ahead);
    }

    /// Blocks of each group that [`Lease::hold`] would take from the pool for these positions.
    pub fn missing(&self, positions: Range<usize>, state: StateBefore) -> Vec<usize> {
        self.pool.lock().missing(&self.tables, &self.next, &positions, state)
    }

    /// Index after the last block, in the group that ends first: `block_tokens` times this is the lease's capacity.
    pub fn blocks_end(&self) -> usize {
        let shape = self.pool.shape();
        let groups = shape.groups.iter().zip(&self.tables.0).filter(|(group, _)| group.kind.is_by_position());
        groups.map(|(_, table)| table.end()).min().unwrap_or(0)
    }

    /// Caches the whole blocks among the first `tokens` tokens, whose KV is complete and is never written again, under `hashes` (one per 16
    /// tokens). Where the same blocks were stored before by another lease, this lease switches to those; its own stay readable until
    /// [`Lease::let_go_of_spares`]. A pool without a cache stores nothing. Blocks that this lease stored before are skipped.
    ///
    /// A state is a checkpoint if it is behind whole blocks, and the lease has a block for the next one.
    ///
    /// # Panics
    /// If one of the blocks is cached under another hash: the tokens differ from those that it was stored for.
    pub fn store(&mut self, hashes: &[PrefixHash], tokens: usize, keep: Keep, now: Instant) {
        let Self { pool, tables, spare, stored, whole, next, .. } = self;
        // A step that is launched already may have taken the block for the next state.
        let goes_on = next.0.iter().zip(&tables.0).map(|(next, table)| !next.is_empty() || table.blocks.len() > 1);
        let checkpoints: Vec<bool> = goes_on.collect();
        let computed = Computed { hashes, tokens, keep, now, whole, checkpoints: &checkpoints };
        let (stored, added) = pool.change(|state| state.store(tables, spare, *stored, &computed));
        (self.stored, self.added) = (stored, self.added + added);
    }

    /// Returns the blocks that [`Lease::store`] replaced; they must no longer be read.
    pub fn let_go_of_spares(&mut self) {
        if seeded!(DoubleFree) {
            return self.pool.give_back_uncached(&self.spare);
        }
        let groups = self.spare.0.len();
        let spare = std::mem::replace(&mut self.spare, GroupBlocks(vec![Vec::new(); groups]));
        self.pool.give_back_uncached(&spare);
    }

    /// A lease for a second sequence of `len` tokens that begins with the same `tokens` tokens. It shares the whole blocks among them and
    /// gets fresh blocks of its own after those. If the last of the tokens are in a partial block, which both would write, a copy must be
    /// made. `None` if there is no room for the fresh blocks with `keep_free` left, or this lease no longer holds what position `tokens`
    /// needs: blocks that left the window. States are not forked either: a lease has that of its last position, and the forked sequence
    /// needs an earlier one.
    ///
    /// # Panics
    /// If the lease never held that many tokens, or there is something to copy and no fresh block.
    pub fn fork(&self, tokens: usize, len: usize, keep_free: &[usize]) -> Option<(Self, Option<ForkCopy>)> {
        let shape = self.pool.shape();
        let size = shape.block_tokens;
        let (mut whole, mut rest) = (tokens / size, tokens % size);
        if seeded!(ForkShares) && rest > 0 {
            (whole, rest) = (whole + 1, 0);
        }
        assert!(tokens.div_ceil(size) <= self.blocks_end(), "{tokens} tokens of {}", self.blocks_end());
        let fresh = len.div_ceil(size).saturating_sub(whole);
        assert!(rest == 0 || fresh > 0, "a block for the last {rest} of {tokens} tokens");
        let kinds = shape.groups.iter().map(|group| group.kind);
        let rows: Vec<_> = kinds.clone().map(|kind| kind.first_for(tokens, size).min(whole)..whole).collect();
        let needed = rows.iter().map(|rows| rows.start..rows.end + usize::from(rest > 0));
        let holds = self.tables.0.iter().zip(needed).all(|(table, needed)| table.covers(&needed));
        if !holds || kinds.into_iter().any(|kind| !kind.is_by_position()) {
            return None;
        }
        let (mut tables, own) = self.pool.change(|state| {
            // All or none, so the fresh blocks come first.
            let own = state.allocate_keeping(&vec![fresh; rows.len()], keep_free)?;
            Some((state.share(&self.tables, &rows), own))
        })?;
        let copy = (rest > 0).then(|| {
            let from = self.tables.0.iter().map(|table| table.get(whole).into_iter().collect()).collect();
            let to = own.0.iter().map(|own| own[..1].to_vec()).collect();
            ForkCopy { from: GroupBlocks(from), to: GroupBlocks(to), tokens: rest }
        });
        tables.0.iter_mut().zip(own.0).for_each(|(table, own)| table.blocks.extend(own));
        // It has stored nothing: its sequence's retention time may differ from this one's.
        let cached = self.cached.min(whole);
        let next = GroupBlocks(vec![Vec::new(); rows.len()]);
        let table = Table { tables, cached, known: cached, whole: self.whole.clone(), next };
        Some((Self::new(self.pool.clone(), table), copy))
    }

    /// Quarantines the blocks that belong to this lease alone, because `owner` (a label for one peer) may still write them. They count as
    /// quarantined until [`Quarantined::release`]. Cached blocks were never writable by a peer; they are returned.
    ///
    /// # Panics
    /// If the lease was forked and shares blocks that are not cached.
    pub fn quarantine(mut self, owner: u64) -> Quarantined {
        let tables = std::mem::take(&mut self.tables);
        let blocks = self.pool.lock().quarantine(&tables, owner);
        self.pool.give_back_uncached(&std::mem::take(&mut self.next));
        // The margin that is kept free is waived once no block is referenced, so callers that wait for that must retry.
        self.pool.notify_freed();
        Quarantined { pool: self.pool.clone(), blocks, owner }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.give_back(&self.tables);
        self.pool.give_back_uncached(&self.next);
        self.pool.give_back_uncached(&self.spare);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.tables).finish()
    }
}

/// Blocks that a peer may still write. Dropping this value leaves them quarantined permanently, which is safe. Only
/// [`Quarantined::release`] frees them, and its caller must know that the peer is fenced.
#[must_use = "dropping it leaves the blocks quarantined for ever"]
pub struct Quarantined {
    pool: SharedPool,
    blocks: GroupBlocks,
    owner: u64,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl Quarantined {
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
