//! A sink that takes nothing holds back what is written to it, and nothing else, and its source's blocks not for long.

mod common;

use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use common::process::{Other, hex, say, unhex};
use common::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// 64 KiB a block and layer, 64 MiB a layer: far more than the credit of a connection and the sockets under it.
const BLOCKS: u32 = 1024;
const TOKENS: u32 = BLOCKS * 16;

fn config(name: &'static str) -> NodeConfig {
    let mut config = NodeConfig::new(name, KvLayout::llama(16, 2, 8, 128, Dtype::Bf16).unwrap(), 2 * BLOCKS);
    config.limits.in_flight_bytes_max = 4 << 20;
    config.limits.peer_silent_ms = 60_000;
    config
}

fn choice_of(way: &str) -> TransportChoice {
    let bind = [127, 0, 0, 1].into();
    match way {
        "tcp" => TransportChoice::Tcp { bind, port: 0 },
        "puts" => ucx_one_sided(),
        _ => TransportChoice::ucx(UcxLanes::LoopbackTcp, bind),
    }
}

/// Not a test of its own: the slow sink.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(way) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    let node = config("slow").start(choice_of(&way));
    say(&format!("address: {}", hex(&node.transfer.address().to_bytes())));
    std::thread::sleep(PATIENCE * 2);
}

fn slow_party() -> Party {
    Party { instance: InstanceId::try_new("slow").unwrap(), incarnation: Incarnation(1) }
}

/// A handoff from `source` to a sink that granted it and stands since then.
fn stuck(source: &Node, way: &str) -> (PutHandle, Other) {
    let (slow, address) = Other::start(&[way], "address:");
    let peer = Peer { party: slow_party(), address: TransferAddress::from_bytes(&unhex(&address)).unwrap(), shard: 0 };
    source.gate.hold(HoldPoint::Puts);
    let (stuck, _) = source.offer(&peer, "slow", TOKENS, 1);
    eventually("granted", || source.transfer.stats().held == 1);
    slow.signal("-STOP");
    eventually("it stands", || slow.is_stopped());
    source.gate.open(HoldPoint::Puts);
    let done: Fence = Arc::new(AlreadyDone);
    (0..2).for_each(|layer| stuck.layer_launched(layer, TOKENS as usize, &done));
    stuck.finish(commit(TOKENS));
    (stuck, slow)
}

fn a_stopped_sink_holds_back_only_its_own(way: &str) {
    let (source, quick) = (config("source").start(choice_of(way)), config("quick").start(choice_of(way)));
    let (stuck, slow) = stuck(&source, way);
    for i in 0..5 {
        let name = format!("quick{i}");
        let (put, blocks) = source.offer(&quick.peer(), &name, 256, 6 + i);
        source.send_all(&put, 256);
        put.wait().unwrap();
        quick.check_adopted(&name, &source, &blocks, 256);
    }
    let (sent, all) = (source.transfer.stats().peers[&slow_party()].bytes_put, 2 * u64::from(BLOCKS) * (64 << 10));
    assert!(sent < all / 2, "{sent} of {all} bytes were posted to a sink that takes none");
    slow.signal("-CONT");
    stuck.wait().unwrap();
    eventually("everything is over", || source.is_quiet());
}

/// Blocks that such a sink was being written are back within ten seconds of its last word where a router gives the request up after six, as
/// it does, and the sink stays as it is.
fn a_stopped_sink_keeps_no_blocks(way: &str) {
    let mut config = config("source");
    config.limits = TransferLimits::default();
    let source = config.start(choice_of(way));
    let begin = Instant::now();
    let (stuck, slow) = stuck(&source, way);
    std::thread::sleep((begin + Duration::from_secs(6)).saturating_duration_since(Instant::now()));
    assert!(!source.pool.is_whole() && source.transfer.stats().peers[&slow_party()].bytes_put > 0);
    stuck.abort("the router's connection misses its probes");
    let failure = stuck.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Aborted(_)), "{failure}");
    eventually("its blocks are back", || source.is_quiet());
    assert!(begin.elapsed() < Duration::from_secs(10), "they were held for {:?}", begin.elapsed());
    assert!(slow.is_stopped());
}

macro_rules! every_way {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            #[test]
            fn over_tcp() {
                super::$name("tcp");
            }
            #[test]
            fn over_ucx_by_messages() {
                super::$name("messages");
            }
            #[test]
            fn over_ucx_by_puts() {
                super::$name("puts");
            }
        }
    )*};
}
every_way![a_stopped_sink_holds_back_only_its_own, a_stopped_sink_keeps_no_blocks];
