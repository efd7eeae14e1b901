//! How many bytes a layout needs, and how many blocks fit into memory. Pools are sized by these numbers, and `baton kv-size` prints them.

use crate::{GroupKind, KvGroup, KvLayout};

impl KvGroup {
    /// Most blocks of `block_tokens` tokens that a sequence of `tokens` tokens needs in this group. A window may begin and end within a
    /// block, so it can need one block more than its length alone.
    pub fn blocks_for(&self, tokens: u64, block_tokens: u32) -> u64 {
        let all = tokens.div_ceil(u64::from(block_tokens));
        match self.kind {
            GroupKind::Full | GroupKind::Latent => all,
            GroupKind::Window(window) => {
                all.min(u64::from(window).saturating_sub(1).div_ceil(u64::from(block_tokens)) + 1)
            }
            GroupKind::State => all.min(1),
        }
    }
}

impl KvLayout {
    /// Blocks, each of every group, that fit into `bytes`.
    pub fn blocks_in(&self, bytes: u64) -> u64 {
        bytes / self.bytes_per_block() as u64
    }

    /// Bytes of the blocks that one sequence of `tokens` tokens needs when it shares none; `None` if they exceed a `u64`.
    pub fn sequence_bytes(&self, tokens: u64) -> Option<u64> {
        let groups = self.groups().iter().map(|group| {
            let token_bytes = group.layers.len() as u64 * group.token_bytes() as u64;
            let block_bytes = token_bytes * u64::from(self.block_tokens());
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

    #[test]
    fn sequences_take_whole_blocks() {
        // 2 * 2 layers * 1 head * 8 elements * 2 bytes = 64 bytes a token, 1,024 a block.
        let layout = KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap();
        assert_eq!(layout.blocks_in(10 * 1_024 + 1_023), 10);
        assert_eq!([1, 16, 17].map(|t| layout.sequence_bytes(t)), [Some(1_024), Some(1_024), Some(2_048)]);
        assert_eq!([16, 17, 48, 161].map(|t| layout.sequences_in(10 * 1_024 + 1_023, t)), [10, 5, 3, 0]);
        assert_eq!((layout.sequence_bytes(u64::MAX), layout.sequences_in(u64::MAX, u64::MAX)), (None, 0));
    }

    #[test]
    fn a_window_needs_its_length_and_one_more_block_at_most() {
        let group = |kind| {
            let planes = vec![KvPlane::try_new("k", 1, 8, Dtype::Bf16).unwrap()];
            KvGroup { kind, layers: vec![0], planes }
        };
        let window = group(GroupKind::Window(32));
        // 32 tokens that begin in the middle of a block: 15 + 16 + 1 in three blocks.
        assert_eq!([1, 16, 17, 33, 1_000].map(|t| window.blocks_for(t, 16)), [1, 1, 2, 3, 3]);
        // 33 = 1 + 32 tokens: never in more than three blocks, wherever they begin.
        assert_eq!(group(GroupKind::Window(33)).blocks_for(1_000, 16), 3);
        assert_eq!(group(GroupKind::Window(1)).blocks_for(1_000, 16), 1);
        assert_eq!(group(GroupKind::State).blocks_for(1_000, 16), 1);
        assert_eq!(group(GroupKind::Latent).blocks_for(1_000, 16), 63);
    }
}
