//! Sources that are killed in the middle of their writes, and what becomes of the sink: where UCX emulates puts, its process is aborted.

mod common;

use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use common::process::{Other, hex, say, unhex};
use common::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// 8 KiB a block and layer, 32 MiB a layer: writes that UCX acknowledges one by one, and far more of them than sockets hold.
const BLOCKS: u32 = 4096;
const TOKENS: u32 = BLOCKS * 16;
const ROUNDS: u64 = 20;
/// What a killed peer's blocks may take to come back.
const QUARANTINE_MAX: Duration = Duration::from_secs(1);

fn config(name: &'static str) -> NodeConfig {
    let mut config = NodeConfig::new(name, KvLayout::llama(16, 2, 1, 128, Dtype::Bf16).unwrap(), BLOCKS);
    config.limits.in_flight_bytes_max = 1 << 30;
    config
}

fn party(name: &str) -> Party {
    Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(1) }
}

fn choice_of(way: &str) -> TransportChoice {
    if way == "puts" { ucx_one_sided() } else { TransportChoice::ucx([127, 0, 0, 1].into()) }
}

/// Not a test of its own: the sink, and the sources that are killed.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(args) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    match args.split(' ').collect::<Vec<_>>()[..] {
        ["sink"] => {
            let node = config("sink").start(TransportChoice::ucx([127, 0, 0, 1].into()));
            say(&format!("address: {}", hex(&node.transfer.address().to_bytes())));
            let until = Instant::now() + PATIENCE * 6;
            while Instant::now() < until {
                (0..ROUNDS).for_each(|round| drop(node.sink.take_adopted(&format!("after-{round}"))));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        ["source", way, address] => {
            let node = config("source").start(choice_of(way));
            let address = TransferAddress::from_bytes(&unhex(address)).unwrap();
            let (outgoing, _) = node.offer(&Peer { party: party("sink"), address, shard: 0 }, "killed", TOKENS, 1);
            let done: Fence = Arc::new(AlreadyDone);
            (0..2).for_each(|layer| outgoing.layer_launched(layer, TOKENS as usize, &done));
            eventually("it writes", || node.transfer.stats().total.puts > 0);
            say("writing: now");
            std::thread::sleep(PATIENCE);
        }
        _ => panic!("no role {args}"),
    }
}

/// A sink in a process of its own, and others that hand over to it.
struct Scene {
    sink: Other,
    address: String,
    others: Node,
}

impl Scene {
    fn start() -> Self {
        let (sink, address) = Other::start(&["sink"], "address:");
        Self { sink, address, others: config("others").start(choice_of("messages")) }
    }

    /// Kills a source that is writing, in every other round while the sink is stopped, so that it finds all of it at once.
    fn kill_a_source(&self, way: &str, round: u64) {
        let (source, _) = Other::start(&["source", way, &self.address], "writing:");
        std::thread::sleep(Duration::from_millis(round));
        if round.is_multiple_of(2) {
            self.sink.signal("-STOP");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(source);
        if round.is_multiple_of(2) {
            self.sink.signal("-CONT");
        }
    }

    /// Hands a sequence over that takes the sink's whole pool; how long there was no room for it.
    fn hand_over(&self, round: u64) -> Duration {
        let address = TransferAddress::from_bytes(&unhex(&self.address)).unwrap();
        let (peer, begin) = (Peer { party: party("sink"), address, shard: 0 }, Instant::now());
        loop {
            let (outgoing, _) = self.others.offer(&peer, &format!("after-{round}"), TOKENS, 1);
            self.others.launch(&outgoing, TOKENS, TOKENS);
            outgoing.finish(commit(TOKENS));
            match outgoing.wait() {
                Ok(report) => return report.granted_at.saturating_duration_since(begin),
                Err(HandoffFailure::Refused { reason: RefuseReason::NoRoom, .. }) if begin.elapsed() < PATIENCE => {}
                Err(failure) => panic!("round {round}: {failure}"),
            }
            eventually("the blocks are back here", || self.others.pool.is_whole());
        }
    }
}

#[test]
fn emulated_puts_take_the_sink_with_them() {
    let mut scene = Scene::start();
    for round in 0..ROUNDS {
        scene.kill_a_source("puts", round);
        std::thread::sleep(Duration::from_millis(200));
        if scene.sink.has_ended() {
            return;
        }
    }
    panic!("the sink outlived {ROUNDS} killed sources: the test beside this one shows nothing");
}

#[test]
fn messages_do_not() {
    let mut scene = Scene::start();
    let mut longest = Duration::ZERO;
    for round in 0..ROUNDS {
        scene.kill_a_source("messages", round);
        longest = longest.max(scene.hand_over(round));
        assert!(!scene.sink.has_ended(), "the sink died in round {round}");
    }
    assert!(longest < QUARANTINE_MAX, "blocks of a killed source were back after {longest:?}");
    eprintln!("blocks of {ROUNDS} killed sources were back within {longest:?}");
}
