//! Which bytes of the local region the writes under one ticket may reach.

use baton_types::{BlockId, BlockTables, KvPoolMap};
use std::ops::Range;

/// The ranges of one ticket. Every layer of a group has the same blocks at the same offsets, so the ranges are stored once for all its
/// layers.
#[derive(Debug, Default)]
pub struct Window(Vec<Band>);

/// The layers of one group.
#[derive(Debug)]
struct Band {
    span: Range<usize>,
    layer_bytes: usize,
    /// Within a layer, sorted and merged.
    ranges: Vec<Range<usize>>,
}

impl Window {
    /// The blocks that hold positions from `from` on, which begins a block. Blocks with earlier positions may be shared with other
    /// sequences.
    pub(crate) fn granted(map: &KvPoolMap, blocks: &BlockTables, from: u32) -> Self {
        let kept = (from / map.layout().block_tokens()) as usize;
        let bands = map.layout().groups().iter().zip(&blocks.0).enumerate().map(|(g, (group, table))| {
            let block_bytes = group.layer_block_bytes(map.layout().block_tokens());
            let layer_bytes = block_bytes * map.blocks(g) as usize;
            let start = map.plane_offset(g, 0, BlockId(0), 0);
            let granted = table.blocks.iter().skip(kept.saturating_sub(table.first));
            let mut blocks: Vec<usize> = granted.map(|block| block.0 as usize).collect();
            blocks.sort_unstable();
            let mut ranges: Vec<Range<usize>> = Vec::new();
            for block in blocks {
                match ranges.last_mut() {
                    Some(last) if last.end >= block * block_bytes => last.end = (block + 1) * block_bytes,
                    _ => ranges.push(block * block_bytes..(block + 1) * block_bytes),
                }
            }
            Band { span: start..start + layer_bytes * group.layers.len(), layer_bytes, ranges }
        });
        Self(bands.collect())
    }

    /// Whether a write to `range` may be stored. No write may cross from one layer into the next.
    pub fn allows(&self, range: &Range<usize>) -> bool {
        let Some(band) = self.0.iter().find(|band| band.span.contains(&range.start)) else { return false };
        let start = (range.start - band.span.start) % band.layer_bytes;
        let after = band.ranges.partition_point(|within| within.start <= start);
        after > 0 && start + range.len() <= band.ranges[after - 1].end
    }

    /// Any ranges, sorted and disjoint.
    #[cfg(test)]
    pub(crate) fn of(ranges: Vec<Range<usize>>) -> Self {
        Self(vec![Band { span: 0..usize::MAX, layer_bytes: usize::MAX, ranges }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{BlockTable, Dtype, GroupKind, KvGroup, KvLayout, KvPlane};

    /// 16 bytes a token and layer, 256 a block, two layers of four blocks.
    fn map() -> KvPoolMap {
        KvPoolMap::try_new(KvLayout::llama(16, 2, 1, 4, Dtype::Bf16).unwrap(), 4).unwrap()
    }

    #[test]
    fn a_grant_opens_its_blocks_in_every_layer_and_nothing_else() {
        for (from, open) in
            [(0, vec![0..768, 1024..1792]), (16, vec![0..512, 1024..1536]), (32, vec![256..512, 1280..1536])]
        {
            let table = BlockTable::from_start([2, 0, 1].map(BlockId).to_vec());
            let window = Window::granted(&map(), &BlockTables(vec![table]), from);
            for start in (0..2048).step_by(64) {
                for len in [1, 64, 256, 512] {
                    let inside = open.iter().any(|o| o.start <= start && start + len <= o.end);
                    assert_eq!(window.allows(&(start..start + len)), inside, "from {from}: {len} bytes at {start}");
                }
            }
            assert!(!window.allows(&(2048..2049)));
        }
    }

    /// A full group of one layer with blocks of 256 bytes, and two layers of four states of 48 bytes.
    #[test]
    fn a_grant_opens_one_state_in_every_layer() {
        let plane = |dim| vec![KvPlane::try_new("p", 1, dim, Dtype::F32).unwrap()];
        let full = KvGroup { kind: GroupKind::Full, layers: vec![1], planes: plane(4) };
        let state = KvGroup { kind: GroupKind::State, layers: vec![0, 2], planes: plane(12) };
        let map = KvPoolMap::try_new(KvLayout::try_new(16, vec![full, state]).unwrap(), 4).unwrap();
        let table = |first, block| BlockTable { first, blocks: vec![BlockId(block)] };
        // Of 40 tokens, of which the first 32 are cached in a table that the full group shares.
        let blocks = BlockTables(vec![BlockTable::from_start([3, 1, 0].map(BlockId).to_vec()), table(2, 2)]);
        let window = Window::granted(&map, &blocks, 32);
        let open = [0..256, 1024 + 96..1024 + 144, 1024 + 192 + 96..1024 + 192 + 144];
        for start in (0..map.bytes()).step_by(4) {
            for len in [1, 4, 48, 52, 192] {
                let inside = open.iter().any(|open| open.start <= start && start + len <= open.end);
                assert_eq!(window.allows(&(start..start + len)), inside, "{len} bytes at {start}");
            }
        }
    }
}
