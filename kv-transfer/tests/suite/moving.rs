//! What must arrive, arrives.

use super::pair;
use crate::common::*;
use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::Arc;

pub(super) fn layouts() -> impl Strategy<Value = (KvLayout, KvLayout)> {
    let sizes = || prop::sample::select(vec![16u32, 32, 48, 64, 128]);
    let group = (1usize..4, prop::collection::vec((1u32..4, 1u32..33), 1..=4));
    (sizes(), sizes(), prop::collection::vec(group, 1..=3), any::<bool>()).prop_map(|(a, b, shapes, has_states)| {
        let mut next_layer = 0;
        let groups: Vec<_> = shapes
            .into_iter()
            .enumerate()
            .map(|(g, (layers, planes))| {
                let layers: Vec<u32> = (next_layer..next_layer + layers as u32).collect();
                next_layer += layers.len() as u32;
                let plane = |(i, (heads, dim)): (usize, (u32, u32))| {
                    KvPlane::try_new(format!("p{i}"), heads, dim, if g == 1 { Dtype::F32 } else { Dtype::Bf16 })
                        .unwrap()
                };
                let kind = match g {
                    0 => GroupKind::Full,
                    1 if has_states => GroupKind::State,
                    _ => GroupKind::Latent,
                };
                KvGroup { kind, layers, planes: planes.into_iter().enumerate().map(plane).collect() }
            })
            .collect();
        (KvLayout::try_new(a, groups.clone()).unwrap(), KvLayout::try_new(b, groups).unwrap())
    })
}

pub fn random_layouts_and_block_sets_arrive_whole(choice: &TransportChoice) {
    let mut runner = TestRunner::new(Config { cases: 12, failure_persistence: None, ..Config::default() });
    let cases = (layouts(), prop::collection::vec((1u32..200, any::<u64>()), 1..4), 1u32..80);
    runner
        .run(&cases, |((ours, theirs), sequences, chunk)| {
            let source = NodeConfig::new("p", ours, 40).start(choice.clone());
            let sink = NodeConfig::new("d", theirs, 45).start(choice.clone());
            let open = |(i, &(tokens, seed)): (usize, &(u32, u64))| {
                (i, tokens, source.offer(&sink.peer(), &format!("r{i}"), tokens, seed))
            };
            let open: Vec<_> = sequences.iter().enumerate().map(open).collect();
            for (_, tokens, (put, _)) in &open {
                source.launch(put, *tokens, chunk);
                put.finish(commit(*tokens));
            }
            for (i, tokens, (put, blocks)) in open {
                let report = put.wait().unwrap();
                assert_eq!(report.bytes, source.bytes_of(&blocks, tokens).len() as u64);
                sink.check_adopted(&format!("r{i}"), &source, &blocks, tokens);
            }
            eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
            Ok(())
        })
        .unwrap();
}

pub fn interleaved_transfers_stay_apart(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let other = NodeConfig::new("p2", small(32), 24).start(choice.clone());
    let fence: Fence = Arc::new(AlreadyDone);
    let open: Vec<_> = (0..6u32)
        .map(|i| {
            let (from, tokens) = (if i % 2 == 0 { &source } else { &other }, 20 + 7 * i);
            (from, i, tokens, from.offer(&sink.peer(), &format!("r{i}"), tokens, u64::from(i) + 5))
        })
        .collect();
    for step in 1..=4 {
        for (_, _, tokens, (put, _)) in &open {
            (0..2).for_each(|layer| put.layer_launched(layer, (tokens * step / 4) as usize, &fence));
        }
    }
    for (_, _, tokens, (put, _)) in open.iter().rev() {
        put.finish(commit(*tokens));
    }
    for (from, i, tokens, (put, blocks)) in open {
        put.wait().unwrap();
        sink.check_adopted(&format!("r{i}"), from, &blocks, tokens);
    }
    eventually("all pools are whole", || source.is_quiet() && other.is_quiet() && sink.is_quiet());
    let stats = sink.transfer.stats();
    assert_eq!(stats.total.sinks.get("adopted"), Some(&6));
    assert_eq!(stats.total.puts_refused, 0);
}

pub fn both_directions_at_once_are_two_connections_of_one_peer(choice: &TransportChoice) {
    let (a, b) = pair(choice);
    for round in 0..2 {
        for (from, to) in [(&a, &b), (&b, &a)] {
            let name = format!("r{round}-{}", from.transfer.party());
            let (put, blocks) = from.offer(&to.peer(), &name, 33, 3);
            from.send_all(&put, 33);
            put.wait().unwrap();
            to.check_adopted(&name, from, &blocks, 33);
        }
    }
    assert_eq!((a.transfer.stats().peers.len(), b.transfer.stats().peers.len()), (1, 1));
}

pub fn a_late_grant_finds_everything_computed(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    *sink.sink.room.lock().unwrap() = Room::Later;
    let (put, blocks) = source.offer(&sink.peer(), "late", 40, 9);
    source.send_all(&put, 40);
    eventually("the offer waits", || sink.sink.waiting() == 1);
    assert_eq!(source.transfer.stats().total.puts, 0, "nothing is written without a grant");
    sink.sink.answer();
    put.wait().unwrap();
    sink.check_adopted("late", &source, &blocks, 40);
}

pub fn nothing_is_written_before_its_fence(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let (put, blocks) = source.offer(&sink.peer(), "fenced", 32, 9);
    let manual = Arc::new(ManualFence::default());
    let (pending, done): (Fence, Fence) = (manual.clone(), Arc::new(AlreadyDone));
    put.layer_launched(0, 32, &done);
    put.layer_launched(1, 32, &pending);
    put.finish(commit(32));
    let layer = source.map.bytes() as u64 / 24 / 2 * 2; // Two blocks of one layer.
    eventually("the first layer is written", || source.transfer.stats().total.bytes_put >= layer);
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert_eq!(source.transfer.stats().total.bytes_put, layer);
    manual.set(FenceStatus::Done);
    put.wait().unwrap();
    sink.check_adopted("fenced", &source, &blocks, 32);
}

pub fn neighbouring_blocks_go_in_one_write(choice: &TransportChoice) {
    let mut config = NodeConfig::new("d", small(16), 24);
    config.seed = 0; // The pool gives neighbours.
    let (source, sink) = (NodeConfig::new("p", small(16), 24).start(choice.clone()), config.start(choice.clone()));
    let (put, blocks) = source.offer(&sink.peer(), "runs", 160, 0);
    source.launch(&put, 160, 160);
    put.finish(commit(160));
    let report = put.wait().unwrap();
    assert_eq!(report.puts, 2, "one write a layer");
    sink.check_adopted("runs", &source, &blocks, 160);
}

pub fn a_slow_sink_holds_back_only_its_own(choice: &TransportChoice) {
    let (source, slow) = pair(choice);
    let quick = NodeConfig::new("d2", small(16), 24).start(choice.clone());
    slow.gate.hold(HoldPoint::Verify);
    let (stuck, stuck_blocks) = source.offer(&slow.peer(), "slow", 64, 4);
    source.send_all(&stuck, 64);
    eventually("the slow sink holds its commit", || slow.transfer.stats().held == 1);
    for i in 0..5 {
        let name = format!("quick{i}");
        let (put, blocks) = source.offer(&quick.peer(), &name, 64, 6 + i);
        source.send_all(&put, 64);
        put.wait().unwrap();
        quick.check_adopted(&name, &source, &blocks, 64);
    }
    slow.gate.open(HoldPoint::Verify);
    stuck.wait().unwrap();
    slow.check_adopted("slow", &source, &stuck_blocks, 64);
}

pub fn idle_connections_are_let_go(choice: &TransportChoice) {
    let (source, busy) = pair(choice);
    let mut config = NodeConfig::new("d2", small(16), 24);
    config.limits.idle_ms = 100;
    let sink = config.start(choice.clone());
    source.gate.hold(HoldPoint::Commit);
    let (waiting, kept) = source.offer(&sink.peer(), "waiting", 40, 1);
    source.send_all(&waiting, 40);
    eventually("the source holds", || source.transfer.stats().held == 1);
    let (waiting_too, _) = source.offer(&busy.peer(), "elsewhere", 40, 2);
    source.send_all(&waiting_too, 40);
    // Somebody who came later, and has nothing to do any more, is let go.
    let later = NodeConfig::new("p2", small(16), 24).start(choice.clone());
    let (put, blocks) = later.offer(&sink.peer(), "later", 40, 4);
    later.send_all(&put, 40);
    put.wait().unwrap();
    sink.check_adopted("later", &later, &blocks, 40);
    let peers = || sink.transfer.stats().peers.into_keys().collect::<Vec<_>>();
    eventually("who came later is let go", || !peers().contains(later.transfer.party()));
    assert_eq!(peers(), [source.transfer.party().clone()], "a handoff is open on it");
    source.gate.open(HoldPoint::Commit);
    waiting.wait().unwrap();
    sink.check_adopted("waiting", &source, &kept, 40);
    waiting_too.wait().unwrap();
    eventually("the connection is let go", || sink.transfer.stats().peers.is_empty());
    eventually("on both sides", || source.transfer.stats().peers.len() == 1);
    let (put, blocks) = source.offer(&sink.peer(), "again", 40, 3);
    source.send_all(&put, 40);
    put.wait().unwrap();
    sink.check_adopted("again", &source, &blocks, 40);
}
