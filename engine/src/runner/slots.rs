//! Which sequence has which slot of the device, and what the device knows of its block table.

use crate::scheduler::{Segment, SequenceKey};
use baton_kernels::step::{Delta, Join};
use baton_types::{BlockId, BlockTable};
use std::collections::BTreeMap;

/// The slots. A sequence takes one with its first step and keeps it until it ends, loses its blocks, or another needs it more.
pub(super) struct Slots {
    held: BTreeMap<SequenceKey, Held>,
    free: Vec<usize>,
    /// Slots whose sequences are gone: the next step tells the device.
    left: Vec<usize>,
}

struct Held {
    slot: usize,
    /// Its block table on the device, from index 0 on. Entries that left a window stay as they were: they are not used.
    blocks: Vec<BlockId>,
}

impl Slots {
    pub(super) fn new(slots_max: usize) -> Self {
        Self { held: BTreeMap::new(), free: (0..slots_max).rev().collect(), left: Vec::new() }
    }

    /// A sequence ended or lost its blocks.
    pub(super) fn leave(&mut self, key: SequenceKey) {
        self.left.extend(self.held.remove(&key).map(|held| held.slot));
    }

    /// Tells the device of the sequences that are gone.
    pub(super) fn tell_left(&mut self, deltas: &mut Vec<Delta>) {
        for slot in self.left.drain(..) {
            deltas.push(Delta::Leave { slot });
            self.free.push(slot);
        }
    }

    /// The slot of a sequence of `batch` with this block table. `join` describes it to the device where it has no slot yet.
    ///
    /// # Panics
    /// If the batch has more sequences than there are slots.
    pub(super) fn place(
        &mut self,
        key: SequenceKey,
        table: &BlockTable,
        batch: &[Segment],
        deltas: &mut Vec<Delta>,
        join: impl FnOnce() -> Join,
    ) -> usize {
        if let Some(Held { slot, blocks: known }) = self.held.get_mut(&key) {
            let same = known.iter().skip(table.first).zip(&table.blocks).take_while(|(known, block)| known == block);
            // A table's first block is never behind the last known one: it has all that the steps before used.
            let keep = table.first.min(known.len()) + same.count();
            if keep < known.len() || keep < table.end() {
                let blocks = table.blocks[keep - table.first..].to_vec();
                known.truncate(keep);
                known.extend_from_slice(&blocks);
                deltas.push(Delta::Blocks { slot: *slot, keep, blocks });
            }
            return *slot;
        }
        if self.free.is_empty() {
            let idle = self.held.keys().copied().find(|held| batch.iter().all(|segment| segment.key != *held));
            idle.into_iter().for_each(|idle| self.leave(idle));
            self.tell_left(deltas);
        }
        let slot = self.free.pop().unwrap_or_else(|| unreachable!("a batch has at most as many sequences as slots"));
        let blocks: Vec<BlockId> =
            std::iter::repeat_n(BlockId(0), table.first).chain(table.blocks.iter().copied()).collect();
        self.held.insert(key, Held { slot, blocks: blocks.clone() });
        deltas.push(Delta::Join(Box::new(Join { slot, blocks, ..join() })));
        slot
    }
}
