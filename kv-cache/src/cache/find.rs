//! Where a prompt can continue: the longest prefix of which every group has what the next position needs.

use super::{EntryId, PrefixCache};
use crate::PrefixHash;
use baton_types::GroupKind;

/// The cached blocks that a prompt begins with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hit {
    /// Length of the cached prefix in blocks.
    pub(crate) blocks: usize,
    /// The same, if states are not counted.
    pub(crate) known: usize,
    /// Index of the first entry: with windows alone, a hit needs no entry before it.
    first: usize,
    pub(super) entries: Vec<EntryId>,
}

impl Hit {
    /// The entry of the block at an index.
    ///
    /// # Panics
    /// If the hit does not need that block.
    pub(crate) fn entry(&self, index: usize) -> EntryId {
        self.entries[index - self.first]
    }
}

impl PrefixCache {
    /// The longest cached prefix of a prompt, at most `blocks_max` blocks: its end is one at which every group has all blocks that the next
    /// position needs. If a peer fills the blocks after it up to `received` tokens, the state at its end is not needed.
    pub(crate) fn find(&self, hashes: &[PrefixHash], blocks_max: usize, received: Option<usize>) -> Hit {
        let size = self.shape.block_tokens;
        let kinds: Vec<GroupKind> = self.shape.groups.iter().map(|group| group.kind).collect();
        let mut found: Vec<Option<EntryId>> = Vec::new();
        // Where the run of blocks that ends here begins, by group.
        let mut starts = vec![0; kinds.len()];
        let (mut blocks, mut known) = (0, 0);
        for index in 0..blocks_max {
            let Some(hash) = self.hash_of(hashes, index) else { break };
            let id = self.by_hash.get(&hash).copied();
            if id.is_none() && self.is_tree {
                break;
            }
            found.push(id);
            let row = id.map(|id| self.entries.blocks(id));
            for (group, start) in starts.iter_mut().enumerate() {
                if row.is_none_or(|row| row[group].is_none()) {
                    *start = index + 1;
                }
            }
            let end = (index + 1) * size;
            let holds = |(kind, start): (&GroupKind, &usize)| *start <= kind.first_for(end, size);
            let is_state = |(kind, _): &(&GroupKind, &usize)| **kind == GroupKind::State;
            if id.is_none() || !kinds.iter().zip(&starts).filter(|of| !is_state(of)).all(holds) {
                continue;
            }
            known = index + 1;
            let needs_state = received.is_none_or(|tokens| tokens <= end);
            if !needs_state || kinds.iter().zip(&starts).filter(is_state).all(holds) {
                blocks = index + 1;
            }
        }
        let first = kinds[self.first_main()].first_for(blocks * size, size).min(blocks);
        let entries = found[first..blocks].iter().flatten().copied().collect();
        Hit { blocks, known, first, entries }
    }
}
