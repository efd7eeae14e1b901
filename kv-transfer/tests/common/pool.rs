//! Block pools that count.

use baton_kv_transfer::{BlockHold, QuarantinedBlocks};
use baton_types::{BlockId, BlockTable, BlockTables, GroupKind, KvPoolMap};
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// Blocks of one instance, one free list a group.
pub struct Pool {
    free: Mutex<Vec<BTreeSet<u32>>>,
    quarantined: Mutex<usize>,
    blocks: u32,
    block_tokens: u32,
    kinds: Vec<GroupKind>,
}

impl Pool {
    pub fn new(map: &KvPoolMap) -> Arc<Self> {
        let free = map.layout().groups().iter().map(|_| (0..map.blocks(0)).collect()).collect();
        let (blocks, block_tokens) = (map.blocks(0), map.layout().block_tokens());
        let kinds = map.layout().groups().iter().map(|group| group.kind).collect();
        Arc::new(Self { free: Mutex::new(free), quarantined: Mutex::new(0), blocks, block_tokens, kinds })
    }

    /// Takes the blocks of each group that a sequence of `count` blocks has, scattered but the same for the same seed: of states the last.
    pub fn take(self: &Arc<Self>, count: usize, seed: u64) -> Option<Box<Hold>> {
        let mut free = self.free.lock().unwrap();
        if free.iter().any(|f| f.len() < count) {
            return None;
        }
        let take = |(f, kind): (&mut BTreeSet<u32>, &GroupKind)| {
            let first = if *kind == GroupKind::State { count.saturating_sub(1) } else { 0 };
            let mut ids: Vec<u32> = f.iter().copied().collect();
            if seed != 0 {
                ids.sort_by_key(|&b| (u64::from(b) + 1).wrapping_mul(seed | 1) >> 9);
            }
            ids.truncate(count - first);
            ids.iter().for_each(|b| assert!(f.remove(b)));
            BlockTable { first, blocks: ids.into_iter().map(BlockId).collect() }
        };
        let blocks = BlockTables(free.iter_mut().zip(&self.kinds).map(take).collect());
        Some(Box::new(Hold { pool: self.clone(), blocks, cached: 0 }))
    }

    fn give_back(&self, blocks: &BlockTables) {
        let mut free = self.free.lock().unwrap();
        for (free, table) in free.iter_mut().zip(&blocks.0) {
            table.blocks.iter().for_each(|b| assert!(free.insert(b.0), "block {b} is freed twice"));
        }
    }

    pub fn is_whole(&self) -> bool {
        self.free.lock().unwrap().iter().all(|f| f.len() == self.blocks as usize)
    }

    pub fn quarantined(&self) -> usize {
        *self.quarantined.lock().unwrap()
    }
}

/// Blocks taken from a pool; dropped, they are back.
pub struct Hold {
    pool: Arc<Pool>,
    pub blocks: BlockTables,
    /// Leading tokens that were in them before.
    pub cached: u32,
}

impl Hold {
    /// Those that hold positions from `from` on.
    pub fn blocks_from(&self, from: u32) -> BlockTables {
        let kept = (from / self.pool.block_tokens) as usize;
        let groups = self.blocks.0.iter().map(|table| BlockTable {
            first: table.first.saturating_sub(kept),
            blocks: table.blocks[kept.saturating_sub(table.first)..].to_vec(),
        });
        BlockTables(groups.collect())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.pool.give_back(&self.blocks);
    }
}

impl BlockHold for Hold {
    fn blocks(&self) -> &BlockTables {
        &self.blocks
    }
    fn cached_tokens(&self) -> u32 {
        self.cached
    }
    fn quarantine(mut self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        // What was never open to the peer is back at once.
        let (pool, kept) = (self.pool.clone(), (self.cached / self.pool.block_tokens) as usize);
        let groups = self.blocks.0.iter_mut().map(|table| BlockTable {
            first: table.first.max(kept),
            blocks: table.blocks.split_off(kept.saturating_sub(table.first)),
        });
        let blocks = BlockTables(groups.collect());
        *pool.quarantined.lock().unwrap() += blocks.total();
        Box::new(Quarantined { pool, blocks })
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

struct Quarantined {
    pool: Arc<Pool>,
    blocks: BlockTables,
}

impl QuarantinedBlocks for Quarantined {
    fn release(self: Box<Self>) {
        *self.pool.quarantined.lock().unwrap() -= self.blocks.total();
        self.pool.give_back(&self.blocks);
    }
}
