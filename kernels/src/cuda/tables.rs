//! Block tables on the device, changed by what a step changes.
//!
//! A group has one table `[slots, stride]`. The block at index `i` of a sequence is at `i % stride`, so that a sequence whose first blocks
//! left a window moves no entry.

use crate::step::{Delta, GroupLimits, StepLimits};
use baton_types::{BlockId, GroupKind};
use std::collections::BTreeMap;

/// Where the tables of the groups are in one array of i32.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tables {
    groups: Vec<Place>,
    slots: usize,
    /// New values by their index.
    changes: BTreeMap<usize, i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    first: usize,
    stride: usize,
}

impl Tables {
    pub(super) fn new(limits: &StepLimits) -> Self {
        let (mut groups, mut first) = (Vec::new(), 0);
        for group in &limits.groups {
            let stride = stride(group, limits);
            groups.push(Place { first, stride });
            first += stride * limits.bounds.slots_max;
        }
        Self { groups, slots: limits.bounds.slots_max, changes: BTreeMap::new() }
    }

    /// Entries of all tables.
    pub(super) fn len(&self) -> usize {
        self.groups.iter().map(|place| place.stride * self.slots).sum()
    }

    /// First entry of a group's table, and entries of one slot.
    pub(super) fn place(&self, group: usize) -> (usize, usize) {
        (self.groups[group].first, self.groups[group].stride)
    }

    /// Notes the changes of a checked step. Returns the entries that change, each once, with their new values.
    pub(super) fn changes(&mut self, deltas: &[Delta]) -> impl Iterator<Item = (usize, i32)> + '_ {
        self.changes.clear();
        for delta in deltas {
            match delta {
                Delta::Join(join) => {
                    for (group, table) in join.tables.0.iter().enumerate() {
                        self.note(group, join.slot, table.first, &table.blocks);
                    }
                }
                Delta::Blocks { slot, group, keep, blocks, .. } => self.note(*group, *slot, *keep, blocks),
                // Its entries are not read before the next sequence has set its own.
                Delta::Leave { .. } => {}
            }
        }
        self.changes.iter().map(|(index, value)| (*index, *value))
    }

    /// Blocks of a slot from index `first` on. The last of those that share an entry counts: the others have left the window.
    fn note(&mut self, group: usize, slot: usize, first: usize, blocks: &[BlockId]) {
        let Place { first: of_group, stride } = self.groups[group];
        for (index, block) in (first..).zip(blocks) {
            self.changes.insert(of_group + slot * stride + index % stride, block.0 as i32);
        }
    }
}

/// Entries that a sequence needs at once: a window's blocks, those of the longest step, and one for each ragged end.
fn stride(group: &GroupLimits, limits: &StepLimits) -> usize {
    let size = limits.block_tokens;
    let all = limits.bounds.positions_max.div_ceil(size);
    match group.kind {
        GroupKind::Window(window) => ((window as usize + limits.bounds.rows_max).div_ceil(size) + 2).min(all),
        _ => all,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::AdapterBounds;
    use crate::device::Bounds;
    use crate::step::Join;
    use baton_types::{BlockTable, BlockTables};

    fn limits() -> StepLimits {
        let bounds = Bounds {
            rows_max: 32,
            logit_rows_max: 4,
            slots_max: 3,
            positions_max: 640,
            adapters: AdapterBounds::default(),
        };
        let group = |kind| GroupLimits { kind, blocks: 99 };
        let groups = vec![group(GroupKind::Full), group(GroupKind::Window(40))];
        StepLimits { bounds, vocab: 9, layers: 2, block_tokens: 16, groups }
    }

    fn table(first: usize, blocks: &[u32]) -> BlockTable {
        BlockTable { first, blocks: blocks.iter().copied().map(BlockId).collect() }
    }

    #[test]
    fn only_what_changes_is_written() {
        let mut tables = Tables::new(&limits());
        // Forty blocks of a full sequence; five of a window and a step of 72 tokens, and two.
        assert_eq!((tables.place(0), tables.place(1), tables.len()), ((0, 40), (120, 7), 3 * 47));
        let join = Join { slot: 2, tables: BlockTables(vec![table(0, &[5, 6]), table(9, &[7, 8])]), ..Join::default() };
        let blocks = |slot, group, first, keep, blocks: &[u32]| Delta::Blocks {
            slot,
            group,
            first,
            keep,
            blocks: blocks.iter().copied().map(BlockId).collect(),
        };
        let of = |tables: &mut Tables, deltas: &[Delta]| tables.changes(deltas).collect::<Vec<_>>();
        let joined =
            of(&mut tables, &[Delta::Leave { slot: 2 }, Delta::Join(Box::new(join)), blocks(2, 0, 0, 1, &[9, 4])]);
        assert_eq!(joined, [(80, 5), (81, 9), (82, 4), (120 + 14 + 2, 7), (120 + 14 + 3, 8)]);
        assert_eq!(of(&mut tables, &[blocks(0, 1, 12, 13, &[3, 2])]), [(120, 2), (120 + 6, 3)]);
        assert_eq!(of(&mut tables, &[Delta::Leave { slot: 0 }]), []);
    }
}
