//! A layout applied to one pool: the address arithmetic of a region.

use crate::{BlockId, KvLayout, KvPlane, LayoutError};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A layout applied to a pool with a number of blocks for each group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvPoolMap {
    layout: KvLayout,
    blocks: Vec<u32>,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl KvPoolMap {
    /// Applies `layout` to a pool with `blocks` blocks in each group.
    pub fn try_new(layout: KvLayout, blocks: u32) -> Result<Self, LayoutError> {
        let groups = layout.groups().len();
        Self::with_blocks(layout, vec![blocks; groups])
    }

    /// Applies `layout` to a pool with `blocks[g]` blocks in group `g`.
    pub fn with_blocks(layout: KvLayout, blocks: Vec<u32>) -> Result<Self, LayoutError> {
        let groups = layout.groups().iter().zip(&blocks);
        let bytes = groups.map(|(g, &n)| g.block_bytes(layout.block_tokens()) as u128 * u128::from(n));
        let fits = bytes.sum::<u128>() <= isize::MAX as u128;
        if blocks.len() != layout.groups().len() || blocks.contains(&0) || !fits {
            return Err(LayoutError::PoolSize { blocks });
        }
        Ok(Self { layout, blocks })
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Blocks of a group.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn blocks(&self, group: usize) -> u32 {
        self.blocks[group]
    }

    /// Blocks of each group.
    pub fn group_blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Blocks of all groups together.
    pub fn total_blocks(&self) -> usize {
        self.blocks.iter().map(|n| *n as usize).sum()
    }

    /// Size of the region in bytes.
    pub fn bytes(&self) -> usize {
        self.group_base(self.blocks.len())
    }

    /// Bytes of the groups before `group`.
    fn group_base(&self, group: usize) -> usize {
        let before = self.layout.groups().iter().zip(&self.blocks).take(group);
        before.map(|(g, &n)| g.block_bytes(self.layout.block_tokens()) * n as usize).sum()
    }

    /// Offset of plane `plane` of block `block` in the `layer`-th layer *of group* `group`, in bytes.
    ///
    /// # Panics
    /// If an index is out of range.
    pub fn plane_offset(&self, group: usize, layer: usize, block: BlockId, plane: usize) -> usize {
        let blocks = self.blocks[group];
        assert!(block.0 < blocks, "block {block} of a pool of {blocks}");
        let g = &self.layout.groups()[group];
        assert!(layer < g.layers.len(), "layer {layer} of a group of {}", g.layers.len());
        let tokens = self.layout.block_tokens();
        let planes_before: usize = g.planes[..plane].iter().map(KvPlane::token_stride).sum();
        let block_start = (layer * blocks as usize + block.0 as usize) * g.layer_block_bytes(tokens);
        self.group_base(group) + block_start + planes_before * g.block_rows(tokens) as usize
    }

    /// Byte range of tokens `tokens` (within the block) of one plane of one block; see [`KvPoolMap::plane_offset`]. A block of states has
    /// one row.
    pub fn token_range(
        &self,
        group: usize,
        layer: usize,
        block: BlockId,
        plane: usize,
        tokens: Range<u32>,
    ) -> Range<usize> {
        let g = &self.layout.groups()[group];
        assert!(tokens.end <= g.block_rows(self.layout.block_tokens()), "tokens {tokens:?} of a block");
        let base = self.plane_offset(group, layer, block, plane);
        let stride = g.planes[plane].token_stride();
        base + tokens.start as usize * stride..base + tokens.end as usize * stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, GroupKind, KvGroup};

    #[test]
    fn addresses_tile_the_region_without_overlap() {
        let planes = |names: &[&str]| {
            names.iter().enumerate().map(|(i, n)| KvPlane::try_new(*n, 1 + i as u32, 3, Dtype::Bf16).unwrap()).collect()
        };
        let groups = vec![
            KvGroup { kind: GroupKind::Full, layers: vec![0, 2], planes: planes(&["k", "v"]) },
            KvGroup { kind: GroupKind::Window(32), layers: vec![1], planes: planes(&["k", "v", "s"]) },
            KvGroup { kind: GroupKind::State, layers: vec![3, 4, 5], planes: planes(&["state"]) },
        ];
        let layout = KvLayout::try_new(32, groups).unwrap();
        for blocks in [vec![3, 3, 3], vec![5, 2, 7]] {
            let map = KvPoolMap::with_blocks(layout.clone(), blocks.clone()).unwrap();
            let mut covered = vec![0u8; map.bytes()];
            for (g, group) in map.layout().groups().iter().enumerate() {
                for layer in 0..group.layers.len() {
                    for block in 0..blocks[g] {
                        for plane in 0..group.planes.len() {
                            let rows = group.block_rows(32);
                            let range = map.token_range(g, layer, BlockId(block), plane, 0..rows);
                            covered[range].iter_mut().for_each(|c| *c += 1);
                        }
                    }
                }
            }
            assert!(covered.iter().all(|&c| c == 1));
        }
    }

    #[test]
    fn a_pool_has_blocks_in_each_group() {
        let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
        for blocks in [vec![], vec![0], vec![1, 1]] {
            let refused = KvPoolMap::with_blocks(layout.clone(), blocks.clone());
            assert_eq!(refused, Err(LayoutError::PoolSize { blocks }));
        }
    }
}
