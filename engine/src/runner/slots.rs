//! Which sequence has which slot of the device, and what the device knows of its block tables.

use crate::scheduler::{Segment, SequenceKey};
use baton_kernels::step::{Delta, Join};
use baton_types::{BlockTable, BlockTables};
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
    /// Its block tables on the device.
    tables: BlockTables,
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

    /// The slots whose sequences are gone, which the caller tells the device.
    pub(super) fn take_left(&mut self) -> Vec<usize> {
        self.free.extend(&self.left);
        std::mem::take(&mut self.left)
    }

    /// The slot of a sequence of `batch` with these block tables. `join` describes it to the device where it has no slot yet.
    ///
    /// # Panics
    /// If the batch has more sequences than there are slots.
    pub(super) fn place(
        &mut self,
        key: SequenceKey,
        tables: &BlockTables,
        batch: &[Segment],
        deltas: &mut Vec<Delta>,
        join: impl FnOnce() -> Join,
    ) -> usize {
        if let Some(Held { slot, tables: known }) = self.held.get_mut(&key) {
            for (group, (known, table)) in known.0.iter_mut().zip(&tables.0).enumerate() {
                if let Some(delta) = change(*slot, group, known, table) {
                    deltas.push(delta);
                    *known = table.clone();
                }
            }
            return *slot;
        }
        if self.free.is_empty() {
            let idle = self.held.keys().copied().find(|held| batch.iter().all(|segment| segment.key != *held));
            idle.into_iter().for_each(|idle| self.leave(idle));
            self.tell_left(deltas);
        }
        let slot = self.free.pop().unwrap_or_else(|| unreachable!("a batch has at most as many sequences as slots"));
        self.held.insert(key, Held { slot, tables: tables.clone() });
        deltas.push(Delta::Join(Box::new(Join { slot, tables: tables.clone(), ..join() })));
        slot
    }
}

/// What makes a table of the known one. A table begins within the known one, or right behind it: a window has all that the step before used.
/// A state may be further behind it.
fn change(slot: usize, group: usize, known: &BlockTable, table: &BlockTable) -> Option<Delta> {
    let first = table.first;
    let same = known.blocks.iter().skip(first - known.first).zip(&table.blocks);
    let keep = first + same.take_while(|(known, block)| known == block).count();
    let is_same = first == known.first && keep == known.end() && keep == table.end();
    let blocks = table.blocks[keep - first..].to_vec();
    (!is_same).then_some(Delta::Blocks { slot, group, first, keep, blocks })
}
