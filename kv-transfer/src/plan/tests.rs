use super::*;
use crate::HeadShard;
use crate::heads::Cut;
use baton_types::{Dtype, GroupKind, KvGroup, KvLayout, KvPlane};
use proptest::prelude::*;
use std::sync::Arc;

fn heads(map: &KvPoolMap) -> Arc<Heads> {
    Cut::new(map.layout(), HeadShard::WHOLE, HeadShard::WHOLE).unwrap().source
}

fn map(block_tokens: u32, blocks: u32) -> KvPoolMap {
    KvPoolMap::try_new(KvLayout::llama(block_tokens, 2, 1, 4, Dtype::Bf16).unwrap(), blocks).unwrap()
}

fn ids(ids: &[u32]) -> BlockTable {
    BlockTable::from_start(ids.iter().copied().map(BlockId).collect())
}

/// 16 bytes a token and layer: 8 of k, 8 of v.
fn check(source: (u32, &[u32]), sink: (u32, &[u32]), tokens: Range<u32>, expected: &[(usize, usize, usize)]) {
    let (from, to) = (map(source.0, 8), map(sink.0, 8));
    let mut runs = Vec::new();
    let (a, b) = (ids(source.1), ids(sink.1));
    let heads = heads(&from);
    let (a, b) = (Side { map: &from, blocks: &a, heads: &heads }, Side { map: &to, blocks: &b, heads: &heads });
    copies(a, b, 0, 0, tokens, 1 << 20, |r| runs.push((r.from, r.to, r.len)));
    assert_eq!(runs, expected);
}

#[test]
fn neighbouring_blocks_go_in_one_copy() {
    check((16, &[2, 3, 4]), (16, &[5, 6, 7]), 0..48, &[(512, 1280, 768)]);
    check((16, &[2, 3, 4]), (16, &[5, 1, 2]), 0..48, &[(512, 1280, 256), (768, 256, 512)]);
}

#[test]
fn an_incomplete_block_goes_plane_by_plane() {
    check((16, &[0]), (16, &[1]), 0..10, &[(0, 256, 80), (128, 384, 80)]);
}

#[test]
fn different_block_sizes_exchange_planes_of_the_finer_one() {
    check((32, &[0]), (16, &[3, 4]), 0..32, &[(0, 768, 128), (256, 896, 128), (128, 1024, 128), (384, 1152, 128)]);
}

/// A copy is planned a bounded number of blocks at a time, and the result is the same.
#[test]
fn a_long_copy_is_planned_in_pieces() {
    let (map, blocks) =
        (map(16, 1000), Arc::new(BlockTables(vec![BlockTable::from_start((0..1000).map(BlockId).collect())])));
    let end = || End { map: map.clone(), blocks: blocks.clone(), heads: heads(&map) };
    let plan = Arc::new(Move { source: end(), sink: end(), run_bytes_max: 1 << 30 });
    let mut copy = LayerCopy::new(plan, 0, 1, 16..15_990);
    let runs: Vec<CopyRun> = std::iter::from_fn(|| copy.next()).collect();
    // 16 bytes a token; the last block has 6 tokens, and moves plane by plane.
    let lengths: Vec<usize> = runs.iter().map(|run| run.len / 16).collect();
    assert_eq!(lengths, [4080, 4096, 4096, 3699, 3]);
    assert!(runs.windows(2).take(3).all(|two| two[0].from + two[0].len == two[1].from && two[0].from == two[0].to));
}

#[test]
fn long_runs_are_cut() {
    let (map, blocks) = (map(16, 8), ids(&[0, 1]));
    let side = Side { map: &map, blocks: &blocks, heads: &heads(&map) };
    let mut lengths = Vec::new();
    copies(side, side, 0, 0, 0..32, 200, |r| lengths.push(r.len));
    assert_eq!(lengths, [200, 200, 112]);
}

/// A full group, and one with a window of 40 tokens.
fn mixed(block_tokens: u32) -> KvPoolMap {
    let group = |kind, layer| {
        let planes = vec![KvPlane::try_new("k", 1, 8, Dtype::Bf16).unwrap()];
        KvGroup { kind, layers: vec![layer], planes }
    };
    let groups = vec![group(GroupKind::Full, 0), group(GroupKind::Window(40), 1)];
    KvPoolMap::with_blocks(KvLayout::try_new(block_tokens, groups).unwrap(), vec![16, 8]).unwrap()
}

#[test]
fn of_a_window_moves_what_both_sides_hold_for_the_next_position() {
    let (fine, coarse) = (mixed(16), mixed(64));
    // Position 200 attends to 161 and later: in blocks of 16 from 160 on, in blocks of 64 from 128 on.
    let cases = [
        (&fine, &fine, 0, 200, [0, 160]),
        (&coarse, &coarse, 0, 200, [0, 128]),
        (&fine, &coarse, 0, 200, [0, 160]),
        (&coarse, &fine, 64, 200, [64, 160]),
        (&fine, &fine, 176, 200, [176, 176]),
        (&fine, &fine, 0, 30, [0, 0]),
    ];
    for (ours, theirs, from, tokens, expected) in cases {
        assert_eq!(first_moved(ours.layout(), theirs.layout(), from, tokens), expected, "from {from} of {tokens}");
    }
    assert_eq!(got_from(fine.layout(), coarse.layout(), 64, 200), [0, 96]);
    assert_eq!(blocks_filled(fine.layout(), 0, 200), [13, 3]);
    assert_eq!(blocks_filled(fine.layout(), 176, 200), [2, 2]);
}

#[test]
fn grants_of_windows_are_checked_from_their_first_position_on() {
    let map = mixed(16);
    let check = |first, window: &[u32]| {
        let window = BlockTable { first, ..ids(window) };
        let blocks = BlockTables(vec![ids(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]), window]);
        check_blocks(&map, &blocks, &[0, 160], 200).err().unwrap_or_default()
    };
    assert_eq!([check(10, &[3, 1, 2]), check(9, &[0, 3, 1, 2])], ["", ""]);
    assert_eq!(check(11, &[1, 2]), "group 1 has blocks 11 to 13, 200 tokens need 10 to 13");
    assert_eq!(check(10, &[1, 2]), "group 1 has blocks 10 to 12, 200 tokens need 10 to 13");
    assert_eq!(check(10, &[1, 2, 8]), "block 8 of group 1 is outside the pool of 8");
}

#[test]
fn a_window_moves_between_tables_that_begin_late() {
    let map = mixed(16);
    let (a, b) = (BlockTable { first: 10, ..ids(&[4, 5, 6]) }, BlockTable { first: 9, ..ids(&[0, 3, 2, 1]) });
    let heads = heads(&map);
    let (source, sink) = (Side { map: &map, blocks: &a, heads: &heads }, Side { map: &map, blocks: &b, heads: &heads });
    let mut runs = Vec::new();
    copies(source, sink, 1, 0, 160..200, 1 << 20, |run| runs.push(run));
    // 16 bytes a token; the group begins behind the 16 blocks of the full one.
    let at = |block: usize| (16 + block) * 256;
    let run = |from, to, tokens: usize| CopyRun { from: at(from), to: at(to), len: tokens * 16 };
    assert_eq!(runs, [run(4, 3, 16), run(5, 2, 16), run(6, 1, 8)]);
}

/// A full group, and one with states of 12 and 40 bytes in two layers.
fn recurrent(block_tokens: u32) -> KvPoolMap {
    let plane = |name, heads, dim| KvPlane::try_new(name, heads, dim, Dtype::F32).unwrap();
    let full = KvGroup { kind: GroupKind::Full, layers: vec![1], planes: vec![plane("k", 1, 8)] };
    let planes = vec![plane("conv", 3, 1), plane("state", 2, 5)];
    let state = KvGroup { kind: GroupKind::State, layers: vec![0, 2], planes };
    KvPoolMap::with_blocks(KvLayout::try_new(block_tokens, vec![full, state]).unwrap(), vec![16, 8]).unwrap()
}

#[test]
fn a_state_moves_as_the_last_granule() {
    let (fine, coarse) = (recurrent(16), recurrent(64));
    for (ours, theirs) in [(&fine, &fine), (&fine, &coarse), (&coarse, &fine), (&coarse, &coarse)] {
        let first = |from, tokens| first_moved(ours.layout(), theirs.layout(), from, tokens)[1];
        assert_eq!([first(0, 1), first(0, 16), first(0, 17), first(0, 200), first(192, 200)], [0, 0, 16, 192, 192]);
        assert_eq!(got_from(ours.layout(), theirs.layout(), 128, 200), [0, 64]);
    }
    assert_eq!(
        (blocks_filled(fine.layout(), 0, 200), blocks_filled(fine.layout(), 192, 200)),
        (vec![13, 1], vec![1, 1])
    );
    let group = &fine.layout().groups()[1];
    assert_eq!([group.rows(8), group.rows(200), group.rows(0)], [1, 1, 0]);
}

#[test]
fn a_state_is_one_copy_whatever_the_block_sizes() {
    let (fine, coarse) = (recurrent(16), recurrent(64));
    let sink = BlockTable { first: 3, ..ids(&[6]) };
    let source = BlockTable { first: 12, ..ids(&[5]) };
    for (layer, len_max, expected) in [(0, 1 << 20, vec![52]), (1, 1 << 20, vec![52]), (1, 40, vec![40, 12])] {
        let heads = heads(&fine);
        let from = Side { map: &fine, blocks: &source, heads: &heads };
        let to = Side { map: &coarse, blocks: &sink, heads: &heads };
        let mut runs = Vec::new();
        copies(from, to, 1, layer, 192..200, len_max, |run| runs.push(run));
        // Behind 16 blocks of the full group and 8 states a layer.
        let start = |rows: usize, state: usize| 16 * rows * 32 + (layer * 8 + state) * 52;
        assert_eq!(runs.iter().map(|run| run.len).collect::<Vec<_>>(), expected);
        assert_eq!((runs[0].from, runs[0].to), (start(16, 5), start(64, 6)));
    }
}

#[test]
fn a_grant_has_the_state_behind_the_last_position_and_no_other() {
    let map = recurrent(16);
    let check = |first, states: &[u32]| {
        let blocks = BlockTables(vec![ids(&[0, 1, 2, 3]), BlockTable { first, ..ids(states) }]);
        check_blocks(&map, &blocks, &[0, 48], 64).err().unwrap_or_default()
    };
    assert_eq!(check(3, &[7]), "");
    assert_eq!(check(3, &[8]), "block 8 of group 1 is outside the pool of 8");
    for (first, states) in [(3, vec![]), (3, vec![1, 2]), (2, vec![1, 2]), (2, vec![1]), (4, vec![1]), (0, vec![1])] {
        let said = check(first, &states);
        assert!(said.ends_with("the state behind 64 tokens has index 3"), "{first}, {states:?}: {said}");
    }
    // When a put begins, its states are still to come.
    let begin = |states| check_begin(&map, &BlockTables(vec![ids(&[0, 1, 2, 3]), ids(states)]), 64);
    assert_eq!([begin(&[]), begin(&[1])], [Ok(()), Ok(())]);
    assert!(begin(&[8]).is_err());
}

#[test]
fn a_source_has_the_state_behind_the_last_position() {
    let map = recurrent(16);
    let holds = |first, states: &[u32]| holds(&map, 1, &BlockTable { first, ..ids(states) }, &(48..64), 64);
    assert!(holds(3, &[1]));
    // Of an earlier step, or of positions behind; none, and more than one.
    assert_eq!([holds(0, &[1]), holds(2, &[1]), holds(4, &[1])], [false; 3]);
    assert_eq!([holds(3, &[]), holds(2, &[1, 2]), holds(3, &[1, 2])], [false; 3]);
}

#[test]
fn grants_are_checked() {
    let map = map(16, 4);
    let check = |blocks: &[&[u32]], tokens| {
        let blocks = BlockTables(blocks.iter().map(|b| ids(b)).collect());
        check_blocks(&map, &blocks, &[0], tokens).err().unwrap_or_default()
    };
    assert_eq!(check(&[&[0, 3]], 32), "");
    assert_eq!(check(&[&[0, 3]], 33), "group 0 has blocks 0 to 2, 33 tokens need 0 to 3");
    assert_eq!(check(&[&[0, 4]], 1), "block 4 of group 0 is outside the pool of 4");
    assert_eq!(check(&[&[1, 1]], 1), "block 1 of group 0 is there twice");
    assert_eq!(check(&[], 1), "0 block tables for 1 groups");
}

#[test]
fn parts_begin_with_a_block_and_are_not_empty() {
    let check = |block_tokens, from, tokens| check_from(&map(block_tokens, 4), from, tokens).err().unwrap_or_default();
    for whole in [check(16, 0, 1), check(16, 32, 33), check(48, 48, 64)] {
        assert_eq!(whole, "");
    }
    assert_eq!(check(16, 32, 32), "nothing is left of 32 tokens from position 32 on");
    assert_eq!(check(16, u32::MAX, 32), "nothing is left of 32 tokens from position 4294967295 on");
    assert_eq!(check(48, 32, 64), "no block of 48 tokens begins with position 32");
    assert_eq!(check(16, 8, 64), "no block of 16 tokens begins with position 8");
}

fn layout(block_tokens: u32, planes: &[u32]) -> KvLayout {
    let planes = planes.iter().enumerate();
    let planes = planes.map(|(i, &dim)| KvPlane::try_new(format!("p{i}"), 1, dim, Dtype::F32).unwrap()).collect();
    KvLayout::try_new(block_tokens, vec![KvGroup { kind: GroupKind::Full, layers: vec![0, 1], planes }]).unwrap()
}

proptest! {
    /// Every token of every plane arrives where the sink expects it, exactly once.
    #[test]
    fn copies_move_each_byte_once(
        a in prop::sample::select(vec![16u32, 32, 48, 128]),
        b in prop::sample::select(vec![16u32, 32, 64, 112]),
        planes in prop::collection::vec(1u32..5, 1..5),
        tokens in 1u32..300,
        start_block in 0u32..4,
        seed in any::<u64>(),
        len_max in 1usize..5000,
    ) {
        let shuffled = |blocks: u32, seed: u64| {
            let mut ids: Vec<_> = (0..blocks).map(BlockId).collect();
            ids.sort_by_key(|b| (u64::from(b.0) + 1).wrapping_mul(seed | 1) >> 7);
            BlockTable::from_start(ids)
        };
        let (from, to) = (KvPoolMap::try_new(layout(a, &planes), 20).unwrap(), KvPoolMap::try_new(layout(b, &planes), 20).unwrap());
        let (source, sink) = (shuffled(20, seed), shuffled(20, seed.rotate_left(20)));
        let heads = heads(&from);
        let source = Side { map: &from, blocks: &source, heads: &heads };
        let sink = Side { map: &to, blocks: &sink, heads: &heads };
        let tokens = (start_block * 16).min(tokens - 1) / 16 * 16..tokens;
        let mut origin = vec![usize::MAX; to.bytes()];
        copies(source, sink, 0, 1, tokens.clone(), len_max, |run| {
            assert!(run.len <= len_max);
            for i in 0..run.len {
                assert_eq!(std::mem::replace(&mut origin[run.to + i], run.from + i), usize::MAX, "written twice");
            }
        });
        let mut moved = 0;
        for token in tokens.clone() {
            for (p, plane) in from.layout().groups()[0].planes.iter().enumerate() {
                for byte in 0..plane.token_stride() {
                    prop_assert_eq!(origin[sink.offset(0, 1, p, token) + byte], source.offset(0, 1, p, token) + byte);
                    moved += 1;
                }
            }
        }
        prop_assert_eq!(origin.iter().filter(|&&o| o != usize::MAX).count(), moved);
    }
}
