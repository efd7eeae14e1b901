//! The groups of a pool, as ownership of blocks sees them.

use baton_types::{GroupKind, KvPoolMap};

/// Kind and size of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolGroup {
    /// Which part of the past its blocks keep.
    pub kind: GroupKind,
    /// Number of blocks.
    pub blocks: u32,
}

/// The groups of a pool, and the size of their blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolShape {
    /// Tokens of a block.
    pub block_tokens: usize,
    /// The groups, in the order of the layout.
    pub groups: Vec<PoolGroup>,
}

impl PoolShape {
    /// A pool of `groups` full groups of `blocks` blocks each.
    pub fn full(groups: usize, blocks: u32, block_tokens: usize) -> Self {
        Self { block_tokens, groups: vec![PoolGroup { kind: GroupKind::Full, blocks }; groups] }
    }

    /// Most blocks of each group that a sequence of `tokens` tokens holds at once, if at most `chunk` of them are computed together.
    pub fn blocks_at_once(&self, tokens: usize, chunk: usize) -> Vec<usize> {
        self.groups.iter().map(|group| group.kind.blocks_at_once(tokens, chunk, self.block_tokens)).collect()
    }

    /// Longest sequence that fits the empty pool, computed in chunks of at most `chunk` tokens.
    pub fn tokens_max(&self, chunk: usize) -> usize {
        let each = self.groups.iter().map(|PoolGroup { kind, blocks }| {
            let blocks = *blocks as usize;
            let is_endless = kind.blocks_at_once(usize::MAX / 2, chunk, self.block_tokens) <= blocks;
            if is_endless { usize::MAX } else { blocks * self.block_tokens }
        });
        each.min().unwrap_or(0)
    }

    /// Blocks of each group that a lease of `tokens` tokens has whose KV a peer fills; of states one more, to go on with.
    pub fn blocks_received(&self, tokens: usize) -> Vec<usize> {
        let end = tokens.div_ceil(self.block_tokens);
        let of = |kind: GroupKind| match (end - kind.first_for(tokens, self.block_tokens).min(end), kind) {
            (state, GroupKind::State) => 2 * state,
            (blocks, _) => blocks,
        };
        self.groups.iter().map(|group| of(group.kind)).collect()
    }

    /// The group that limits how many tokens fit at once: others are made large enough for the sequences that run.
    pub fn limiting(&self) -> PoolGroup {
        self.groups[self.limiting_index()]
    }

    /// Index of [`PoolShape::limiting`].
    pub fn limiting_index(&self) -> usize {
        self.main().first().copied().unwrap_or(0)
    }

    /// Groups whose blocks decide whether a prefix is cached: those that keep every position, or the group with the widest window where
    /// there is none. A sequence that holds a block of another group holds those of the same index in these.
    pub(crate) fn main(&self) -> Vec<usize> {
        let keeps_all = |kind: GroupKind| matches!(kind, GroupKind::Full | GroupKind::Latent);
        let all = self.groups.iter().enumerate();
        let full: Vec<usize> = all.clone().filter(|(_, g)| keeps_all(g.kind)).map(|(g, _)| g).collect();
        let window = |kind: GroupKind| if let GroupKind::Window(tokens) = kind { tokens } else { 0 };
        let windows = all.filter(|(_, group)| group.kind.is_by_position());
        let widest = windows.max_by_key(|(g, group)| (window(group.kind), std::cmp::Reverse(*g)));
        if full.is_empty() { widest.map(|(g, _)| g).into_iter().collect() } else { full }
    }
}

impl From<&KvPoolMap> for PoolShape {
    fn from(map: &KvPoolMap) -> Self {
        let groups = map.layout().groups().iter().zip(map.group_blocks());
        let groups = groups.map(|(group, blocks)| PoolGroup { kind: group.kind, blocks: *blocks });
        Self { block_tokens: map.layout().block_tokens() as usize, groups: groups.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(groups: &[(GroupKind, u32)]) -> PoolShape {
        let groups = groups.iter().map(|(kind, blocks)| PoolGroup { kind: *kind, blocks: *blocks });
        PoolShape { block_tokens: 16, groups: groups.collect() }
    }

    #[test]
    fn a_window_limits_no_length_once_it_fits() {
        let (full, window) = (GroupKind::Full, GroupKind::Window(40));
        let cases = [
            (shape(&[(full, 10)]), 160),
            (shape(&[(full, 10), (window, 5)]), 160),
            (shape(&[(full, 10), (window, 4)]), 64),
            (shape(&[(window, 5)]), usize::MAX),
            (shape(&[(full, 10), (GroupKind::State, 2)]), 160),
            (shape(&[(full, 10), (GroupKind::State, 1)]), 16),
        ];
        for (shape, tokens) in cases {
            assert_eq!(shape.tokens_max(16), tokens, "{shape:?}");
        }
        assert_eq!(shape(&[(full, 9), (window, 9), (GroupKind::State, 9)]).blocks_at_once(200, 16), [13, 5, 2]);
    }

    #[test]
    fn full_groups_decide_and_the_widest_window_where_there_is_none() {
        let (full, narrow, wide) = (GroupKind::Full, GroupKind::Window(16), GroupKind::Window(64));
        let cases: [(&[GroupKind], &[usize]); 6] = [
            (&[GroupKind::State], &[]),
            (&[full], &[0]),
            (&[wide, full, GroupKind::Latent], &[1, 2]),
            (&[narrow, wide], &[1]),
            (&[wide, wide], &[0]),
            (&[GroupKind::State, narrow], &[1]),
        ];
        for (kinds, main) in cases {
            assert_eq!(shape(&kinds.iter().map(|kind| (*kind, 4)).collect::<Vec<_>>()).main(), main, "{kinds:?}");
        }
    }
}
