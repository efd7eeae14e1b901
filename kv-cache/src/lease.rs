//! Ownership of blocks by value: dropping a [`Lease`] returns its blocks, dropping a [`Quarantined`] does not.

use crate::cached_pool::Computed;
use crate::{Keep, PrefixHash, SharedPool};
use baton_types::{GroupBlocks, seeded};
use std::fmt;
use std::time::Instant;

/// Blocks of one sequence. Blocks that came from the prefix cache, or were stored in it, are shared and never written again; the rest
/// belong to this lease alone. Dropping it returns all of them.
pub struct Lease {
    pool: SharedPool,
    blocks: GroupBlocks,
    /// Rows that were cached before this lease was made.
    cached: usize,
    /// Rows that are known to be cached: the next store begins after them.
    stored: usize,
    /// Rows that this lease stored and that were not cached before.
    added: usize,
    /// Blocks that were replaced by cached ones; they may still be read.
    spare: GroupBlocks,
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
    pub(crate) fn new(pool: SharedPool, blocks: GroupBlocks, cached: usize) -> Self {
        let spare = GroupBlocks(vec![Vec::new(); blocks.0.len()]);
        Self { pool, blocks, cached, stored: 0, added: 0, spare }
    }

    /// The blocks, in the order of the tokens they hold.
    pub fn blocks(&self) -> &GroupBlocks {
        &self.blocks
    }

    /// Number of leading blocks of each group whose KV was present when the lease was made: cached, or shared with the lease that it is a
    /// fork of.
    pub fn cached_blocks(&self) -> usize {
        self.cached
    }

    /// Number of leading blocks of each group that this lease has stored, with a retention time.
    pub fn kept_blocks(&self) -> usize {
        self.stored
    }

    /// Number of blocks of each group that were not cached before this lease stored them.
    pub fn added_blocks(&self) -> usize {
        self.added
    }

    /// Adds `n` blocks in each group, or none at all (returns `false`).
    pub fn grow(&mut self, n: usize) -> bool {
        let per_group = vec![n; self.blocks.0.len()];
        let Some(more) = self.pool.change(|state| state.allocate(&per_group, Some(&self.blocks))) else { return false };
        self.blocks.0.iter_mut().zip(more.0).for_each(|(have, more)| have.extend(more));
        true
    }

    /// Number of blocks in the group that has the fewest: `block_tokens` times this is the lease's capacity.
    pub fn blocks_min(&self) -> usize {
        self.blocks.0.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Caches the whole blocks among the first `tokens` tokens, whose KV is complete and is never written again, under `hashes` (one per 16
    /// tokens). Where the same blocks were stored before by another lease, this lease switches to those; its own stay readable until
    /// [`Lease::let_go_of_spares`]. A pool without a cache stores nothing. Blocks that this lease stored before are skipped.
    ///
    /// # Panics
    /// If one of the blocks is cached under another hash: the tokens differ from those that it was stored for.
    pub fn store(&mut self, hashes: &[PrefixHash], tokens: usize, keep: Keep, now: Instant) {
        let Self { pool, blocks, spare, stored, .. } = self;
        let computed = Computed { hashes, tokens, keep, now };
        let (stored, added) = pool.change(|state| state.store(blocks, spare, *stored, &computed));
        (self.stored, self.added) = (stored, self.added + added);
    }

    /// Returns the blocks that [`Lease::store`] replaced; they must no longer be read.
    pub fn let_go_of_spares(&mut self) {
        if seeded!(DoubleFree) {
            return self.pool.give_back(&self.spare);
        }
        let groups = self.spare.0.len();
        let spare = std::mem::replace(&mut self.spare, GroupBlocks(vec![Vec::new(); groups]));
        self.pool.give_back(&spare);
    }

    /// A lease for a second sequence that begins with the same `tokens` tokens. It shares the whole blocks among them and gets `fresh`
    /// blocks of its own after those. If the last of the tokens are in a partial block, which both would write, a copy must be made. `None`
    /// if there is no room for the fresh blocks with `keep_free` left.
    ///
    /// # Panics
    /// If the lease does not hold that many tokens, `block_tokens` is not that of the pool's cache, or there is something to copy and no
    /// fresh block.
    pub fn fork(
        &self,
        tokens: usize,
        block_tokens: usize,
        (fresh, keep_free): (usize, usize),
    ) -> Option<(Self, Option<ForkCopy>)> {
        let (mut whole, mut rest) = (tokens / block_tokens, tokens % block_tokens);
        if seeded!(ForkShares) && rest > 0 {
            (whole, rest) = (whole + 1, 0);
        }
        assert!(tokens.div_ceil(block_tokens) <= self.blocks_min(), "{tokens} tokens of {}", self.blocks_min());
        assert!(rest == 0 || fresh > 0, "a block for the last {rest} of {tokens} tokens");
        let (mut blocks, own) = self.pool.change(|state| {
            // All or none, so the fresh blocks come first.
            let own = state.allocate_keeping(&vec![fresh; self.blocks.0.len()], keep_free)?;
            Some((state.share(&self.blocks, whole), own))
        })?;
        let row = |table: &GroupBlocks, row: usize| GroupBlocks(table.0.iter().map(|group| vec![group[row]]).collect());
        let copy = (rest > 0).then(|| ForkCopy { from: row(&self.blocks, whole), to: row(&own, 0), tokens: rest });
        blocks.0.iter_mut().zip(own.0).for_each(|(table, own)| table.extend(own));
        // It has stored nothing: its sequence's retention time may differ from this one's.
        Some((Self::new(self.pool.clone(), blocks, self.cached.min(whole)), copy))
    }

    /// Quarantines the blocks that belong to this lease alone, because `owner` (a label for one peer) may still write them. They count as
    /// quarantined until [`Quarantined::release`]. Cached blocks were never writable by a peer; they are returned.
    ///
    /// # Panics
    /// If the lease was forked and shares blocks that are not cached.
    pub fn quarantine(mut self, owner: u64) -> Quarantined {
        let groups = self.blocks.0.len();
        let blocks = std::mem::replace(&mut self.blocks, GroupBlocks(vec![Vec::new(); groups]));
        let blocks = self.pool.lock().quarantine(&blocks, owner);
        // The margin of `try_lease_keeping` is waived once no block is referenced, so callers that wait for that must retry.
        self.pool.notify_freed();
        Quarantined { pool: self.pool.clone(), blocks, owner }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.give_back(&self.blocks);
        self.pool.give_back(&self.spare);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.blocks).finish()
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
