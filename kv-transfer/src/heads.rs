//! Shards of an instance: which of its KV heads one pool holds, and which heads one leg of a handoff moves.

use baton_types::{GroupKind, KvGroup, KvLayout, KvPlane};
use std::ops::Range;
use std::sync::Arc;

/// One shard of an instance, with its own pool, process and transfer service. Shards hold equal runs of KV heads, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeadShard {
    index: u16,
    of: u16,
}

impl HeadShard {
    /// The only shard of an instance.
    pub const WHOLE: Self = Self { index: 0, of: 1 };

    /// Shard `index` of `of`; `None` if it does not exist.
    pub const fn try_new(index: u16, of: u16) -> Option<Self> {
        if index < of { Some(Self { index, of }) } else { None }
    }

    /// Its index among the shards.
    pub const fn index(self) -> u16 {
        self.index
    }

    /// Number of shards of the instance.
    pub const fn of(self) -> u16 {
        self.of
    }

    /// Shards of an instance with `of` shards that hold heads of this one.
    pub fn partners(self, of: u16) -> Range<u16> {
        let (index, own, theirs) = (u32::from(self.index), u32::from(self.of), u32::from(of));
        (index * theirs / own) as u16..((index + 1) * theirs).div_ceil(own) as u16
    }

    /// The part of an instance's layout that this shard's pool holds; `None` where its heads cannot be split this way. States are not
    /// split: the heads of their planes are not those that shards divide.
    pub fn part(self, whole: &KvLayout) -> Option<KvLayout> {
        let mut groups = whole.groups().to_vec();
        if self.of > 1 && groups.iter().any(|group| group.kind == GroupKind::State) {
            return None;
        }
        for plane in groups.iter_mut().flat_map(|group| &mut group.planes) {
            let heads = self.heads(plane.heads())?;
            *plane = KvPlane::try_new(plane.name(), heads.len() as u32, plane.dim(), plane.dtype()).ok()?;
        }
        KvLayout::try_new(whole.block_tokens(), groups).ok()
    }

    fn heads(self, total: u32) -> Option<Range<u32>> {
        let (index, of) = (u32::from(self.index), u32::from(self.of));
        total.is_multiple_of(of).then(|| index * (total / of)..(index + 1) * (total / of))
    }
}

/// Heads of each plane of each group, counted within one pool.
pub(crate) type Heads = Vec<Vec<Range<u32>>>;

/// What one leg moves: the heads that two shards share, each in its own numbering.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub source: Arc<Heads>,
    pub sink: Arc<Heads>,
    /// Bytes of one token in one layer, or of one state, by group.
    pub token_bytes: Vec<usize>,
}

impl Cut {
    /// The cut between two shards of the same whole layout; `None` where they share no heads, or the layout cannot be split this way.
    pub(crate) fn new(whole: &KvLayout, source: HeadShard, sink: HeadShard) -> Option<Self> {
        let (mut ours, mut theirs, mut token_bytes) = (Heads::new(), Heads::new(), Vec::new());
        for group in whole.groups() {
            let (mut from, mut to, mut bytes) = (Vec::new(), Vec::new(), 0);
            for plane in &group.planes {
                let (a, b) = (source.heads(plane.heads())?, sink.heads(plane.heads())?);
                let shared = a.start.max(b.start)..a.end.min(b.end);
                if shared.is_empty() {
                    return None;
                }
                bytes += shared.len() * plane.head_stride();
                from.push(shared.start - a.start..shared.end - a.start);
                to.push(shared.start - b.start..shared.end - b.start);
            }
            ours.push(from);
            theirs.push(to);
            token_bytes.push(bytes);
        }
        Some(Self { source: Arc::new(ours), sink: Arc::new(theirs), token_bytes })
    }

    /// Bytes of one position, in all layers.
    pub(crate) fn bytes(&self, layout: &KvLayout) -> u64 {
        self.bytes_from(layout, &vec![0; layout.groups().len()], 1)
    }

    /// Bytes of the positions from `starts[group]` to `tokens`, or of the state in place of the last of them, in all layers.
    pub(crate) fn bytes_from(&self, layout: &KvLayout, starts: &[u32], tokens: u32) -> u64 {
        let groups = layout.groups().iter().zip(&self.token_bytes).zip(starts);
        let bytes = |((group, bytes), start): ((&KvGroup, &usize), &u32)| {
            (group.layers.len() * bytes * group.rows((*start..tokens).len())) as u64
        };
        groups.map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::Dtype;

    fn shard(index: u16, of: u16) -> HeadShard {
        HeadShard::try_new(index, of).unwrap()
    }

    #[test]
    fn partners_are_those_that_share_heads() {
        let cases = [
            ((0, 2), 1, 0..1),
            ((1, 2), 1, 0..1),
            ((0, 1), 2, 0..2),
            ((1, 2), 4, 2..4),
            ((3, 4), 2, 1..2),
            ((2, 4), 4, 2..3),
        ];
        for ((index, of), others, expected) in cases {
            assert_eq!(shard(index, of).partners(others), expected, "{index} of {of} with {others}");
        }
        assert_eq!(HeadShard::try_new(2, 2), None);
    }

    #[test]
    fn legs_cover_every_head_once() {
        let whole = KvLayout::llama(16, 2, 4, 8, Dtype::Bf16).unwrap();
        for (sources, sinks) in [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)] {
            let mut covered = [0; 4];
            for source in 0..sources {
                let source = shard(source, sources);
                for sink in source.partners(sinks) {
                    let cut = Cut::new(&whole, source, shard(sink, sinks)).unwrap();
                    let first = u32::from(source.index) * 4 / u32::from(sources);
                    cut.source[0][0].clone().for_each(|head| covered[(first + head) as usize] += 1);
                    assert_eq!(cut.source[0][0].len(), cut.sink[0][0].len());
                    assert_eq!(cut.token_bytes[0], cut.source[0][0].len() * 2 * 16);
                }
            }
            assert_eq!(covered, [1; 4], "{sources} -> {sinks}");
        }
        assert!(Cut::new(&whole, shard(0, 2), shard(1, 2)).is_none());
        assert!(shard(0, 3).part(&whole).is_none());
        let state = KvGroup { kind: GroupKind::State, layers: vec![2], planes: whole.groups()[0].planes.clone() };
        let states = KvLayout::try_new(16, vec![whole.groups()[0].clone(), state]).unwrap();
        assert_eq!((HeadShard::WHOLE.part(&states), shard(1, 4).part(&states)), (Some(states.clone()), None));
        assert_eq!(shard(1, 4).part(&whole).unwrap(), KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap());
    }
}
