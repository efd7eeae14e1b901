//! How blocks of a worker's pool are held, and since when.

use crate::model::Memory;
use crate::network::HeldBlocks;
use baton_kv_cache::SharedPool;
use baton_types::{Incarnation, Party};
use baton_worker::hold::owner;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// The blocks of one pool.
pub(super) struct OfPool {
    pool: SharedPool,
    memory: Memory,
    freed: Mutex<Freed>,
}

/// Whenever blocks become free, the pool says so, before anybody can take them again.
struct Freed {
    times: u64,
    /// At which of them each block of each group was free last.
    last: Vec<Vec<u64>>,
}

impl OfPool {
    pub(super) fn new(pool: SharedPool, memory: Memory) -> Arc<Self> {
        let freed = Freed { times: 0, last: memory.map.group_blocks().iter().map(|n| vec![0; *n as usize]).collect() };
        let held = Arc::new(Self { pool, memory, freed: Mutex::new(freed) });
        // Weak: the pool keeps its listeners.
        let told = Arc::downgrade(&held);
        held.pool.on_freed(move || told.upgrade().iter().for_each(|held| held.look()));
        held
    }

    fn look(&self) {
        let mut freed = self.freed.lock();
        freed.times += 1;
        let times = freed.times;
        for (group, last) in freed.last.iter_mut().enumerate() {
            let blocks = (0..).map(baton_types::BlockId).zip(last);
            blocks.filter(|(block, _)| !self.pool.is_held(group, *block)).for_each(|(_, last)| *last = times);
        }
    }
}

impl HeldBlocks for OfPool {
    fn mark(&self) -> u64 {
        self.freed.lock().times
    }

    fn are_held_since(&self, mark: u64, range: Range<usize>) -> bool {
        let freed = self.freed.lock();
        let (group, mut blocks) = self.memory.blocks_of(range);
        blocks.all(|block| self.pool.is_held(group, block) && freed.last[group][block.0 as usize] <= mark)
    }

    fn quarantined_of(&self, peer: &Party) -> usize {
        let starts = (1..=peer.incarnation.0).map(|start| Party { incarnation: Incarnation(start), ..peer.clone() });
        starts.map(|start| self.pool.quarantined_by(owner(&start))).sum()
    }
}

/// Where bytes are counted and not carried, nothing is written.
pub(super) struct Unchecked;

impl HeldBlocks for Unchecked {
    fn mark(&self) -> u64 {
        0
    }

    fn are_held_since(&self, _mark: u64, _range: Range<usize>) -> bool {
        true
    }

    fn quarantined_of(&self, _peer: &Party) -> usize {
        0
    }
}
