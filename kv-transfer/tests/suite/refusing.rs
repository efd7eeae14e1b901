//! What must not begin, does not.

use super::{a_start, pair};
use crate::common::*;
use baton_kv_transfer::*;
use baton_types::*;
use std::time::Instant;

pub fn no_room_is_told(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    *sink.sink.room.lock().unwrap() = Room::None;
    let (put, _) = source.offer(&sink.peer(), "dropped", 16, 1);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::NoRoom, .. }), "{failure}");
    *sink.sink.room.lock().unwrap() = Room::Ready;
    let hog = sink.pool.take(20, 0);
    let (put, _) = source.offer(&sink.peer(), "huge", 24 * 16, 1);
    assert!(matches!(put.wait().unwrap_err(), HandoffFailure::Refused { reason: RefuseReason::NoRoom, .. }));
    drop(hog);
    eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
    assert!(sink.sink.failures().is_empty(), "the worker's own refusal is no failure");
}

pub fn a_sink_that_does_not_adopt_is_told(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    *sink.sink.adopt.lock().unwrap() = Err("cancelled meanwhile".into());
    let (put, _) = source.offer(&sink.peer(), "r", 16, 1);
    source.send_all(&put, 16);
    let failure = put.wait().unwrap_err();
    assert!(failure.to_string().contains("cancelled meanwhile"), "{failure}");
    eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
}

/// Two handoffs of as many tokens under one name. The first was claimed at a start of the sink that is gone; the second is claimed at
/// the start that answers at its address now, and nothing else is. What comes of each, and whose KV the claim ends up with.
struct ToAnotherStart {
    results: [Result<PutReport, HandoffFailure>; 2],
    /// Of the second handoff, as it was sent, and of the blocks that the claim was given.
    claimed: Vec<u8>,
    adopted: Vec<u8>,
}

fn to_another_start(choice: &TransportChoice, hazard: Option<Hazard>) -> ToAnotherStart {
    let start = |name, incarnation| a_start(choice, name, incarnation, hazard);
    let (source, sink) = (start("p", 1), start("d", 2));
    sink.sink.claim("r", source.transfer.party(), 16);
    let now = sink.peer();
    let before = Peer { party: Party { incarnation: Incarnation(1), ..now.party.clone() }, ..now.clone() };
    let mut claimed = Vec::new();
    let results = [(before, 1), (now, 2)].map(|(peer, seed)| {
        let (put, blocks) = source.offer(&peer, "r", 16, seed);
        claimed = source.bytes_of(&blocks, 16);
        source.send_all(&put, 16);
        put.wait()
    });
    let handoff = sink.sink.take_adopted("r").expect("adopted");
    let adopted = sink.bytes_of(handoff.hold.blocks(), 16);
    drop(handoff);
    eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
    assert!(sink.sink.failures().is_empty());
    ToAnotherStart { results, claimed, adopted }
}

pub fn without_incarnations_another_start_adopts_what_it_never_claimed(choice: &TransportChoice) {
    let came = to_another_start(choice, Some(Hazard::AnyIncarnation));
    assert!(came.results[0].is_ok(), "{:?}: the test beside this one shows nothing", came.results);
    assert!(came.adopted != came.claimed, "the claim was filled with KV of what it does not stand for");
    let [_, Err(HandoffFailure::Refused { reason: RefuseReason::UnknownRequest, .. })] = came.results else {
        panic!("{:?}: its own KV finds no claim any more", came.results);
    };
}

pub fn another_incarnation_is_refused(choice: &TransportChoice) {
    let came = to_another_start(choice, None);
    let [Err(HandoffFailure::Refused { reason: RefuseReason::WrongIncarnation, .. }), Ok(_)] = came.results else {
        panic!("{:?}", came.results);
    };
    assert!(came.adopted == came.claimed, "other KV than what was claimed");
}

/// A stranger who greets the source in the sink's name, before the source has met the sink.
pub fn what_a_peer_calls_itself_leads_nobody_to_it(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let impostor = a_start(choice, "d", 1, None);
    let (put, _) = impostor.offer(&source.peer(), "greeting", 16, 1);
    impostor.send_all(&put, 16);
    put.wait().unwrap();
    drop(source.sink.take_adopted("greeting"));
    impostor.serve("s", 40, 6);

    let (put, blocks) = source.offer(&sink.peer(), "r", 40, 2);
    source.send_all(&put, 40);
    put.wait().unwrap();
    assert!(impostor.sink.take_adopted("r").is_none(), "KV went to whoever took the sink's name");
    sink.check_adopted("r", &source, &blocks, 40);

    let served = sink.serve("s", 40, 5);
    let (get, read) = source.get(&sink.peer(), "s", 40, Instant::now() + PATIENCE);
    let got = get.wait().unwrap();
    assert!(source.bytes_of(&read, 40) == sink.bytes_of(&served, 40), "somebody else's KV was read");
    drop(got);
    sink.evict("s");
    impostor.evict("s");
    eventually("all pools are whole", || source.is_quiet() && sink.is_quiet() && impostor.is_quiet());
}

/// Whoever does not know which start of which instance is here is not told, unless it has proven that it is a worker of the cluster.
pub fn a_stranger_is_told_nothing(choice: &TransportChoice) {
    let sink = a_start(choice, "victim", 0xfeed, None);
    let stranger = a_start(choice, "stranger", 1, None);
    let guess = Party { instance: InstanceId::try_new("nobody").unwrap(), incarnation: Incarnation(0) };
    let (put, _) = stranger.offer(&Peer { party: guess, ..sink.peer() }, "r", 16, 1);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::WrongIncarnation, .. }), "{failure}");
    let said = failure.to_string();
    let is_told = ["victim", "feed", "0101"].iter().any(|secret| said.contains(secret));
    assert_eq!(is_told, is_in_tls(), "{said}");
}

/// As many peers connect to an instance as it may connect to, and it still connects to others.
pub fn peers_that_connect_take_no_place_of_those_connected_to(choice: &TransportChoice) {
    let mut config = NodeConfig::new("p", small(16), 24);
    config.limits.peers_max = 2;
    let node = config.start(choice.clone());
    let others = ["a", "b", "c"].map(|name| a_start(choice, name, 1, None));
    let give = |from: &Node, to: &Node| {
        let (put, blocks) = from.offer(&to.peer(), "r", 16, 1);
        from.send_all(&put, 16);
        put.wait().map(|_| to.check_adopted("r", from, &blocks, 16))
    };
    others.iter().for_each(|other| give(other, &node).unwrap());
    assert_eq!(node.transfer.stats().peers.len(), 3);
    others[..2].iter().for_each(|other| give(&node, other).unwrap());
    let failure = give(&node, &others[2]).unwrap_err();
    assert!(matches!(&failure, HandoffFailure::PeerLost(why) if why.contains("2 are open, of 2")), "{failure}");
}

/// The beginning of a head of the first token, where a node's own layout has it.
fn head_of(node: &Node, blocks: &BlockTables, head: usize) -> Vec<u8> {
    let plane = &node.map.layout().groups()[0].planes[0];
    let start = node.map.token_range(0, 0, blocks.0[0].blocks[0], 0, 0..1).start + head * plane.head_stride();
    let mut bytes = vec![0; 16];
    node.read(start, &mut bytes);
    bytes
}

/// A handoff to as many bytes a token, in other heads.
fn to_other_heads(
    choice: &TransportChoice,
    hazard: Option<Hazard>,
) -> (Result<PutReport, HandoffFailure>, Node, Node, BlockTables) {
    let start = |name, heads, dim| {
        let mut config = NodeConfig::new(name, KvLayout::llama(16, 2, heads, dim, Dtype::Bf16).unwrap(), 24);
        config.hazards = hazard.into();
        config.start(choice.clone())
    };
    let (source, sink) = (start("p", 2, 24), start("d", 3, 16));
    let (put, sent) = source.offer(&sink.peer(), "r", 16, 1);
    source.send_all(&put, 16);
    (put.wait(), source, sink, sent)
}

pub fn heads_are_never_taken_for_others(choice: &TransportChoice) {
    let (result, source, sink, _) = to_other_heads(choice, None);
    let failure = result.unwrap_err();
    assert!(matches!(failure, HandoffFailure::Incompatible { .. }), "{failure}");
    let said = failure.to_string();
    assert!(["KV layout", "k[2x24 bf16]", "k[3x16 bf16]"].iter().all(|part| said.contains(part)), "{said}");
    assert!(sink.sink.take_adopted("r").is_none());
    assert_eq!(source.transfer.stats().total.puts, 0);
    eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
}

pub fn without_fingerprints_heads_are_taken_for_others(choice: &TransportChoice) {
    let (result, source, sink, sent) = to_other_heads(choice, Some(Hazard::AnyFingerprint));
    assert!(result.is_ok(), "{result:?}: the test beside this one shows nothing");
    let adopted = sink.sink.take_adopted("r").unwrap();
    assert!(head_of(&sink, adopted.hold.blocks(), 0) == head_of(&source, &sent, 0));
    assert!(head_of(&sink, adopted.hold.blocks(), 1) != head_of(&source, &sent, 1), "another head is what was sent");
}

pub fn the_newest_common_protocol_is_enough(choice: &TransportChoice) {
    let start = |name, min, max| {
        let mut config = NodeConfig::new(name, small(16), 24);
        config.protocol = ProtocolRange { min, max };
        config.start(choice.clone())
    };
    let sink = start("d", 2, 3);
    for (source, pairs) in [(start("p-1", 1, 2), true), (start("p-2", 3, 4), true), (start("p-3", 4, 5), false)] {
        let (put, blocks) = source.offer(&sink.peer(), "r", 16, 1);
        source.send_all(&put, 16);
        match put.wait() {
            Ok(_) => sink.check_adopted("r", &source, &blocks, 16),
            Err(failure) => {
                assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Protocol, .. }), "{failure}");
                let said = failure.to_string();
                assert!(said.contains("speaks protocols 4 to 5") && said.contains(" 2 to 3"), "{said}");
                assert!(!pairs && source.transfer.stats().total.puts == 0);
            }
        }
        eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
    }
}

pub fn another_class_or_layout_is_refused_with_both_sides_named(choice: &TransportChoice) {
    let source = NodeConfig::new("p", small(16), 24).start(choice.clone());
    let mut other_model = NodeConfig::new("d", small(16), 24);
    other_model.model = 2;
    let wide = KvLayout::llama(16, 2, 2, 32, Dtype::Bf16).unwrap();
    let mut other_revision = NodeConfig::new("d", small(16), 24);
    other_revision.kernel_revision = 2;
    let cases = [
        (other_revision, ["numerics class", "/r1,", "/r2"]),
        (other_model, ["model fingerprint", "0101", "0202"]),
        (NodeConfig::new("d", wide, 24), ["KV layout", "k[2x24 bf16]", "k[2x32 bf16]"]),
    ];
    for (config, said) in cases {
        let sink = config.start(choice.clone());
        let (put, _) = source.offer(&sink.peer(), "r", 16, 1);
        source.send_all(&put, 16);
        let failure = put.wait().unwrap_err();
        assert!(matches!(failure, HandoffFailure::Incompatible { .. }), "{failure}");
        for part in said {
            assert!(failure.to_string().contains(part), "{part} in {failure}");
        }
        assert_eq!(source.transfer.stats().total.puts, 0);
        eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
        sink.stop();
        eventually("the sink is gone", || source.transfer.stats().peers.is_empty());
    }
}

pub fn impossible_blocks_are_refused_at_once(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let open = |blocks: Vec<u32>, tokens| {
        let blocks = BlockTables::from_start(GroupBlocks(vec![blocks.into_iter().map(BlockId).collect()]));
        let request_id = RequestId::try_new("r").unwrap();
        let deadline = Instant::now() + PATIENCE;
        source.transfer.put(&sink.peer(), PutRequest { request_id, tokens, blocks, deadline, hold: Box::new(()) })
    };
    for (blocks, tokens) in [(vec![0], 17), (vec![24], 1), (vec![1, 1], 32), (vec![0], 0)] {
        assert!(matches!(open(blocks, tokens), Err(TransferError::Blocks(_))));
    }
    let short = open(vec![3], 4).unwrap();
    short.finish(CommitPayload { tokens: vec![1, 2], prompt_len: 2, extra: vec![] });
    assert!(matches!(short.wait(), Err(HandoffFailure::Protocol(_))), "a commit must name the tokens moved");
}
