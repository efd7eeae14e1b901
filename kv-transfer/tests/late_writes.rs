//! The hazard of writes, and its guard: a source with writes posted is lost, its blocks are used again, and it comes back. With UCX's own
//! puts, and with messages in their place; of many blocks of rows, and of one large state.

mod common;

use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use common::process::{Other, hex, say, unhex};
use common::*;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// How a source writes, and what.
#[derive(Clone, Copy)]
struct Way(&'static str);

const WAYS: [&str; 4] = ["puts", "messages", "puts-of-a-state", "messages-of-a-state"];

impl Way {
    fn is_of_a_state(self) -> bool {
        self.0.ends_with("state")
    }

    /// The layout and the blocks of each group. The first layer has 64 MiB, far more than sockets hold: 64 KiB a block of rows, or one state.
    fn pool(self) -> (KvLayout, u32) {
        if !self.is_of_a_state() {
            return (KvLayout::llama(16, 2, 8, 128, Dtype::Bf16).unwrap(), 1024);
        }
        let plane = |name, heads, dim| vec![KvPlane::try_new(name, heads, dim, Dtype::F32).unwrap()];
        let full = KvGroup { kind: GroupKind::Full, layers: vec![1], planes: plane("k", 1, 8) };
        let state = KvGroup { kind: GroupKind::State, layers: vec![0], planes: plane("state", 1024, 16_384) };
        (KvLayout::try_new(16, vec![full, state]).unwrap(), 1)
    }

    /// Tokens of all blocks.
    fn tokens(self) -> u32 {
        let (layout, blocks) = self.pool();
        blocks * layout.block_tokens()
    }
}

fn config(name: &'static str, way: Way) -> NodeConfig {
    let (layout, blocks) = way.pool();
    let mut config = NodeConfig::new(name, layout, blocks);
    config.limits.in_flight_bytes_max = 1 << 30;
    config.limits.abort_ms = 200;
    config
}

/// Named so on the command line of the other process.
fn choice_of(way: Way) -> TransportChoice {
    if way.0.starts_with("puts") {
        ucx_one_sided()
    } else {
        TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into())
    }
}

/// Done once told; the fence behind it is first polled in the turn that posts what this one held back.
struct Told(AtomicBool);

impl FencePoll for Told {
    fn poll(&self) -> FenceStatus {
        if self.0.load(Ordering::SeqCst) { FenceStatus::Done } else { FenceStatus::Pending }
    }
}

/// Stops the process, itself included, when it is polled for the second time.
struct Stop(AtomicU32);

impl FencePoll for Stop {
    fn poll(&self) -> FenceStatus {
        if self.0.fetch_add(1, Ordering::SeqCst) == 1 {
            let ours = std::process::id().to_string();
            assert!(Command::new("kill").args(["-STOP", &ours]).status().unwrap().success());
        }
        FenceStatus::Pending
    }
}

/// Not a test of its own: a source that stops itself right after it has posted a layer.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(args) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    let (way, address) = args.split_once(' ').unwrap();
    let way = Way(WAYS.into_iter().find(|known| *known == way).unwrap());
    let node = config("other", way).start(choice_of(way));
    let party = Party { instance: InstanceId::try_new("here").unwrap(), incarnation: Incarnation(1) };
    let peer = Peer { party, address: TransferAddress::from_bytes(&unhex(address)).unwrap(), shard: 0 };
    node.gate.hold(HoldPoint::Puts);
    let (put, _) = node.offer(&peer, "r", way.tokens(), 1);
    eventually("granted", || node.transfer.stats().held == 1);
    node.gate.open(HoldPoint::Puts);
    eventually("writes may be posted", || node.transfer.stats().held == 0);
    let told = Arc::new(Told(AtomicBool::new(false)));
    let (first, second): (Fence, Fence) = (told.clone(), Arc::new(Stop(AtomicU32::new(0))));
    put.layer_launched(0, way.tokens() as usize, &first);
    put.layer_launched(1, way.tokens() as usize, &second);
    say("posting: now");
    told.0.store(true, Ordering::SeqCst);
    assert!(put.wait().is_err());
    eventually("what was posted is over", || node.is_quiet());
    std::process::exit(0); // Nobody reads what the test harness would say.
}

/// A sink whose source stopped in the middle of its writes, and that source.
fn with_stopped_source(way: Way, hazard: Option<Hazard>) -> (Node, Other) {
    let mut ours = config("here", way);
    ours.hazards = hazard.into();
    let node = ours.start(choice_of(way));
    let (other, _) = Other::start(&[way.0, &hex(&node.transfer.address().to_bytes())], "posting:");
    eventually("the source is stopped", || other.is_stopped());
    assert!(!node.pool.is_whole());
    (node, other)
}

/// The sink gives up, gets its blocks back, and uses them for something else; their bytes.
fn reused(node: &Node, way: Way) -> (Box<Hold>, Vec<u8>) {
    node.transfer.cancel(&RequestId::try_new("r").unwrap(), "the client went away");
    eventually("its blocks are back", || node.is_quiet() && node.pool.quarantined() == 0);
    let hold = node.pool.take(node.map.blocks(0) as usize, 0).unwrap();
    node.fill(&hold.blocks, 99);
    let bytes = node.bytes_of(&hold.blocks, way.tokens());
    (hold, bytes)
}

fn without_the_fence_a_resumed_source_writes_into_reused_blocks(way: Way) {
    let (node, mut other) = with_stopped_source(way, Some(Hazard::PretendedFences));
    let (hold, bytes) = reused(&node, way);
    other.signal("-CONT");
    eventually("the source is done", || other.has_ended());
    // What the source sent may still wait here when it is done.
    let late = "a late write, without which the tests beside this one show nothing";
    eventually(late, || node.bytes_of(&hold.blocks, way.tokens()) != bytes);
}

fn a_fenced_source_that_is_resumed_changes_nothing(way: Way) {
    let (node, mut other) = with_stopped_source(way, None);
    let (hold, bytes) = reused(&node, way);
    other.signal("-CONT");
    eventually("the source noticed", || other.has_ended());
    assert!(node.bytes_of(&hold.blocks, way.tokens()) == bytes, "a late write was stored");
}

fn a_fenced_source_that_is_killed_changes_nothing(way: Way) {
    let (node, mut other) = with_stopped_source(way, None);
    let (hold, bytes) = reused(&node, way);
    other.signal("-KILL");
    eventually("the source is dead", || other.has_ended());
    assert!(node.bytes_of(&hold.blocks, way.tokens()) == bytes, "a late write was stored");
}

fn a_resumed_incarnation_changes_nothing_of_the_next_one(way: Way) {
    let (node, mut other) = with_stopped_source(way, None);
    drop(reused(&node, way));
    let mut again = config("other", way);
    again.incarnation = 2;
    let again = again.start(choice_of(way));
    let (put, blocks) = again.offer(&node.peer(), "again", way.tokens(), 5);
    let done: Fence = Arc::new(AlreadyDone);
    (0..2).for_each(|layer| put.layer_launched(layer, way.tokens() as usize, &done));
    put.finish(commit(way.tokens()));
    put.wait().unwrap();
    other.signal("-CONT");
    eventually("the old incarnation noticed", || other.has_ended());
    node.check_adopted("again", &again, &blocks, way.tokens());
}

macro_rules! in_every_way {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            #[test]
            fn puts() {
                super::$name(super::Way("puts"));
            }
            #[test]
            fn messages() {
                super::$name(super::Way("messages"));
            }
            #[test]
            fn puts_of_a_state() {
                super::$name(super::Way("puts-of-a-state"));
            }
            #[test]
            fn messages_of_a_state() {
                super::$name(super::Way("messages-of-a-state"));
            }
        }
    )*};
}
in_every_way![
    without_the_fence_a_resumed_source_writes_into_reused_blocks,
    a_fenced_source_that_is_resumed_changes_nothing,
    a_fenced_source_that_is_killed_changes_nothing,
    a_resumed_incarnation_changes_nothing_of_the_next_one,
];
