//! Two processes: what happens when the other one is killed, or stops answering.

mod common;

use baton_kv_transfer::*;
use baton_types::{Incarnation, InstanceId};
use common::process::{Other, hex, say, unhex};
use common::*;

fn tcp() -> TransportChoice {
    TransportChoice::Tcp { bind: [127, 0, 0, 1].into(), port: 0 }
}

fn ucx() -> TransportChoice {
    TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into())
}

fn config(name: &'static str) -> NodeConfig {
    let mut config = NodeConfig::new(name, small(16), 24);
    config.limits.peer_silent_ms = 3_000;
    config
}

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(args) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    let args: Vec<&str> = args.split(' ').collect();
    let choice = if args[1] == "tcp" { tcp() } else { ucx() };
    let node = config("other").start(choice);
    match args[0] {
        "sink" => {
            node.gate.hold(HoldPoint::Verify);
            say(&format!("address: {}", hex(&node.transfer.address().to_bytes())));
        }
        "source" => {
            node.gate.hold(HoldPoint::Commit);
            let party = Party { instance: InstanceId::try_new("here").unwrap(), incarnation: Incarnation(1) };
            let peer = Peer { party, address: TransferAddress::from_bytes(&unhex(args[2])).unwrap(), shard: 0 };
            let (put, _) = node.offer(&peer, "r", 70, 1);
            node.send_all(&put, 70);
            eventually("held before the commit", || node.transfer.stats().held == 1);
            say("held: now");
            std::thread::sleep(PATIENCE * 2);
            drop(put);
        }
        other => panic!("no role {other}"),
    }
    std::thread::sleep(PATIENCE * 2);
}

/// Another process writes everything and then dies, or stops, before its commit.
fn source_is_lost(choice: TransportChoice, signal: &str, hazard: Option<Hazard>) {
    let name = if matches!(choice, TransportChoice::Tcp { .. }) { "tcp" } else { "ucx" };
    let fenced = hazard.is_none();
    let mut ours = config("here");
    ours.hazards = hazard.into();
    let node = ours.start(choice);
    let address = hex(&node.transfer.address().to_bytes());
    let (other, _) = Other::start(&["source", name, &address], "held:");
    assert!(!node.pool.is_whole());
    other.signal(signal);
    eventually("the loss is noticed", || !node.sink.failures().is_empty());
    let (_, failure) = &node.sink.failures()[0];
    assert!(matches!(failure, HandoffFailure::PeerLost(_)), "{failure}");
    let party = Party { instance: InstanceId::try_new("other").unwrap(), incarnation: Incarnation(1) };
    if !fenced {
        eventually("its blocks are quarantined", || node.pool.quarantined() == 5);
        eventually("that is told", || node.transfer.stats().quarantined.into_values().eq([5]));
        drop(other); // Dead for certain.
        node.transfer.peer_is_dead(&party);
    }
    eventually("its blocks are back", || node.is_quiet() && node.pool.quarantined() == 0);
}

/// The other process is lost while this one waits for its acknowledgement.
fn sink_is_lost(choice: TransportChoice, signal: &str) {
    let name = if matches!(choice, TransportChoice::Tcp { .. }) { "tcp" } else { "ucx" };
    let (other, address) = Other::start(&["sink", name], "address:");
    let node = config("here").start(choice);
    let party = Party { instance: InstanceId::try_new("other").unwrap(), incarnation: Incarnation(1) };
    let peer = Peer { party, address: TransferAddress::from_bytes(&unhex(&address)).unwrap(), shard: 0 };
    let (put, _) = node.offer(&peer, "r", 70, 1);
    node.send_all(&put, 70);
    eventually("everything is written", || node.transfer.stats().total.flushes > 0);
    other.signal(signal);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::PeerLost(_)), "{failure}");
    eventually("its blocks are back", || node.is_quiet());
}

#[test]
fn tcp_source_killed() {
    source_is_lost(tcp(), "-KILL", None);
}

#[test]
fn tcp_source_stopped() {
    source_is_lost(tcp(), "-STOP", None);
}

#[test]
fn tcp_sink_killed() {
    sink_is_lost(tcp(), "-KILL");
}

#[test]
fn tcp_sink_stopped() {
    sink_is_lost(tcp(), "-STOP");
}

#[test]
fn ucx_source_killed() {
    source_is_lost(ucx(), "-KILL", None);
}

#[test]
fn ucx_source_killed_on_lanes_without_a_fence() {
    source_is_lost(ucx(), "-KILL", Some(Hazard::NoFences));
}

#[test]
fn ucx_quarantine_outlives_a_restart_of_its_writer() {
    let mut ours = config("here");
    (ours.blocks, ours.limits.accepted_handoffs_max, ours.hazards) = (20, 1, [Hazard::NoFences].into());
    ours.limits.quarantined_blocks_max = 20; // What the killed source leaves behind is a quarter of what may be quarantined.
    let node = ours.start(ucx());
    let (other, _) = Other::start(&["source", "ucx", &hex(&node.transfer.address().to_bytes())], "held:");
    other.signal("-KILL");
    eventually("its blocks are quarantined", || node.pool.quarantined() == 5);
    assert!(!node.transfer.fences());

    let mut again = config("other");
    again.incarnation = 2;
    let again = again.start(ucx());
    let (put, _) = again.offer(&node.peer(), "r2", 16, 1);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Quarantine, .. }), "{failure}");
    assert!(failure.to_string().contains("5 blocks that other could still write"), "{failure}");

    // Others are served, and what is quarantined takes nobody's place.
    let bystander = config("bystander").start(ucx());
    assert!(bystander.transfer.fences());
    let (put, blocks) = bystander.offer(&node.peer(), "r3", 40, 1);
    bystander.send_all(&put, 40);
    put.wait().unwrap();
    node.check_adopted("r3", &bystander, &blocks, 40);

    // Dead for certain: its next start is served.
    drop(other);
    node.transfer.peer_is_dead(&Party { instance: InstanceId::try_new("other").unwrap(), incarnation: Incarnation(1) });
    eventually("its blocks are back", || node.pool.quarantined() == 0);
    let (put, blocks) = again.offer(&node.peer(), "r4", 40, 1);
    again.send_all(&put, 40);
    put.wait().unwrap();
    node.check_adopted("r4", &again, &blocks, 40);
}

#[test]
fn ucx_offers_on_lanes_without_a_fence_stay_within_the_quarantine_bound() {
    let mut ours = config("here");
    (ours.blocks, ours.hazards) = (20, [Hazard::NoFences].into()); // A quarter of these may come to be quarantined: one of the handoffs below.
    let (node, source) = (ours.start(ucx()), config("source").start(ucx()));
    source.gate.hold(HoldPoint::Puts);
    let sent = ["a", "b", "c"].map(|request| {
        let (put, blocks) = source.offer(&node.peer(), request, 40, 1);
        source.send_all(&put, 40);
        (request, put, blocks)
    });
    eventually("one is granted", || source.transfer.stats().held == 1);
    eventually("all are offered", || node.transfer.stats().sinks == 3);
    assert_eq!(node.transfer.stats().tickets, 1, "two would be more than may be quarantined");
    source.gate.open(HoldPoint::Puts);
    for (request, put, blocks) in sent {
        put.wait().unwrap();
        node.check_adopted(request, &source, &blocks, 40);
    }
    let (put, _) = source.offer(&node.peer(), "long", 90, 1);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Quarantine, .. }), "{failure}");
    eventually("all blocks are back", || node.is_quiet() && source.is_quiet());
}

#[test]
fn ucx_source_stopped() {
    source_is_lost(ucx(), "-STOP", None);
}

#[test]
fn ucx_source_stopped_on_lanes_without_a_fence() {
    source_is_lost(ucx(), "-STOP", Some(Hazard::NoFences));
}

#[test]
fn ucx_sink_killed() {
    sink_is_lost(ucx(), "-KILL");
}

#[test]
fn ucx_sink_stopped() {
    sink_is_lost(ucx(), "-STOP");
}
