//! States: one block moves, whole, and never that of an earlier chunk.

use super::failing::{CHECKSUMS, in_every_phase};
use crate::common::parts::overlay;
use crate::common::*;
use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HELLO: u8 = 1;
/// Grants of all forms.
const GRANTS: [u8; 3] = [5, 18, 20];
/// The bit by which a peer says that it moves states.
const STATES: u64 = 8;
/// Block sizes of the two sides.
const SIZES: [(u32, u32); 3] = [(16, 16), (16, 64), (64, 16)];

/// Two layers that keep everything, one with a window if wanted, and two with a state, which are the last group.
fn hybrid(block_tokens: u32, with_window: bool) -> KvLayout {
    let plane = |name, heads, dim, dtype| KvPlane::try_new(name, heads, dim, dtype).unwrap();
    let rows = || vec![plane("k", 1, 24, Dtype::Bf16), plane("v", 1, 8, Dtype::Bf16)];
    let state = vec![plane("conv", 3, 20, Dtype::F32), plane("state", 2, 600, Dtype::F32)];
    let mut groups = vec![KvGroup { kind: GroupKind::Full, layers: vec![0, 3], planes: rows() }];
    if with_window {
        groups.push(KvGroup { kind: GroupKind::Window(40), layers: vec![4], planes: rows() });
    }
    groups.push(KvGroup { kind: GroupKind::State, layers: vec![1, 2], planes: state });
    KvLayout::try_new(block_tokens, groups).unwrap()
}

fn nodes(choice: &TransportChoice, (ours, theirs): (u32, u32), with_window: bool) -> (Node, Node) {
    let start = |name, size| NodeConfig::new(name, hybrid(size, with_window), 24).start(choice.clone());
    (start("p", ours), start("d", theirs))
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn quiet(a: &Node, b: &Node) {
    eventually("both pools are whole", || a.is_quiet() && b.is_quiet());
}

/// Bytes of one state in all layers.
fn state_bytes(node: &Node) -> u64 {
    let group = node.map.layout().groups().last().unwrap();
    group.block_bytes(node.map.layout().block_tokens()) as u64
}

/// The first `from` of `tokens` tokens that one side has already: none, or as many whole blocks of `size` as leave some.
fn starts(tokens: u32, size: u32) -> Vec<u32> {
    let most = (tokens - 1) / size * size;
    if most == 0 { vec![0] } else { vec![0, most] }
}

pub fn states_arrive_whole(choice: &TransportChoice) {
    for (sizes, with_window) in SIZES.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]) {
        let (source, sink) = nodes(choice, sizes, with_window);
        sink.fill_pool(7);
        let mut expected = sink.whole_pool();
        for (seed, tokens) in [1, 16, 17, 100, 128].into_iter().enumerate() {
            for from in starts(tokens, sizes.1) {
                sink.cache(move |_| from);
                let (put, blocks) = source.offer(&sink.peer(), "r", tokens, 11 + seed as u64);
                source.send_all(&put, tokens);
                let report = put.wait().unwrap();
                let moved = source.places(&blocks, from..tokens);
                assert_eq!(report.bytes, moved.iter().map(|place| place.len() as u64).sum::<u64>());
                drop(sink.take_part("r", (&source, &blocks), from..tokens, &mut expected));
                let case = format!("{from}..{tokens} in blocks of {sizes:?}, window: {with_window}");
                assert!(sink.whole_pool() == expected, "{case}: other bytes arrived, or some beside them");
                quiet(&source, &sink);
            }
        }
    }
}

pub fn states_are_read_whole(choice: &TransportChoice) {
    for (sizes, with_window) in SIZES.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]) {
        let (reader, owner) = nodes(choice, sizes, with_window);
        reader.fill_pool(7);
        let mut expected = reader.whole_pool();
        for (seed, tokens) in [16, 64, 128, 130].into_iter().enumerate() {
            for from in starts(tokens, sizes.0.max(sizes.1)) {
                let served = owner.serve("s", tokens, 11 + seed as u64);
                let (get, blocks) = reader.get_part(&owner.peer(), "s", from..tokens, soon());
                let got = get.unwrap().wait().unwrap();
                let bytes = owner.read_all(&owner.places(&served, from..tokens));
                assert_eq!(got.bytes, bytes.len() as u64);
                overlay(&mut expected, &reader.places(&blocks, 0..tokens - from), &bytes);
                let case = format!("{from}..{tokens} in blocks of {sizes:?}, window: {with_window}");
                assert!(reader.whole_pool() == expected, "{case}: other bytes were read, or some beside them");
                owner.evict("s");
                drop(got);
                quiet(&reader, &owner);
            }
        }
    }
}

/// A prompt of 40 tokens in chunks of 24, 12 and 4. Each leaves a state that the next one reads.
pub fn an_early_state_is_never_sent(choice: &TransportChoice) {
    for size in [16, 64] {
        let (source, sink) = nodes(choice, (16, size), false);
        let (hold, more) = (source.pool.take(3, 5).unwrap(), source.pool.take(1, 6).unwrap());
        let (early, last) = (hold.blocks.0[1].blocks[0], more.blocks.0[1].blocks[0]);
        let table = |first, states: &[BlockId]| {
            let mut blocks = hold.blocks.clone();
            blocks.0[1] = BlockTable { first, blocks: states.to_vec() };
            blocks
        };
        let (begun, grown, behind) = (table(0, &[early]), table(1, &[early]), table(2, &[last]));
        source.fill(&table(1, &[early, last]), 5);
        let request = PutRequest {
            request_id: RequestId::try_new("r").unwrap(),
            tokens: 40,
            blocks: begun,
            deadline: soon(),
            hold: Box::new((hold, more)),
        };
        let put = source.transfer.put(&sink.peer(), request).unwrap();
        let (manual, done) = (Arc::new(ManualFence::default()), Arc::new(AlreadyDone) as Fence);
        put.grown(grown);
        (0..4).for_each(|layer| put.layer_launched(layer, 24, &done));
        let put_bytes = || source.transfer.stats().total.bytes_put;
        let stays_at = |rows: usize| {
            let bytes = (source.map.layout().bytes_per_token() * rows) as u64;
            eventually("the KV is written", || put_bytes() >= bytes);
            std::thread::sleep(Duration::from_millis(30));
            assert_eq!(put_bytes(), bytes, "and nothing else");
        };
        stays_at(16);
        put.grown(behind.clone());
        // A chunk that ends within the last granule, in whose place the state moves.
        (0..4).for_each(|layer| put.layer_launched(layer, 36, &done));
        stays_at(32);
        for layer in 0..4 {
            let fence = if [1, 2].contains(&layer) { manual.clone() as Fence } else { done.clone() };
            put.layer_launched(layer, 40, &fence);
        }
        // Fences are awaited in order: the first layer's rows, and none behind a state.
        let first = source.map.layout().groups()[0].token_bytes() as u64 * 8;
        let before = (source.map.layout().bytes_per_token() * 32) as u64;
        eventually("the first layer is written", || put_bytes() >= before + first);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(put_bytes(), before + first, "no state before its fence");
        manual.set(FenceStatus::Done);
        put.finish(commit(40));
        let report = put.wait().unwrap();
        assert_eq!(report.bytes, (source.map.layout().bytes_per_token() * 40) as u64 + state_bytes(&source));
        sink.check_adopted("r", &source, &behind, 40);
        quiet(&source, &sink);
    }
}

/// States as large as those of Qwen3-Next are cut into several writes, which end within their rows and over several epochs.
pub fn a_large_state_moves_in_pieces(choice: &TransportChoice) {
    let plane = |name, heads, dim| KvPlane::try_new(name, heads, dim, Dtype::F32).unwrap();
    let groups = [
        (GroupKind::Full, vec![plane("k", 1, 8)]),
        (GroupKind::State, vec![plane("conv", 3, 8192), plane("state", 32, 128 * 128)]),
    ];
    let layer = |(layer, (kind, planes)): (usize, &(GroupKind, Vec<KvPlane>))| {
        let layers = if *kind == GroupKind::State { vec![0, 2] } else { vec![layer as u32 + 1] };
        KvGroup { kind: *kind, layers, planes: planes.clone() }
    };
    let start = |name, size| {
        let layout = KvLayout::try_new(size, groups.iter().enumerate().map(layer).collect()).unwrap();
        let mut config = NodeConfig::new(name, layout, 2);
        (config.limits.put_bytes_max, config.limits.epoch_bytes) = (300_001, 1 << 20);
        config.start(choice.clone())
    };
    let (source, sink) = (start("p", 16), start("d", 64));
    let (put, blocks) = source.offer(&sink.peer(), "r", 20, 5);
    source.send_all(&put, 20);
    put.wait().unwrap();
    sink.check_adopted("r", &source, &blocks, 20);
    quiet(&source, &sink);
    let served = source.serve("s", 20, 7);
    let (get, blocks) = sink.get(&source.peer(), "s", 20, soon());
    let got = get.wait().unwrap();
    assert!(sink.bytes_of(&blocks, 20) == source.bytes_of(&served, 20), "other bytes were read");
    source.evict("s");
    drop(got);
    quiet(&source, &sink);
}

pub fn an_abort_in_every_phase_frees_states(choice: &TransportChoice) {
    in_every_phase(nodes(choice, (16, 64), true), |_, _, put| put.abort("the client went away"));
}

/// Places of the first and last byte of each plane of a state in each layer.
fn edges(node: &Node, state: BlockId) -> Vec<usize> {
    let group = node.map.layout().groups().len() - 1;
    let planes = [0, 1].into_iter().flat_map(|layer| [(layer, 0), (layer, 1)]);
    let range = |(layer, plane)| node.map.token_range(group, layer, state, plane, 0..1);
    planes.map(range).flat_map(|range| [range.start, range.end - 1]).collect()
}

/// From now on a byte is damaged before checksums are sent, behind the flush.
fn damage(sender: &Node, at: (&Node, usize), byte: u8) {
    let (memory, place) = (at.0.memory.clone(), at.1);
    sender.gate.bend(move |message| {
        if message[3] == CHECKSUMS {
            memory.write_by(soon(), place, &[byte ^ 0x40]).unwrap();
        }
        vec![message]
    });
}

pub fn a_damaged_byte_of_a_state_is_never_adopted(choice: &TransportChoice) {
    let (source, sink) = nodes(choice, (64, 16), true);
    let state = |node: &Node, seed| *node.pool.take(7, seed).unwrap().blocks.0[2].blocks.last().unwrap();
    let places = edges(&source, state(&source, 5)).into_iter().zip(edges(&sink, state(&sink, 0x9e37_79b9)));
    for (ours, theirs) in places.collect::<Vec<_>>() {
        let (put, blocks) = source.offer(&sink.peer(), "r", 100, 5);
        assert!(edges(&source, blocks.0[2].blocks[0]).contains(&ours), "the pool gives the same blocks again");
        let mut byte = [0];
        source.read(ours, &mut byte);
        damage(&source, (&sink, theirs), byte[0]);
        source.send_all(&put, 100);
        let failure = put.wait().unwrap_err();
        assert!(matches!(failure, HandoffFailure::Corrupt(_)), "{failure}");
        assert!(failure.to_string().contains("of the state behind 100 tokens"), "{failure}");
        assert!(sink.sink.take_adopted("r").is_none());
        quiet(&source, &sink);
    }
    source.gate.bend(|message| vec![message]);
    let (put, blocks) = source.offer(&sink.peer(), "after", 100, 5);
    source.send_all(&put, 100);
    put.wait().unwrap();
    sink.check_adopted("after", &source, &blocks, 100);
}

pub fn a_damaged_byte_of_a_state_that_is_read_is_found(choice: &TransportChoice) {
    let (reader, owner) = nodes(choice, (16, 64), false);
    let served = owner.serve("s", 128, 5);
    for edge in 0..8 {
        let mut byte = [0];
        owner.read(edges(&owner, served.0[1].blocks[0])[edge], &mut byte);
        reader.gate.hold(HoldPoint::Gets);
        let (get, blocks) = reader.get(&owner.peer(), "s", 128, soon());
        damage(&owner, (&reader, edges(&reader, blocks.0[1].blocks[0])[edge]), byte[0]);
        reader.gate.open(HoldPoint::Gets);
        let failure = get.wait().unwrap_err();
        assert!(matches!(failure, HandoffFailure::Corrupt(_)), "{failure}");
        assert!(failure.to_string().contains("of the state behind 128 tokens"), "{failure}");
    }
    owner.evict("s");
    quiet(&reader, &owner);
}

/// A source that is told of another block than is granted to it: where the sink sees writes, none is stored there.
pub fn another_state_than_was_granted_is_never_adopted(choice: &TransportChoice) {
    let (source, sink) = nodes(choice, (16, 16), false);
    sink.fill_pool(7);
    let granted = sink.pool.take(3, 0x9e37_79b9).unwrap().blocks.0[1].blocks[0];
    let other = BlockId((granted.0 + 1) % 24);
    sink.gate.bend(move |mut message| {
        if GRANTS.contains(&message[3]) {
            let at = message.len() - 4;
            message[at..].copy_from_slice(&other.0.to_le_bytes());
        }
        vec![message]
    });
    let before = sink.whole_pool();
    let (put, _) = source.offer(&sink.peer(), "r", 40, 5);
    source.send_all(&put, 40);
    let failure = put.wait().unwrap_err();
    assert!(sink.sink.take_adopted("r").is_none(), "{failure}");
    if matches!(choice, TransportChoice::Ucx { writes: UcxWrites::OneSided, .. }) {
        return;
    }
    let after = sink.whole_pool();
    for (layer, plane) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for block in (0..24).map(BlockId).filter(|block| *block != granted) {
            let place = sink.map.token_range(1, layer, block, plane, 0..1);
            assert!(after[place.clone()] == before[place], "state {block} was written: {failure}");
        }
    }
}

pub fn peers_that_move_no_states_are_told(choice: &TransportChoice) {
    let (source, sink) = nodes(choice, (16, 16), false);
    source.gate.bend(|mut message| {
        if message[3] == HELLO {
            message[12] &= !(STATES as u8);
        }
        vec![message]
    });
    let (put, _) = source.offer(&sink.peer(), "r", 40, 5);
    let failure = put.wait().unwrap_err();
    assert!(failure.to_string().contains("states, which the peer does not move"), "{failure}");
    quiet(&source, &sink);
}

pub fn blocks_of_states_that_cannot_be_are_refused(choice: &TransportChoice) {
    let (source, sink) = nodes(choice, (16, 16), false);
    // Tables of before the first chunk and of an earlier one: the source was not told of its last block.
    for first in [0, 2] {
        let mut hold = source.pool.take(4, 5).unwrap();
        hold.blocks.0[1].first = first;
        let request = PutRequest {
            request_id: RequestId::try_new("r").unwrap(),
            tokens: 64,
            blocks: hold.blocks.clone(),
            deadline: soon(),
            hold,
        };
        let put = source.transfer.put(&sink.peer(), request).unwrap();
        source.send_all(&put, 64);
        let failure = put.wait().unwrap_err();
        assert!(matches!(&failure, HandoffFailure::Aborted(detail) if detail.contains("not named")), "{failure}");
        assert!(sink.sink.take_adopted("r").is_none());
        quiet(&source, &sink);
    }
    // A get into a block that is not that of the last position.
    let mut hold = source.pool.take(4, 5).unwrap();
    hold.blocks.0[1].first = 2;
    let (request_id, name, blocks) = (RequestId::try_new("r").unwrap(), b"s".to_vec(), hold.blocks.clone());
    let request = GetRequest { request_id, name, from: 0, tokens: 64, blocks, deadline: soon(), hold };
    let refused = source.transfer.get(&sink.peer(), request);
    let told = "group 1 has blocks 2 to 3, the state behind 64 tokens has index 3";
    assert!(matches!(&refused, Err(TransferError::Blocks(detail)) if detail == told), "{refused:?}");
    quiet(&source, &sink);
}
