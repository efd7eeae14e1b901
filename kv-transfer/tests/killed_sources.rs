//! Sources that are killed in the middle of their writes, and what becomes of the sink: where UCX emulates puts, its process is aborted.

mod common;

use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use common::process::{Other, hex, say, unhex};
use common::*;
use std::os::unix::process::parent_id;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// 8 KiB a block and layer, 32 MiB a layer: writes that UCX acknowledges one by one, and far more of them than sockets hold.
const BLOCKS: u32 = 4096;
const TOKENS: u32 = BLOCKS * 16;
const ROUNDS: u64 = 20;
/// Far longer than any wait here, and so is the quarter of it after which a silent peer is probed: what comes back before then comes back
/// because the kernel closed a connection.
const SILENT_MS_MAX: u64 = 60 * 60 * 1000;
const _: () = assert!(SILENT_MS_MAX as u128 / 4 > 2 * PATIENCE.as_millis());
/// What a killed peer's blocks may take to come back on a busy machine; chaos measures the promise.
const QUARANTINE_MAX: Duration = Duration::from_secs(10);

fn config(name: &'static str) -> NodeConfig {
    let mut config = NodeConfig::new(name, KvLayout::llama(16, 2, 1, 128, Dtype::Bf16).unwrap(), BLOCKS);
    (config.limits.in_flight_bytes_max, config.limits.peer_silent_ms) = (1 << 30, SILENT_MS_MAX);
    config
}

fn party(name: &str) -> Party {
    Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(1) }
}

fn choice_of(way: &str) -> TransportChoice {
    if way == "puts" { ucx_one_sided() } else { TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into()) }
}

/// Not a test of its own: the sink, and the sources that are killed.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(args) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    match args.split(' ').collect::<Vec<_>>()[..] {
        ["sink"] => {
            let node = config("sink").start(TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into()));
            say(&format!("address: {}", hex(&node.transfer.address().to_bytes())));
            let parent = parent_id();
            while parent_id() == parent {
                (0..ROUNDS).for_each(|round| drop(node.sink.take_adopted(&format!("after-{round}"))));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        ["source", way, address] => {
            let node = config("source").start(choice_of(way));
            let address = TransferAddress::from_bytes(&unhex(address)).unwrap();
            let (put, _) = node.offer(&Peer { party: party("sink"), address, shard: 0 }, "killed", TOKENS, 1);
            let done: Fence = Arc::new(AlreadyDone);
            (0..2).for_each(|layer| put.layer_launched(layer, TOKENS as usize, &done));
            let until = Instant::now() + PATIENCE;
            while node.transfer.stats().total.puts == 0 {
                if Instant::now() >= until {
                    put.abort("it never wrote");
                    panic!("{:?}", put.wait());
                }
                std::thread::sleep(Duration::from_millis(2));
            }
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

    /// Kills a source that is writing, in every other round while the sink is stopped, so that it finds all of it at once. False where the
    /// source could not write.
    fn kill_a_source(&self, way: &str, round: u64) -> bool {
        let Some((source, _)) = Other::try_start(&["source", way, &self.address], "writing:") else { return false };
        std::thread::sleep(Duration::from_millis(round));
        if round.is_multiple_of(2) {
            self.sink.signal("-STOP");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(source);
        if round.is_multiple_of(2) {
            self.sink.signal("-CONT");
        }
        true
    }

    /// Hands a sequence over that takes the sink's whole pool; how long there was no room for it.
    fn hand_over(&self, round: u64) -> Duration {
        let address = TransferAddress::from_bytes(&unhex(&self.address)).unwrap();
        let (peer, begin) = (Peer { party: party("sink"), address, shard: 0 }, Instant::now());
        loop {
            // Of whatever is in its blocks: filling them would take longer than what is measured.
            let hold = self.others.pool.take(BLOCKS as usize, 0).expect("the pool is whole");
            let (request_id, blocks) = (RequestId::try_new(format!("after-{round}")).unwrap(), hold.blocks.clone());
            let request = PutRequest { request_id, tokens: TOKENS, blocks, deadline: Instant::now() + PATIENCE, hold };
            let put = self.others.transfer.put(&peer, request).unwrap();
            self.others.launch(&put, TOKENS, TOKENS);
            put.finish(commit(TOKENS));
            match put.wait() {
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
        // A sink that takes its time to die is found by the source after.
        if !scene.kill_a_source("puts", round) {
            return eventually("the sink is dead", || scene.sink.has_ended());
        }
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
    // By how the sink finds the death: at once with all that was written, or as it comes.
    let mut longest = [Duration::ZERO; 2];
    for round in 0..ROUNDS {
        assert!(scene.kill_a_source("messages", round), "the source of round {round} never wrote");
        let longest = &mut longest[round as usize % 2];
        *longest = scene.hand_over(round).max(*longest);
        assert!(!scene.sink.has_ended(), "the sink died in round {round}");
    }
    let [at_once, as_it_comes] = longest;
    assert!(longest.iter().all(|wait| *wait < QUARANTINE_MAX), "blocks of killed sources were back after {longest:?}");
    eprintln!(
        "blocks of {ROUNDS} killed sources were back within {at_once:?} found at once, {as_it_comes:?} as it comes"
    );
}
