//! Two processes: what happens when the other one is killed, or stops answering.

mod common;

use baton_kv_transfer::*;
use baton_types::{Incarnation, InstanceId};
use common::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

fn tcp() -> TransportChoice {
    TransportChoice::Tcp { bind: [127, 0, 0, 1].into(), port: 0 }
}

fn ucx() -> TransportChoice {
    TransportChoice::ucx([127, 0, 0, 1].into())
}

fn config(name: &'static str) -> NodeConfig {
    let mut config = NodeConfig::new(name, small(16), 24);
    config.limits.peer_silent_ms = 1_000;
    config
}

/// A process that is killed with its handle.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Other {
    /// Runs the child's role of this very binary, and reads lines until one starts with `expected`; what follows it there.
    fn start(args: &[&str], expected: &str) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["role_of_the_other_process", "--exact", "--ignored", "--nocapture"])
            .env("BATON_TEST_OTHER_PROCESS", args.join(" "))
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let found = lines
            .map_while(Result::ok)
            .find_map(|line| line.split_once(expected).map(|(_, rest)| rest.trim().to_owned()));
        (Self(child), found.expect("the other process says what it is asked to"))
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(args) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    let args: Vec<&str> = args.split(' ').collect();
    let choice = if args[1] == "tcp" { tcp() } else { ucx() };
    let say = |line: String| {
        println!("{line}");
        std::io::stdout().flush().unwrap();
    };
    let node = config("other").start(choice);
    match args[0] {
        "sink" => {
            node.gate.hold(Phase::Verify);
            say(format!("\naddress: {}", hex(&node.transfer.address().to_bytes())));
        }
        "source" => {
            node.gate.hold(Phase::Commit);
            let party = Party { instance: InstanceId::try_new("here").unwrap(), incarnation: Incarnation(1) };
            let peer = Peer { party, address: TransferAddress::from_bytes(&unhex(args[2])).unwrap() };
            let (outgoing, _) = node.offer(&peer, "r", 70, 1);
            node.send_all(&outgoing, 70);
            eventually("held before the commit", || node.transfer.stats().held == 1);
            say("\nheld: now".into());
            std::thread::sleep(PATIENCE * 2);
            drop(outgoing);
        }
        other => panic!("no role {other}"),
    }
    std::thread::sleep(PATIENCE * 2);
}

/// Another process writes everything and then dies, or stops, before its commit.
fn source_is_lost(choice: TransportChoice, signal: &str, fencing: Fencing) {
    let name = if matches!(choice, TransportChoice::Tcp { .. }) { "tcp" } else { "ucx" };
    let fenced = fencing == Fencing::ByLanes;
    let mut ours = config("here");
    ours.fencing = fencing;
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
        assert_eq!(node.transfer.stats().quarantined_blocks, 5);
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
    let peer = Peer { party, address: TransferAddress::from_bytes(&unhex(&address)).unwrap() };
    let (outgoing, _) = node.offer(&peer, "r", 70, 1);
    node.send_all(&outgoing, 70);
    eventually("everything is written", || node.transfer.stats().total.flushes > 0);
    other.signal(signal);
    let failure = outgoing.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::PeerLost(_)), "{failure}");
    eventually("its blocks are back", || node.is_quiet());
}

#[test]
fn tcp_source_killed() {
    source_is_lost(tcp(), "-KILL", Fencing::ByLanes);
}

#[test]
fn tcp_source_stopped() {
    source_is_lost(tcp(), "-STOP", Fencing::ByLanes);
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
    source_is_lost(ucx(), "-KILL", Fencing::ByLanes);
}

#[test]
fn ucx_source_killed_on_lanes_without_a_fence() {
    source_is_lost(ucx(), "-KILL", Fencing::Never);
}

#[test]
fn ucx_quarantine_outlives_a_restart_of_its_writer() {
    let mut ours = config("here");
    (ours.blocks, ours.limits.incoming_max, ours.fencing) = (20, 1, Fencing::Never); // A quarter of these is what the killed source leaves behind.
    let node = ours.start(ucx());
    let (other, _) = Other::start(&["source", "ucx", &hex(&node.transfer.address().to_bytes())], "held:");
    other.signal("-KILL");
    eventually("its blocks are quarantined", || node.pool.quarantined() == 5);

    let mut again = config("other");
    again.incarnation = 2;
    let again = again.start(ucx());
    let (outgoing, _) = again.offer(&node.peer(), "r2", 16, 1);
    let failure = outgoing.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Quarantine, .. }), "{failure}");

    // Others are served, and what is quarantined takes nobody's place.
    let bystander = config("bystander").start(ucx());
    let (outgoing, blocks) = bystander.offer(&node.peer(), "r3", 40, 1);
    bystander.send_all(&outgoing, 40);
    outgoing.wait().unwrap();
    node.check_adopted("r3", &bystander, &blocks, 40);
}

#[test]
fn ucx_source_stopped() {
    source_is_lost(ucx(), "-STOP", Fencing::ByLanes);
}

#[test]
fn ucx_source_stopped_on_lanes_without_a_fence() {
    source_is_lost(ucx(), "-STOP", Fencing::Never);
}

#[test]
fn ucx_sink_killed() {
    sink_is_lost(ucx(), "-KILL");
}

#[test]
fn ucx_sink_stopped() {
    sink_is_lost(ucx(), "-STOP");
}
