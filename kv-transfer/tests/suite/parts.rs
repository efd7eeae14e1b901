//! What one side has already does not move, and is not touched.

use super::failing::{CHECKSUMS, OFFER};
use super::moving::layouts;
use super::pair;
use crate::common::parts::{none_cached, overlay};
use crate::common::*;
use baton_kv_transfer::*;
use baton_types::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const GRANT: u8 = 5;
/// A grant of a part; `from` follows the four bytes of the head.
const PARTIAL_GRANT: u8 = 18;
/// The same of an offer.
const PARTIAL_OFFER: u8 = 19;

/// Of both sides.
type Layouts = (KvLayout, KvLayout);
/// Tokens, what picks the start, and a seed.
type Sequence = (u32, u32, u64);

const V1: ProtocolRange = ProtocolRange { min: 1, max: 1 };

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn quiet(a: &Node, b: &Node) {
    eventually("both pools are whole", || a.is_quiet() && b.is_quiet());
    assert_eq!(b.pool.quarantined(), 0);
}

fn runner() -> TestRunner {
    TestRunner::new(Config { cases: 12, failure_persistence: None, ..Config::default() })
}

/// So many of `tokens`, in whole blocks, as a number picks.
fn whole_blocks(pick: u32, block_tokens: u32, tokens: u32) -> u32 {
    pick % ((tokens - 1) / block_tokens + 1) * block_tokens
}

pub fn random_parts_arrive_and_nothing_else_changes(choice: &TransportChoice) {
    let cases = (layouts(), prop::collection::vec((1u32..200, any::<u32>(), any::<u64>()), 1..4), 1u32..80);
    let run = |((ours, theirs), sequences, chunk): (Layouts, Vec<Sequence>, u32)| {
        let source = NodeConfig::new("p", ours, 40).start(choice.clone());
        let sink = NodeConfig::new("d", theirs, 45).start(choice.clone());
        let size = sink.map.layout().block_tokens();
        let from: Vec<u32> = sequences.iter().map(|&(tokens, pick, _)| whole_blocks(pick, size, tokens)).collect();
        let cached = from.clone();
        sink.cache(move |offer| cached[offer.request_id.as_str()[1..].parse::<usize>().unwrap()]);
        sink.fill_pool(7);
        let mut expected = sink.whole_pool();
        let open = |(i, &(tokens, _, seed)): (usize, &Sequence)| {
            (i, tokens, source.offer(&sink.peer(), &format!("r{i}"), tokens, seed))
        };
        let open: Vec<_> = sequences.iter().enumerate().map(open).collect();
        for (_, tokens, (put, _)) in &open {
            source.launch(put, *tokens, chunk);
            put.finish(commit(*tokens));
        }
        let mut adopted = Vec::new();
        for (i, tokens, (put, blocks)) in open {
            let report = put.wait().unwrap();
            assert_eq!(report.tokens_moved, tokens - from[i]);
            let (request, positions) = (format!("r{i}"), from[i]..tokens);
            let moved = source.places(&blocks, positions.clone());
            assert_eq!(report.bytes, moved.iter().map(|place| place.len() as u64).sum::<u64>());
            adopted.push(sink.take_part(&request, (&source, &blocks), positions, &mut expected));
        }
        assert!(sink.whole_pool() == expected, "other bytes arrived, or some were written that are not moved");
        drop(adopted);
        quiet(&source, &sink);
        Ok(())
    };
    runner().run(&cases, run).unwrap();
}

/// A handoff of 70 tokens in blocks of 16, of which the sink has `cached`.
fn hand_off(source: &Node, sink: &Node, cached: u32) -> Result<PutReport, HandoffFailure> {
    sink.cache(move |_| cached);
    let (put, _) = source.offer(&sink.peer(), "r", 70, 9);
    source.send_all(&put, 70);
    put.wait()
}

fn still_works(source: &Node, sink: &Node) {
    *sink.sink.cached.lock().unwrap() = none_cached();
    let (put, blocks) = source.offer(&sink.peer(), "after", 50, 77);
    source.send_all(&put, 50);
    put.wait().unwrap();
    sink.check_adopted("after", source, &blocks, 50);
    quiet(source, sink);
}

pub fn an_older_source_is_asked_for_no_part(choice: &TransportChoice) {
    let sink = NodeConfig::new("d", small(16), 24).start(choice.clone());
    for (name, protocol, partial) in [("p-1", V1, false), ("p-2", ProtocolRange { min: 1, max: 2 }, true)] {
        let source = NodeConfig { protocol, ..NodeConfig::new(name, small(32), 24) }.start(choice.clone());
        let asked = Arc::new(Mutex::new(None));
        let told = asked.clone();
        sink.cache(move |offer| {
            *told.lock().unwrap() = Some(offer.partial);
            if offer.partial { 48 } else { 0 }
        });
        sink.fill_pool(7);
        let mut expected = sink.whole_pool();
        let (put, blocks) = source.offer(&sink.peer(), "r", 70, 9);
        source.send_all(&put, 70);
        let report = put.wait().unwrap();
        assert_eq!(*asked.lock().unwrap(), Some(partial));
        let from = if partial { 48 } else { 0 };
        assert_eq!(report.tokens_moved, 70 - from);
        drop(sink.take_part("r", (&source, &blocks), from..70, &mut expected));
        assert!(sink.whole_pool() == expected);
        quiet(&source, &sink);
    }
}

pub fn cached_tokens_that_cannot_be_are_refused(choice: &TransportChoice) {
    let sink = NodeConfig::new("d", small(16), 24).start(choice.clone());
    let old = NodeConfig { protocol: V1, ..NodeConfig::new("p-1", small(16), 24) }.start(choice.clone());
    let new = NodeConfig::new("p-2", small(16), 24).start(choice.clone());
    let cases = [
        (&new, 8, "no block of 16 tokens begins with position 8"),
        (&new, 70, "nothing is left of 70 tokens"),
        (&new, 80, "nothing is left of 70 tokens"),
        (&old, 16, "16 tokens are cached, and the source can leave out none"),
    ];
    for (source, cached, said) in cases {
        let failure = hand_off(source, &sink, cached).unwrap_err();
        assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::NoRoom, .. }), "{failure}");
        assert!(failure.to_string().contains(said), "{failure}");
        quiet(source, &sink);
        assert_eq!(source.transfer.stats().total.puts, 0);
    }
    still_works(&old, &sink);
    still_works(&new, &sink);
}

/// A handoff of which the sink has 32 tokens in such blocks, and whose source is told `from`.
fn told_another_start(choice: &TransportChoice, block_tokens: u32, from: u32) -> (HandoffFailure, Node, Node) {
    let source = NodeConfig::new("p", small(16), 24).start(choice.clone());
    let sink = NodeConfig::new("d", small(block_tokens), 24).start(choice.clone());
    sink.gate.bend(move |mut message| {
        if message[3] == PARTIAL_GRANT {
            message[4..8].copy_from_slice(&from.to_le_bytes());
        }
        vec![message]
    });
    let failure = hand_off(&source, &sink, 32).unwrap_err();
    assert!(sink.sink.take_adopted("r").is_none());
    sink.gate.bend(|message| vec![message]);
    (failure, source, sink)
}

pub fn another_part_than_was_granted_is_never_adopted(choice: &TransportChoice) {
    // Less: its commit does not cover what is missing. More: its checksums are of nothing that was reserved.
    for from in [48, 16] {
        let (failure, source, sink) = told_another_start(choice, 16, from);
        quiet(&source, &sink);
        assert!(source.transfer.stats().total.puts > 0, "{from}: {failure}");
        eventually("the sink's worker knows", || !sink.sink.failures().is_empty());
        let failures = sink.sink.failures();
        assert!(matches!(&failures[..], [(_, HandoffFailure::Protocol(_))]), "{from}: {failures:?}");
        still_works(&source, &sink);
    }
    // None that could have been granted: nothing is written.
    for (block_tokens, from) in [(16, 17), (16, 40), (16, 80), (32, 48)] {
        let (failure, source, sink) = told_another_start(choice, block_tokens, from);
        assert!(matches!(failure, HandoffFailure::Protocol(_)), "{from}: {failure}");
        assert_eq!(source.transfer.stats().total.puts, 0);
        quiet(&source, &sink);
        still_works(&source, &sink);
    }
}

/// Turns messages of the whole into such of a part, from position 16 on.
fn say_part_in_place_of(node: &Node, whole: u8, part: u8) {
    node.gate.bend(move |message| match message[3] == whole {
        true => vec![[&message[..3], &[part], &16u32.to_le_bytes(), &message[4..]].concat()],
        false => vec![message],
    });
}

pub fn parts_that_were_not_agreed_on_are_refused(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let old = NodeConfig { protocol: V1, ..NodeConfig::new("p-1", small(16), 24) }.start(choice.clone());
    // A grant to a source whose protocol has no parts.
    say_part_in_place_of(&sink, GRANT, PARTIAL_GRANT);
    let failure = hand_off(&old, &sink, 0).unwrap_err();
    assert!(matches!(&failure, HandoffFailure::Protocol(detail) if detail.contains("has none")), "{failure}");
    assert_eq!(old.transfer.stats().total.puts, 0);
    quiet(&old, &sink);
    // A pin of less than was asked for.
    sink.serve("s", 70, 5);
    let (get, _) = source.get(&sink.peer(), "s", 70, soon());
    let failure = get.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Protocol(_)), "{failure}");
    sink.evict("s");
    quiet(&source, &sink);
    sink.gate.bend(|message| vec![message]);
    // An offer whose source says what its sink has.
    say_part_in_place_of(&source, OFFER, PARTIAL_OFFER);
    let failure = hand_off(&source, &sink, 0).unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Protocol, .. }), "{failure}");
    source.gate.bend(|message| vec![message]);
    still_works(&source, &sink);
    still_works(&old, &sink);
}

/// Bends the last checksum of the next message of such.
fn damage_next_checksum(node: &Node) {
    let left = AtomicU32::new(1);
    node.gate.bend(move |mut message| {
        if message[3] == CHECKSUMS && left.swap(0, Ordering::SeqCst) == 1 {
            *message.last_mut().unwrap() ^= 0x80;
        }
        vec![message]
    });
}

pub fn a_damaged_byte_of_a_part_is_found(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    damage_next_checksum(&source);
    let failure = hand_off(&source, &sink, 48).unwrap_err();
    assert!(matches!(failure, HandoffFailure::Corrupt(_)), "{failure}");
    assert!(sink.sink.take_adopted("r").is_none());
    quiet(&source, &sink);
    still_works(&source, &sink);

    source.serve("s", 70, 5);
    damage_next_checksum(&source);
    let (get, _) = sink.get_part(&source.peer(), "s", 48..70, soon());
    let failure = get.unwrap().wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Corrupt(_)), "{failure}");
    source.evict("s");
    quiet(&source, &sink);
}

pub fn random_parts_are_read_and_nothing_else_changes(choice: &TransportChoice) {
    let run = |((ours, theirs), tokens, pick, seed): (Layouts, u32, u32, u64)| {
        let both = lcm(ours.block_tokens(), theirs.block_tokens());
        let reader = NodeConfig::new("p", ours, 40).start(choice.clone());
        let owner = NodeConfig::new("d", theirs, 40).start(choice.clone());
        let positions = whole_blocks(pick, both, tokens)..tokens;
        reader.fill_pool(7);
        let mut expected = reader.whole_pool();
        let served = owner.serve("s", tokens, seed);
        let (get, blocks) = reader.get_part(&owner.peer(), "s", positions.clone(), soon());
        let got = get.unwrap().wait().unwrap();
        let bytes = owner.read_all(&owner.places(&served, positions.clone()));
        assert_eq!(got.bytes, bytes.len() as u64);
        // The first block begins with the first position.
        overlay(&mut expected, &reader.places(&blocks, 0..positions.len() as u32), &bytes);
        assert!(reader.whole_pool() == expected, "other bytes were read, or some written that were not asked for");
        owner.evict("s");
        drop(got);
        quiet(&reader, &owner);
        Ok(())
    };
    runner().run(&(layouts(), 1u32..600, any::<u32>(), any::<u64>()), run).unwrap();
}

fn lcm(a: u32, b: u32) -> u32 {
    (1..).map(|times| times * a).find(|multiple| multiple % b == 0).expect("a times b is one")
}

pub fn a_get_begins_with_a_block_of_both_sides_or_not_at_all(choice: &TransportChoice) {
    let reader = NodeConfig::new("p", small(16), 24).start(choice.clone());
    let owner = NodeConfig::new("d", small(48), 24).start(choice.clone());
    let old = NodeConfig { protocol: V1, ..NodeConfig::new("d-1", small(16), 24) }.start(choice.clone());
    for (from, said) in [
        (8, "no block of 16 tokens begins with position 8"),
        (80, "nothing is left of 70 tokens from position 80 on"),
        (70, "nothing is left of 70 tokens from position 70 on"),
    ] {
        let (refused, _) = reader.get_part(&owner.peer(), "s", from..70, soon());
        assert!(matches!(&refused, Err(TransferError::Blocks(detail)) if detail == said), "{refused:?}");
    }
    owner.serve("s", 70, 5);
    old.serve("s", 70, 5);
    let failure = |owner: &Node, from: u32| {
        let (get, _) = reader.get_part(&owner.peer(), "s", from..70, soon());
        get.unwrap().wait().unwrap_err()
    };
    for (owner, said) in [
        (&owner, "at the peer, no block of 48 tokens begins with position 32"),
        (&old, "version 1 of the protocol has no parts"),
    ] {
        let failure = failure(owner, 32);
        assert!(matches!(&failure, HandoffFailure::WholeOnly(detail) if detail == said), "{failure}");
        assert_eq!(owner.transfer.stats().owners, 0);
    }
    // An owner looks for itself.
    for (from, said) in [(32u32, "no block of 48 tokens begins with position 32"), (70, "nothing is left of 70 tokens")]
    {
        reader.gate.bend(move |mut message| {
            if message[3] == PARTIAL_OFFER {
                message[4..8].copy_from_slice(&from.to_le_bytes());
            }
            vec![message]
        });
        let failure = failure(&owner, 48);
        assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Protocol, .. }), "{failure}");
        assert!(failure.to_string().contains(said), "{failure}");
    }
    reader.gate.bend(|message| vec![message]);
    let (get, _) = reader.get_part(&owner.peer(), "s", 48..70, soon());
    drop(get.unwrap().wait().unwrap());
    owner.evict("s");
    old.evict("s");
    quiet(&reader, &owner);
    quiet(&reader, &old);
}
