//! Blocks of one sequence, and which of them it needs.
//!
//! The block of a group at index `i` holds the positions `i * block_tokens ..`. A *full* group needs all of them. A group with a *window* of
//! `w` tokens needs only those that the next positions attend to: the row at position `p` attends to the positions `p + 1 - w ..= p`.
//!
//! A block of a group of *states* holds one state: what all positions before some position leave. It has the index of the block to which the
//! last of these belongs, so the state after whole blocks is beside the last of them, and what follows it has an index of its own. A step that
//! begins behind whole blocks reads one block and writes the next; any other step that stays within a block changes the state in place. While
//! a step runs, the index of the block that it writes is not known by its positions, and counts as one more than that of the block that it
//! reads; [`BlockTable::settle`] corrects it.

use crate::{BlockId, GroupKind};
use serde::{Deserialize, Serialize};
use std::ops::Range;

impl GroupKind {
    /// Whether its blocks hold positions, rather than states.
    pub fn is_by_position(self) -> bool {
        self != Self::State
    }

    /// Indices of the blocks that must be held while the positions `from .. to` are computed, in blocks of `block_tokens` tokens.
    pub fn live(self, positions: Range<usize>, block_tokens: usize) -> Range<usize> {
        let end = positions.end.div_ceil(block_tokens);
        match self {
            Self::Full | Self::Latent => 0..end,
            Self::Window(tokens) => {
                let first = (positions.start + 1).saturating_sub(tokens as usize) / block_tokens;
                first.min(end)..end
            }
            // The state before them, unless they are the first, and the one behind them, unless it takes the same place.
            Self::State => match positions.start.checked_sub(1) {
                None => 0..end.min(1),
                Some(last) => {
                    let first = last / block_tokens;
                    first..first + 1 + usize::from(end > first + 1)
                }
            },
        }
    }

    /// Index of the first block that is needed to compute `position`, when the positions before it are in blocks. Equals the index of its own
    /// block where a window looks no further back.
    pub fn first_for(self, position: usize, block_tokens: usize) -> usize {
        self.live(position..position + 1, block_tokens).start
    }

    /// Most blocks that a sequence of `tokens` tokens holds at once, if at most `chunk` of them are computed together. A window and the chunk
    /// may begin and end within a block, so they can need one block more than their length alone.
    pub fn blocks_at_once(self, tokens: usize, chunk: usize, block_tokens: usize) -> usize {
        let all = tokens.div_ceil(block_tokens);
        match self {
            Self::Full | Self::Latent => all,
            Self::Window(window) => {
                let span = (window as usize).saturating_sub(1).saturating_add(chunk.max(1));
                all.min((span - 1).div_ceil(block_tokens) + 1)
            }
            Self::State => 2 * all.min(1),
        }
    }
}

/// Blocks of one sequence in one group: those at the indices `first ..`. Blocks before them are not held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockTable {
    /// Index of the first block.
    pub first: usize,
    /// The blocks, in the order of the positions they hold.
    pub blocks: Vec<BlockId>,
}

impl BlockTable {
    /// A table that begins with position 0.
    pub fn from_start(blocks: Vec<BlockId>) -> Self {
        Self { first: 0, blocks }
    }

    /// Index after the last block.
    pub fn end(&self) -> usize {
        self.first + self.blocks.len()
    }

    /// Indices of the blocks.
    pub fn indices(&self) -> Range<usize> {
        self.first..self.end()
    }

    /// The block at an index, if it is held.
    pub fn get(&self, index: usize) -> Option<BlockId> {
        self.blocks.get(index.checked_sub(self.first)?).copied()
    }

    /// Of states: a step is done, so that the state is the one behind `computed` positions. If the table has the state before the step too, that
    /// one leaves the table and is returned.
    pub fn settle(&mut self, computed: usize, block_tokens: usize) -> Option<BlockId> {
        let before = (self.blocks.len() > 1).then(|| self.blocks.remove(0));
        self.first = computed.saturating_sub(1) / block_tokens;
        before
    }

    /// Whether it has all blocks at these indices.
    pub fn covers(&self, indices: &Range<usize>) -> bool {
        indices.is_empty() || (self.first <= indices.start && indices.end <= self.end())
    }
}

/// Blocks of one sequence in every group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTables(pub Vec<BlockTable>);

impl BlockTables {
    /// Tables that begin with position 0.
    pub fn from_start(blocks: GroupBlocks) -> Self {
        Self(blocks.0.into_iter().map(BlockTable::from_start).collect())
    }

    /// Total number of blocks over all groups.
    pub fn total(&self) -> usize {
        self.0.iter().map(|table| table.blocks.len()).sum()
    }

    /// The ids alone.
    pub fn ids(&self) -> GroupBlocks {
        GroupBlocks(self.0.iter().map(|table| table.blocks.clone()).collect())
    }
}

/// Block ids per group, where their positions do not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupBlocks(pub Vec<Vec<BlockId>>);

impl GroupBlocks {
    /// Total number of blocks over all groups.
    pub fn total(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each position that a row attends to is in a live block, and no live block is without one.
    #[test]
    fn live_blocks_are_those_that_rows_attend_to() {
        for (window, block_tokens) in [1, 2, 15, 16, 17, 40].into_iter().flat_map(|w| [16, 32].map(|b| (w, b))) {
            for (from, to) in (0..100).flat_map(|from| [1, 2, 16, 40].map(|rows| (from, from + rows))) {
                let attended = (from..to).flat_map(|p| (p + 1_usize).saturating_sub(window)..=p);
                let mut blocks: Vec<usize> = attended.map(|p| p / block_tokens).collect();
                blocks.sort_unstable();
                blocks.dedup();
                let live = GroupKind::Window(window as u32).live(from..to, block_tokens);
                assert_eq!(live.clone().collect::<Vec<_>>(), blocks, "window {window}, {from}..{to}");
                let most = GroupKind::Window(window as u32).blocks_at_once(1000, to - from, block_tokens);
                assert!(live.len() <= most, "{live:?} are more than {most}");
            }
        }
    }

    #[test]
    fn kinds_differ_in_what_they_keep() {
        let cases = [
            (GroupKind::Full, 100..101, 0..7),
            (GroupKind::Latent, 100..101, 0..7),
            (GroupKind::Window(33), 100..101, 4..7),
            (GroupKind::Window(200), 100..101, 0..7),
            (GroupKind::Window(1), 96..97, 6..7),
            // Within a block in place, out of it into another one; the first positions need no state before them.
            (GroupKind::State, 100..101, 6..7),
            (GroupKind::State, 100..112, 6..7),
            (GroupKind::State, 100..113, 6..8),
            (GroupKind::State, 112..113, 6..8),
            (GroupKind::State, 112..500, 6..8),
            (GroupKind::State, 0..500, 0..1),
        ];
        for (kind, positions, live) in cases {
            assert_eq!(kind.live(positions, 16), live, "{kind:?}");
        }
        // Nothing of a window of one token is needed before the next position's own block.
        assert_eq!([GroupKind::Window(1), GroupKind::Window(2)].map(|kind| kind.first_for(32, 16)), [2, 1]);
        assert_eq!([0, 31, 32, 33].map(|position| GroupKind::State.first_for(position, 16)), [0, 1, 1, 2]);
    }

    #[test]
    fn a_state_has_the_index_of_the_last_position_before_it() {
        let mut table = BlockTable { first: 1, blocks: [7, 9].map(BlockId).to_vec() };
        assert_eq!(
            (table.settle(80, 16), &table),
            (Some(BlockId(7)), &BlockTable { first: 4, blocks: vec![BlockId(9)] })
        );
        assert_eq!((table.settle(81, 16), table.first), (None, 5));
    }

    /// The bound is reached: some alignment needs as many blocks.
    #[test]
    fn the_most_blocks_at_once_are_needed_somewhere() {
        for (window, chunk) in [(1, 1), (33, 1), (40, 16), (64, 256)] {
            let kind = GroupKind::Window(window);
            let most = (0..64).map(|from| kind.live(1000 + from..1000 + from + chunk, 16).len()).max();
            assert_eq!(most, Some(kind.blocks_at_once(10_000, chunk, 16)), "window {window}, chunk {chunk}");
        }
        assert_eq!(GroupKind::Window(64).blocks_at_once(20, 256, 16), 2);
    }

    #[test]
    fn a_table_knows_its_indices() {
        let table = BlockTable { first: 3, blocks: [7, 9].map(BlockId).to_vec() };
        assert_eq!((table.indices(), table.get(2), table.get(4), table.get(5)), (3..5, None, Some(BlockId(9)), None));
        assert_eq!(
            [3..5, 4..5, 2..4, 4..6, 9..9].map(|indices| table.covers(&indices)),
            [true, true, false, false, true]
        );
    }
}
