//! The state of every block in one pool, by group.

mod runs;

use baton_types::{BlockId, GroupBlocks};
use runs::FreeRuns;

/// The holder of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// No holder; it may be allocated.
    Free,
    /// One or more leases. The prefix cache may hold it too.
    Referenced {
        /// Number of leases that hold it.
        by: u32,
    },
    /// Only the prefix cache; it may be evicted.
    Cached,
    /// A peer that may still write it. `owner` is the label under which it is counted.
    Quarantined {
        /// The peer that may still write.
        owner: u64,
    },
}

impl BlockState {
    const OWNED: Self = Self::Referenced { by: 1 };
}

/// Blocks by state, summed over the groups. `total` is the sum of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// All blocks of the pool.
    pub total: usize,
    /// Blocks that may be allocated.
    pub free: usize,
    /// Blocks held by leases, each counted once.
    pub referenced: usize,
    /// Blocks held only by the prefix cache.
    pub cached: usize,
    /// Blocks set aside until a peer can no longer write them.
    pub quarantined: usize,
}

/// The parameters of a pool are invalid.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a pool needs 1 to {} groups with at least 1 block each, got {groups} groups, the smallest of {blocks} blocks",
    BlockPool::GROUPS_MAX
)]
pub struct PoolError {
    pub groups: usize,
    /// Fewest blocks requested in one.
    pub blocks: u32,
}

/// The states of all blocks, by group. Every transition is checked: a block in another state than the caller assumes is a defect that
/// would corrupt a sequence's KV, so it panics.
#[derive(Clone, Debug)]
pub struct BlockPool {
    groups: Vec<Group>,
}

#[derive(Clone, Debug)]
struct Group {
    states: Vec<BlockState>,
    free: FreeRuns,
    counts: BlockCounts,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl BlockPool {
    /// Most groups of a layout, as in `types`.
    pub const GROUPS_MAX: usize = 8;

    /// A pool with all blocks free: `blocks[g]` in group `g`.
    pub fn try_new(blocks: &[u32]) -> Result<Self, PoolError> {
        let (groups, fewest) = (blocks.len(), blocks.iter().copied().min().unwrap_or(0));
        if groups == 0 || groups > Self::GROUPS_MAX || fewest == 0 {
            return Err(PoolError { groups, blocks: fewest });
        }
        let group = |&blocks: &u32| {
            let count = BlockCounts { total: blocks as usize, free: blocks as usize, ..BlockCounts::default() };
            Group { states: vec![BlockState::Free; blocks as usize], free: FreeRuns::new(blocks), counts: count }
        };
        Ok(Self { groups: blocks.iter().map(group).collect() })
    }

    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Blocks by state, over all groups.
    pub fn counts(&self) -> BlockCounts {
        self.groups.iter().fold(BlockCounts::default(), |sum, group| sum + group.counts)
    }

    /// Blocks of one group by state.
    pub fn counts_of(&self, group: usize) -> BlockCounts {
        self.groups[group].counts
    }

    /// Free blocks of one group.
    pub(crate) fn free_of(&self, group: usize) -> usize {
        self.groups[group].free.count()
    }

    /// Blocks quarantined under `owner`, over all groups.
    pub fn quarantined_by(&self, owner: u64) -> usize {
        let held = |s: &&BlockState| **s == BlockState::Quarantined { owner };
        self.groups.iter().map(|g| g.states.iter().filter(held).count()).sum()
    }

    /// State of one block.
    ///
    /// # Panics
    /// If the index is out of range.
    pub fn state(&self, group: usize, block: BlockId) -> BlockState {
        self.groups[group].states[block.0 as usize]
    }

    /// Takes `per_group[g]` free blocks of each group, or none at all. Blocks come in ascending contiguous runs where possible, starting
    /// after the block of `after` (the last ones of the tables to grow).
    ///
    /// # Panics
    /// If `per_group` or `after` have another number of groups than the pool.
    pub fn allocate(&mut self, per_group: &[usize], after: Option<&[Option<BlockId>]>) -> Option<GroupBlocks> {
        assert_eq!(per_group.len(), self.groups.len(), "groups of the request");
        assert!(after.is_none_or(|a| a.len() == self.groups.len()), "groups of the tables to grow");
        if self.groups.iter().zip(per_group).any(|(group, &n)| group.free.count() < n) {
            return None;
        }
        let mut blocks = Vec::with_capacity(self.groups.len());
        for (g, (group, &n)) in self.groups.iter_mut().zip(per_group).enumerate() {
            let next = after.and_then(|a| a[g]).map(|b| b.0 + 1);
            blocks.push(group.free.take(n, next));
        }
        let blocks = GroupBlocks(blocks);
        self.shift_all(&blocks, BlockState::Free, BlockState::OWNED);
        Some(blocks)
    }

    /// Adds a lease to a block that leases or the cache hold already.
    ///
    /// # Panics
    /// If the block is free or quarantined.
    pub fn reference(&mut self, group: usize, block: BlockId) {
        let to = match self.state(group, block) {
            BlockState::Referenced { by } => BlockState::Referenced { by: by + 1 },
            BlockState::Cached => BlockState::OWNED,
            state => panic!("block {block} is {state:?}, and has nothing to be shared"),
        };
        self.shift(group, block, to);
    }

    /// Removes a lease from a block. If it was the last, the block becomes the cache's or free. Returns whether it was the last.
    ///
    /// # Panics
    /// If no lease holds it.
    pub fn dereference(&mut self, group: usize, block: BlockId, is_cached: bool) -> bool {
        let to = match self.state(group, block) {
            BlockState::Referenced { by: 1 } if is_cached => BlockState::Cached,
            BlockState::Referenced { by: 1 } => BlockState::Free,
            BlockState::Referenced { by } => BlockState::Referenced { by: by - 1 },
            state => panic!("block {block} is {state:?}, not Referenced"),
        };
        self.shift(group, block, to);
        !matches!(to, BlockState::Referenced { .. })
    }

    /// The cache drops a block that no lease holds.
    ///
    /// # Panics
    /// If it is not held by the cache alone.
    pub fn evict(&mut self, group: usize, block: BlockId) {
        let state = self.state(group, block);
        assert!(state == BlockState::Cached, "block {block} is {state:?}, not Cached");
        self.shift(group, block, BlockState::Free);
    }

    /// Quarantines a block that one lease holds, counted under `owner`.
    ///
    /// # Panics
    /// If anything but exactly one lease holds it.
    pub fn quarantine(&mut self, group: usize, block: BlockId, owner: u64) {
        let state = self.state(group, block);
        assert!(state == BlockState::OWNED, "block {block} is {state:?}, not one lease's");
        self.shift(group, block, BlockState::Quarantined { owner });
    }

    /// Frees blocks quarantined under `owner`: the owner can no longer write them.
    ///
    /// # Panics
    /// If one of them is not quarantined under `owner`.
    pub fn release(&mut self, blocks: &GroupBlocks, owner: u64) {
        self.shift_all(blocks, BlockState::Quarantined { owner }, BlockState::Free);
    }

    fn shift_all(&mut self, blocks: &GroupBlocks, from: BlockState, to: BlockState) {
        for (group, ids) in blocks.0.iter().enumerate() {
            for &id in ids {
                let state = self.state(group, id);
                assert!(state == from, "block {id} is {state:?}, not {from:?}");
                // Blocks taken for the allocation have left the free runs already.
                self.shift(group, id, to);
            }
        }
    }

    /// Changes a block's state together with the counts, so that they stay consistent even if a check panics half-way.
    fn shift(&mut self, group: usize, id: BlockId, to: BlockState) {
        let group = &mut self.groups[group];
        let state = &mut group.states[id.0 as usize];
        *group.counts.of(*state) -= 1;
        *group.counts.of(to) += 1;
        *state = to;
        if to == BlockState::Free {
            group.free.put(id.0);
        }
    }
}

impl std::ops::Add for BlockCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            total: self.total + other.total,
            free: self.free + other.free,
            referenced: self.referenced + other.referenced,
            cached: self.cached + other.cached,
            quarantined: self.quarantined + other.quarantined,
        }
    }
}

impl BlockCounts {
    fn of(&mut self, state: BlockState) -> &mut usize {
        match state {
            BlockState::Free => &mut self.free,
            BlockState::Referenced { .. } => &mut self.referenced,
            BlockState::Cached => &mut self.cached,
            BlockState::Quarantined { .. } => &mut self.quarantined,
        }
    }
}

#[cfg(test)]
mod tests;
