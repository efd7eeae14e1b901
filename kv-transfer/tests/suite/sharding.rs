//! Instances of several shards, stood in for by pools that hold a part of the KV heads each.

use super::failing::{COMMIT, OFFER};
use crate::common::*;
use baton_kv_transfer::shards::Assembly;
use baton_kv_transfer::*;
use baton_types::*;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const HEADS: u32 = 4;
const DIM: u32 = 24;
const TOKENS: u32 = 70;
/// Of what sinks have already.
const CACHED_SEED: u32 = 1 << 20;

/// One instance.
struct Sharded {
    shards: Vec<Node>,
    joint: Arc<Joint>,
}

impl Drop for Sharded {
    fn drop(&mut self) {
        // Its handlers hold its services.
        self.joint.transfers.lock().unwrap().clear();
    }
}

impl Sharded {
    fn start(name: &'static str, of: u16, block_tokens: u32, choice: &TransportChoice) -> Self {
        let (assembly, adopted, transfers) = (Assembly::new(of), Mutex::default(), Mutex::default());
        let joint = Arc::new(Joint { assembly, adopted, transfers });
        let start = |index| {
            let layout = KvLayout::llama(block_tokens, 2, HEADS, DIM, Dtype::Bf16).unwrap();
            let mut config = NodeConfig::new(name, layout, 24);
            (config.shard, config.joint) = (HeadShard::try_new(index, of).unwrap(), Some(joint.clone()));
            config.seed = 31 + u64::from(index);
            config.start(choice.clone())
        };
        let shards: Vec<_> = (0..of).map(start).collect();
        joint.transfers.lock().unwrap().extend(shards.iter().map(|node| node.transfer.clone()));
        Self { shards, joint }
    }

    fn of(&self) -> u16 {
        self.shards.len() as u16
    }

    fn shard(&self, index: u16) -> HeadShard {
        HeadShard::try_new(index, self.of()).unwrap()
    }

    /// Every head of every token that a shard holds, as its place in the pool and its place in the whole.
    fn heads(&self, shard: usize, blocks: &BlockTables) -> Vec<(usize, [u32; 4])> {
        let mut all = Vec::new();
        let node = &self.shards[shard];
        let (size, heads) = (node.map.layout().block_tokens(), HEADS / self.shards.len() as u32);
        for (layer, plane) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for token in 0..TOKENS {
                let (block, at) = (blocks.0[0].blocks[(token / size) as usize], token % size);
                let start = node.map.token_range(0, layer, block, plane, at..at + 1).start;
                for head in 0..heads {
                    let whole = shard as u32 * heads + head;
                    all.push((start + (head * DIM * 2) as usize, [layer as u32, plane as u32, token, whole]));
                }
            }
        }
        all
    }

    fn fill(&self, shard: usize, blocks: &BlockTables, seed: u32) {
        let heads = self.heads(shard, blocks).into_iter();
        self.shards[shard].write_all(heads.map(|(at, place)| (at, noise(seed, place).to_vec())));
    }

    /// Offers a sequence from every shard to every shard of `to` that holds heads of it, and sends it.
    fn offer(&self, to: &Sharded, request: &str, seed: u32) -> Vec<PutHandle> {
        let legs = self.open(to, request, seed);
        let send = |(index, leg): (usize, PutHandle)| {
            self.shards[index].send_all(&leg, TOKENS);
            leg
        };
        legs.into_iter().map(send).collect()
    }

    /// Offers a sequence in the same way and sends nothing; each leg with the shard that it is of.
    fn open(&self, to: &Sharded, request: &str, seed: u32) -> Vec<(usize, PutHandle)> {
        let mut legs = Vec::new();
        for (index, node) in self.shards.iter().enumerate() {
            let count = node.map.layout().blocks_for(TOKENS as usize);
            let hold = Arc::new(*node.pool.take(count, u64::from(seed)).expect("the pool has room"));
            let blocks = hold.blocks.clone();
            self.fill(index, &blocks, seed);
            for partner in self.shard(index as u16).partners(to.of()) {
                let peer = Peer { shard: partner, ..to.shards[usize::from(partner)].peer() };
                let (request_id, deadline) = (RequestId::try_new(request).unwrap(), Instant::now() + PATIENCE);
                let hold = Box::new(hold.clone());
                let request = PutRequest { request_id, tokens: TOKENS, blocks: blocks.clone(), deadline, hold };
                legs.push((index, node.transfer.put(&peer, request).unwrap()));
            }
        }
        legs
    }

    fn check_adopted(&self, request: &str, seed: u32) {
        self.check_adopted_from(request, seed, 0);
    }

    /// Every shard has what it had of the first positions, and what was sent of the others.
    fn check_adopted_from(&self, request: &str, seed: u32, from: u32) {
        let parts = self.joint.adopted.lock().unwrap().remove(request).expect("adopted");
        assert_eq!(parts.len(), self.shards.len());
        for (index, part) in parts.iter().enumerate() {
            assert_eq!(part.tokens, commit(TOKENS).tokens);
            assert_eq!(part.cached_tokens, from);
            let heads = self.heads(index, part.hold.blocks());
            let ranges: Vec<_> = heads.iter().map(|(at, _)| *at..at + DIM as usize * 2).collect();
            let all = self.shards[index].read_all(&ranges);
            for ((_, place), bytes) in heads.into_iter().zip(all.chunks_exact(DIM as usize * 2)) {
                let seed = if place[2] < from { CACHED_SEED } else { seed };
                assert!(bytes == noise(seed, place), "{request}, shard {index}: other bytes at {place:?}");
            }
        }
    }

    fn quiet(&self) {
        eventually("all pools are whole", || self.shards.iter().all(Node::is_quiet));
        assert!(self.shards.iter().all(|node| node.pool.quarantined() == 0));
    }
}

/// Bytes of one head of one token.
fn noise(seed: u32, place: [u32; 4]) -> [u8; DIM as usize * 2] {
    let start =
        place.iter().fold(u64::from(seed), |state, at| (state ^ u64::from(*at)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    std::array::from_fn(|i| (start.rotate_left(i as u32 * 5).wrapping_mul(i as u64 | 1) >> 24) as u8)
}

fn works(source: &Sharded, sink: &Sharded, seed: u32) {
    for leg in source.offer(sink, "works", seed) {
        leg.wait().unwrap();
    }
    sink.check_adopted("works", seed);
    source.quiet();
    sink.quiet();
}

/// A handoff that arrives, one that fails when all but one leg of it is whole, at either end, and one more.
fn shards(choice: &TransportChoice, sources: u16, sinks: u16) {
    let (source, sink) = (Sharded::start("p", sources, 16, choice), Sharded::start("d", sinks, 32, choice));
    works(&source, &sink, 1);
    let last_sink = &sink.shards[usize::from(sinks) - 1];
    last_sink.gate.hold(HoldPoint::Verify);
    let legs = source.offer(&sink, "late", 2);
    let held = sink.shard(sinks - 1).partners(sources).len();
    eventually("the last sink holds", || last_sink.transfer.stats().held == held);
    assert!(sink.joint.adopted.lock().unwrap().is_empty());
    last_sink.transfer.cancel(&RequestId::try_new("late").unwrap(), "it fails late");
    legs.into_iter().for_each(|leg| assert!(leg.wait().is_err(), "a part was adopted without the others"));
    last_sink.gate.open(HoldPoint::Verify);
    source.quiet();
    sink.quiet();

    let last_source = &source.shards[usize::from(sources) - 1];
    last_source.gate.hold(HoldPoint::Commit);
    // Another name, as another attempt has: the workers of the former may not have heard of all its ends.
    let mut legs = source.offer(&sink, "later", 3);
    let of_last = source.shard(sources - 1).partners(sinks).len();
    eventually("the last source holds", || last_source.transfer.stats().held == of_last);
    legs.pop().expect("at least one leg").abort("it fails late");
    legs.into_iter().for_each(|leg| assert!(leg.wait().is_err(), "a part was adopted without the others"));
    last_source.gate.open(HoldPoint::Commit);
    source.quiet();
    sink.quiet();
    assert!(sink.joint.adopted.lock().unwrap().is_empty());
    works(&source, &sink, 4);
}

pub fn two_to_one(choice: &TransportChoice) {
    shards(choice, 2, 1);
}

pub fn one_to_two(choice: &TransportChoice) {
    shards(choice, 1, 2);
}

pub fn two_to_four(choice: &TransportChoice) {
    shards(choice, 2, 4);
}

/// Four legs end in one sink.
pub fn four_to_one(choice: &TransportChoice) {
    shards(choice, 4, 1);
}

/// Two sources to one sink, and one to two: the part that one reservation has is left out of every leg.
pub fn all_legs_leave_out_the_same(choice: &TransportChoice) {
    const CACHED: u32 = 32;
    for (sources, sinks) in [(2, 1), (1, 2)] {
        let (source, sink) = (Sharded::start("p", sources, 48, choice), Sharded::start("d", sinks, 32, choice));
        for (index, node) in sink.shards.iter().enumerate() {
            node.cache(|_| CACHED);
            // The same blocks are given again.
            let count = node.map.layout().blocks_for(TOKENS as usize);
            let hold = node.pool.take(count, 31 + index as u64).unwrap();
            sink.fill(index, &hold.blocks, CACHED_SEED);
        }
        for leg in source.offer(&sink, "part", 5) {
            assert_eq!(leg.wait().unwrap().tokens_moved, TOKENS - CACHED);
        }
        sink.check_adopted_from("part", 5, CACHED);
        source.quiet();
        sink.quiet();
    }
}

pub fn doubled_commit_of_one_shard_is_not_that_of_another(choice: &TransportChoice) {
    let (source, sink) = (Sharded::start("p", 2, 16, choice), Sharded::start("d", 1, 32, choice));
    // The first shard's first commit goes out once more ahead of each later offer.
    let sent = Arc::new(Mutex::new(None));
    let kept = sent.clone();
    source.shards[0].gate.bend(move |message| {
        let mut kept = kept.lock().unwrap();
        match message[3] {
            COMMIT => {
                kept.get_or_insert_with(|| message.clone());
                vec![message]
            }
            OFFER => kept.iter().cloned().chain([message]).collect(),
            _ => vec![message],
        }
    });
    let legs = source.open(&sink, "half", 1);
    source.shards[0].send_all(&legs[0].1, TOKENS);
    eventually("the first shard commits", || sent.lock().unwrap().is_some());
    // Once another handoff was verified, so was this half of ours: its commit comes again for a leg that was delivered.
    for (request, seed) in [("verified-after-it", 2), ("offered-behind-its-commit", 3)] {
        for leg in source.offer(&sink, request, seed) {
            leg.wait().unwrap();
        }
        sink.check_adopted(request, seed);
        assert!(sink.joint.adopted.lock().unwrap().is_empty(), "half a handoff was adopted");
    }
    source.shards[1].send_all(&legs[1].1, TOKENS);
    legs.into_iter().for_each(|(_, leg)| drop(leg.wait().unwrap()));
    sink.check_adopted("half", 1);
    source.quiet();
    sink.quiet();
}

pub fn shards_without_common_heads_are_refused(choice: &TransportChoice) {
    let (source, sink) = (Sharded::start("p", 2, 16, choice), Sharded::start("d", 2, 16, choice));
    let peer = Peer { shard: 1, ..sink.shards[1].peer() };
    let (put, _) = source.shards[0].offer(&peer, "r", 16, 1);
    let failure = put.wait().unwrap_err();
    assert!(failure.to_string().contains("no KV heads in common"), "{failure}");
    // And the shard that answers must be the one that was meant.
    let (put, _) = source.shards[0].offer(&sink.shards[1].peer(), "r", 16, 1);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::WrongIncarnation, .. }), "{failure}");
    source.quiet();
    sink.quiet();
}
