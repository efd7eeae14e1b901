//! How many bytes a layout needs, and how many blocks of each group fit into memory. Pools are sized by these numbers, and `baton kv-size`
//! prints them.

use crate::{GroupKind, KvGroup, KvLayout};

/// What decides how the memory of a pool divides over the groups of its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolDemand {
    /// Most sequences that run at once.
    pub sequences: usize,
    /// Length of the longest of them.
    pub tokens_max: usize,
    /// Most positions of one that are computed at once.
    pub chunk_max: usize,
    /// Blocks of each group that admission keeps free.
    pub watermark: usize,
}

impl KvGroup {
    /// Most blocks of `block_tokens` tokens that a sequence of `tokens` tokens needs in this group. A window may begin and end within a
    /// block, so it can need one block more than its length alone.
    pub fn blocks_for(&self, tokens: u64, block_tokens: u32) -> u64 {
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
        self.kind.blocks_at_once(tokens, 1, block_tokens as usize) as u64
    }

    /// Blocks that are of use to sequences that run at once; `None` if there is no limit.
    ///
    /// A window group has the windows of all running sequences, and a quarter more for cached prefixes: a hit needs the window before its end,
    /// and nothing of the rest. Beyond its window a sequence needs the positions that are computed at once, which all sequences share: those
    /// of one, and as many for the next, which has its blocks before it is computed. A group of states has two for each sequence, that before a
    /// step and that behind it, and one more for checkpoints.
    fn blocks_of_use(&self, demand: &PoolDemand, block_tokens: u32) -> Option<u64> {
        let PoolDemand { sequences, tokens_max, chunk_max, watermark } = *demand;
        let at_once = |chunk| self.kind.blocks_at_once(tokens_max, chunk, block_tokens as usize) as u64;
        let one = at_once(1);
        let running = one.saturating_mul(sequences as u64);
        let computed = (at_once(chunk_max) - one).saturating_mul(2);
        match self.kind {
            GroupKind::Full | GroupKind::Latent => None,
            GroupKind::Window(_) => {
                let windows = running.saturating_add(running.div_ceil(4));
                Some(windows.saturating_add(computed).saturating_add(watermark as u64))
            }
            GroupKind::State => Some(running.saturating_add(sequences as u64).saturating_add(watermark as u64)),
        }
    }
}

impl KvLayout {
    /// Divides `bytes` over the groups: blocks of each, in the order of the groups; zeros where there is not enough for one block of each.
    ///
    /// Every group gets the same number of blocks, because a block of each belongs to the same positions, but none more than is of use to
    /// the sequences that run at once. What a window group leaves goes to the others. If all groups have such a limit, the memory that is
    /// left makes all of them larger, for cached prefixes.
    pub fn divide(&self, bytes: u64, demand: &PoolDemand) -> Vec<u32> {
        let limits: Vec<Option<u64>> =
            self.groups().iter().map(|group| group.blocks_of_use(demand, self.block_tokens())).collect();
        let has_unlimited = limits.iter().any(Option::is_none);
        let counts = |each: u64| -> Vec<u64> {
            let limited = |limit: &Option<u64>| limit.filter(|_| has_unlimited).map_or(each, |limit| limit.min(each));
            limits.iter().map(limited).collect()
        };
        let fits = |each: u64| {
            let groups = self.groups().iter().zip(counts(each));
            let sum = groups.map(|(g, n)| u128::from(n) * g.block_bytes(self.block_tokens()) as u128).sum::<u128>();
            sum <= u128::from(bytes)
        };
        // The largest number that fits; more blocks never take less memory.
        let (mut fit, mut over) = (0, u64::from(u32::MAX) + 1);
        while over - fit > 1 {
            let middle = fit + (over - fit) / 2;
            if fits(middle) { fit = middle } else { over = middle }
        }
        counts(fit).into_iter().map(|n| u32::try_from(n).unwrap_or(u32::MAX)).collect()
    }

    /// Bytes of the blocks that one sequence of `tokens` tokens needs when it shares none; `None` if they exceed a `u64`.
    pub fn sequence_bytes(&self, tokens: u64) -> Option<u64> {
        let groups = self.groups().iter().map(|group| {
            let block_bytes = group.block_bytes(self.block_tokens()) as u64;
            group.blocks_for(tokens, self.block_tokens()).checked_mul(block_bytes)
        });
        groups.into_iter().try_fold(0_u64, |sum, bytes| sum.checked_add(bytes?))
    }

    /// Sequences of `tokens` tokens, sharing nothing, that fit into `bytes` at once.
    ///
    /// With one group this is the number of blocks of the pool divided by those of a sequence. With several groups, each group is assumed
    /// to have the share of the memory that sequences of this length need.
    pub fn sequences_in(&self, bytes: u64, tokens: u64) -> u64 {
        self.sequence_bytes(tokens.max(1)).map_or(0, |one| bytes / one)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, KvPlane};

    const DEMAND: PoolDemand = PoolDemand { sequences: 4, tokens_max: 4096, chunk_max: 64, watermark: 4 };

    fn group(kind: GroupKind, layer: u32) -> KvGroup {
        let planes = vec![KvPlane::try_new("k", 1, 8, Dtype::Bf16).unwrap()];
        KvGroup { kind, layers: vec![layer], planes }
    }

    #[test]
    fn sequences_take_whole_blocks() {
        // 2 * 2 layers * 1 head * 8 elements * 2 bytes = 64 bytes a token, 1,024 a block.
        let layout = KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap();
        assert_eq!(layout.divide(10 * 1_024 + 1_023, &DEMAND), [10]);
        assert_eq!([1, 16, 17].map(|t| layout.sequence_bytes(t)), [Some(1_024), Some(1_024), Some(2_048)]);
        assert_eq!([16, 17, 48, 161].map(|t| layout.sequences_in(10 * 1_024 + 1_023, t)), [10, 5, 3, 0]);
        assert_eq!((layout.sequence_bytes(u64::MAX), layout.sequences_in(u64::MAX, u64::MAX)), (None, 0));
    }

    #[test]
    fn a_window_needs_its_length_and_one_more_block_at_most() {
        let window = group(GroupKind::Window(32), 0);
        // 32 tokens that begin in the middle of a block: 15 + 16 + 1 in three blocks.
        assert_eq!([1, 16, 17, 33, 1_000].map(|t| window.blocks_for(t, 16)), [1, 1, 2, 3, 3]);
        // 33 = 1 + 32 tokens: never in more than three blocks, wherever they begin.
        assert_eq!(group(GroupKind::Window(33), 0).blocks_for(1_000, 16), 3);
        assert_eq!(group(GroupKind::Window(1), 0).blocks_for(1_000, 16), 1);
        assert_eq!([0, 1, 1_000].map(|t| group(GroupKind::State, 0).blocks_for(t, 16)), [0, 2, 2]);
        assert_eq!(group(GroupKind::Latent, 0).blocks_for(1_000, 16), 63);
    }

    /// A block of one of these groups takes 256 bytes, one state 16.
    #[test]
    fn memory_divides_by_what_each_group_can_use() {
        // A window of 33 tokens: at most 3 blocks a sequence, 12 for four, 3 for cached prefixes; with a chunk of 64 tokens 4 more, twice; the
        // watermark.
        let window = GroupKind::Window(33);
        let cases: [(&[GroupKind], u64, &[u32]); 8] = [
            (&[GroupKind::Full], 2_560, &[10]),
            (&[GroupKind::Full, window], 20 * 256, &[10, 10]),
            (&[GroupKind::Full, window], 54 * 256, &[27, 27]),
            (&[GroupKind::Full, window], 1_027 * 256 + 255, &[1_000, 27]),
            (&[window, GroupKind::Latent, window], 1_054 * 256, &[27, 1_000, 27]),
            (&[window], 1_000 * 256, &[1_000]),
            (&[GroupKind::Full, GroupKind::State], 1_000 * 256 + 16 * 16, &[1_000, 16]),
            (&[GroupKind::Full, window], 511, &[0, 0]),
        ];
        for (kinds, bytes, expected) in cases {
            let groups = kinds.iter().enumerate().map(|(layer, kind)| group(*kind, layer as u32)).collect();
            let layout = KvLayout::try_new(16, groups).unwrap();
            assert_eq!(layout.divide(bytes, &DEMAND), expected, "{kinds:?} in {bytes} bytes");
        }
    }

    #[test]
    fn a_short_context_limits_windows_too() {
        let groups = vec![group(GroupKind::Full, 0), group(GroupKind::Window(4096), 1)];
        let layout = KvLayout::try_new(16, groups).unwrap();
        let demand = PoolDemand { tokens_max: 32, ..DEMAND };
        // Two blocks a sequence: 8, 2 for cached prefixes, the watermark.
        assert_eq!(layout.divide(1_014 * 256, &demand), [1_000, 14]);
    }
}
