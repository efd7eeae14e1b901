//! Pools of a remote device, and guards that are left out: what each of them prevents.

mod common;

use baton_kv_transfer::*;
use baton_memory::{RemoteConfig, RemotePool};
use baton_types::*;
use common::*;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TOKENS: u32 = 40;

fn choice() -> TransportChoice {
    TransportChoice::tcp([127, 0, 0, 1].into())
}

fn node(name: &'static str, hazard: Option<Hazard>, memory: Memory) -> Node {
    let mut config = NodeConfig::new(name, small(16), 24);
    (config.hazards, config.memory) = (hazard.into(), memory);
    config.start(choice())
}

fn bytes() -> usize {
    KvPoolMap::try_new(small(16), 24).unwrap().bytes()
}

/// A handoff whose last layer the device stores only after the transfer knows of it. Whether the sink has what the device has stored.
fn computed_late(hazard: Option<Hazard>) -> bool {
    let (source, sink) = (node("p", hazard, Memory::Remote), node("d", None, Memory::Host));
    let (put, blocks) = source.offer(&sink.peer(), "r", TOKENS, 1);
    let manual = Arc::new(ManualFence::default());
    let fence: Fence = manual.clone();
    (0..2).for_each(|layer| put.layer_launched(layer, TOKENS as usize, &fence));
    put.finish(commit(TOKENS));
    if hazard.is_some() {
        put.wait().unwrap();
        source.fill(&blocks, 2);
    } else {
        std::thread::sleep(Duration::from_millis(50));
        source.fill(&blocks, 2);
        manual.set(FenceStatus::Done);
        put.wait().unwrap();
    }
    let handoff = sink.sink.take_adopted("r").expect("adopted");
    sink.bytes_of(handoff.hold.blocks(), TOKENS) == source.bytes_of(&blocks, TOKENS)
}

#[test]
fn without_fences_kv_is_read_before_it_is_there() {
    assert!(!computed_late(Some(Hazard::EarlyReads)));
}

#[test]
fn kv_is_read_after_its_fence() {
    assert!(computed_late(None));
}

/// A handoff to a sink whose device takes long to store what it is given.
fn stored_late(hazard: Option<Hazard>, choice: &TransportChoice) -> PutOutcome {
    // Without the guard, the sink has to look before its device stores, on a busy machine too.
    let write_delay = Duration::from_millis(if hazard.is_some() { 2_000 } else { 100 });
    let slow = RemoteConfig { write_delay, ..RemoteConfig::default() };
    let mut config = NodeConfig::new("d", small(16), 24);
    config.hazards = hazard.into();
    config.memory = Memory::Given(RemotePool::new(bytes(), slow).unwrap());
    let (source, sink) = (NodeConfig::new("p", small(16), 24).start(choice.clone()), config.start(choice.clone()));
    let (put, blocks) = source.offer(&sink.peer(), "r", TOKENS, 1);
    source.send_all(&put, TOKENS);
    let outcome = put.wait();
    if outcome.is_ok() {
        sink.check_adopted("r", &source, &blocks, TOKENS);
    }
    outcome
}

fn choices() -> [TransportChoice; 2] {
    [choice(), TransportChoice::ucx(UcxLanes::SharedMemory, [127, 0, 0, 1].into())]
}

#[test]
fn without_the_guard_writes_count_before_they_are_stored() {
    for choice in choices() {
        let outcome = stored_late(Some(Hazard::UnstoredWrites), &choice);
        assert!(matches!(outcome, Err(HandoffFailure::Corrupt(_))), "{outcome:?}");
    }
}

#[test]
fn writes_count_once_they_are_stored() {
    for choice in choices() {
        stored_late(None, &choice).unwrap();
    }
}

/// A handoff that ends while the sink's device stores its writes: its blocks are free only when the last one is stored.
fn ends_while_writes_are_stored(choice: &TransportChoice, end: impl FnOnce(&Node, &PutHandle)) {
    let memory = RemotePool::new(bytes(), RemoteConfig::default()).unwrap();
    let mut config = NodeConfig::new("d", small(16), 24);
    config.memory = Memory::Given(memory.clone());
    let (source, sink) = (NodeConfig::new("p", small(16), 24).start(choice.clone()), config.start(choice.clone()));
    source.gate.hold(HoldPoint::Commit);
    let (put, _) = source.offer(&sink.peer(), "r", TOKENS, 1);
    eventually("it is granted", || sink.transfer.stats().tickets > 0);
    memory.hold();
    source.launch(&put, TOKENS, TOKENS);
    eventually("something is sent", || source.transfer.stats().total.puts > 0);
    std::thread::sleep(Duration::from_millis(50));
    end(&source, &put);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!sink.pool.is_whole(), "writes are on their way");
    memory.release();
    eventually("all is free", || sink.is_quiet() && source.is_quiet());
    assert!(put.wait().is_err());
}

#[test]
fn blocks_of_an_aborted_handoff_are_free_once_its_writes_are_stored() {
    for choice in choices() {
        ends_while_writes_are_stored(&choice, |_, put| put.abort("the test gives up"));
    }
}

#[test]
fn blocks_of_a_lost_source_are_free_once_its_writes_are_stored() {
    ends_while_writes_are_stored(&choice(), |source, _| source.transfer.stop(Instant::now()));
}

/// The sink ends a connection for which the source's device still reads.
fn comes_back_while_the_device_reads(choice: &TransportChoice) {
    let memory = RemotePool::new(bytes(), RemoteConfig::default()).unwrap();
    let (mut source, mut sink) = (NodeConfig::new("p", small(16), 24), NodeConfig::new("d", small(16), 24));
    source.memory = Memory::Given(memory.clone());
    sink.limits.abort_ms = 100;
    let (source, sink) = (source.start(choice.clone()), sink.start(choice.clone()));
    let (first, _) = source.offer(&sink.peer(), "r", TOKENS, 1);
    eventually("it is granted", || sink.transfer.stats().tickets > 0);
    let hold = source.pool.take(sink.map.layout().blocks_for(TOKENS as usize), 2).unwrap();
    let blocks = hold.blocks.clone();
    source.fill(&blocks, 2);
    memory.hold();
    source.launch(&first, TOKENS, TOKENS);
    eventually("the device reads", || source.transfer.stats().total.puts > 0 && memory.running() > 0);
    let request_id = RequestId::try_new("r").unwrap();
    sink.transfer.cancel(&request_id, "the test gives up");
    eventually("the sink has closed the connection", || sink.is_quiet());
    std::thread::sleep(Duration::from_millis(100));
    // The same request comes again at once.
    let deadline = Instant::now() + PATIENCE;
    let request = PutRequest { request_id, tokens: TOKENS, blocks: blocks.clone(), deadline, hold };
    let second = source.transfer.put(&sink.peer(), request).unwrap();
    eventually("it is granted again", || sink.transfer.stats().tickets > 0);
    assert!(memory.running() > 0, "the device still reads for the first connection");
    source.send_all(&second, TOKENS);
    memory.release();
    second.wait().unwrap();
    assert!(first.wait().is_err());
    // Once: a second delivery would not be adopted.
    let handoff = sink.sink.take_adopted("r").expect("adopted");
    assert!(sink.bytes_of(handoff.hold.blocks(), TOKENS) == source.bytes_of(&blocks, TOKENS));
    drop(handoff);
    eventually("all is free", || sink.is_quiet() && source.is_quiet());
    assert!(sink.sink.take_adopted("r").is_none());
}

#[test]
fn a_request_that_comes_again_takes_a_new_connection_while_the_device_reads_for_the_old_one() {
    choices().iter().for_each(comes_back_while_the_device_reads);
}

/// A sink that answers flushes too early, whose device holds or delays writes.
fn hasty_sink(choice: &TransportChoice, memory: &Arc<RemotePool>, hazard: Option<Hazard>) -> Node {
    let mut config = NodeConfig::new("d", small(16), 24);
    config.memory = Memory::Given(memory.clone());
    config.hazards = hazard.into_iter().chain([Hazard::UnstoredWrites]).collect::<Vec<_>>().into();
    config.start(choice.clone())
}

/// A handoff that ends while the sink's device stores its writes, though its source says that all of them are stored. Whether its blocks
/// are free before the last one is.
fn is_free_too_early(choice: &TransportChoice, hazard: Option<Hazard>) -> bool {
    let memory = RemotePool::new(bytes(), RemoteConfig::default()).unwrap();
    let (source, sink) =
        (NodeConfig::new("p", small(16), 24).start(choice.clone()), hasty_sink(choice, &memory, hazard));
    source.gate.hold(HoldPoint::Commit);
    let (put, _) = source.offer(&sink.peer(), "r", TOKENS, 1);
    eventually("it is granted", || sink.transfer.stats().tickets > 0);
    memory.hold();
    source.launch(&put, TOKENS, TOKENS);
    eventually("writes are on their way", || memory.running() > 0);
    put.abort("the test gives up");
    assert!(put.wait().is_err());
    eventually("the sink knows", || sink.transfer.stats().sinks == 0);
    std::thread::sleep(Duration::from_millis(50));
    let is_free = sink.pool.is_whole();
    assert!(memory.running() > 0);
    memory.release();
    eventually("all is free", || sink.is_quiet() && source.is_quiet());
    assert_eq!(sink.pool.quarantined(), 0);
    is_free
}

#[test]
fn without_draining_blocks_are_free_while_writes_are_on_their_way() {
    choices().iter().for_each(|choice| assert!(is_free_too_early(choice, Some(Hazard::UndrainedWindows))));
}

#[test]
fn blocks_are_free_once_their_last_write_is_stored_whatever_its_source_says() {
    choices().iter().for_each(|choice| assert!(!is_free_too_early(choice, None)));
}

/// Whether a write is stored in blocks that the sink has adopted. All blocks of both sides hold the same bytes before, so every checksum
/// matches before a write is stored.
fn is_written_after_adoption(choice: &TransportChoice, hazard: Option<Hazard>) -> bool {
    let slow = RemoteConfig { write_delay: Duration::from_millis(2_000), ..RemoteConfig::default() };
    let memory = RemotePool::new(bytes(), slow).unwrap();
    let (source, sink) =
        (NodeConfig::new("p", small(16), 24).start(choice.clone()), hasty_sink(choice, &memory, hazard));
    let (put, _) = source.offer(&sink.peer(), "r", TOKENS, 1);
    let soon = || Instant::now() + PATIENCE;
    [&source, &sink].into_iter().for_each(|node| node.memory.write_by(soon(), 0, &vec![7; bytes()]).unwrap());
    source.send_all(&put, TOKENS);
    put.wait().unwrap();
    let handoff = sink.sink.take_adopted("r").expect("adopted");
    // As soon as the blocks are its own, the sink's device computes into them.
    let places = sink.places(handoff.hold.blocks(), 0..TOKENS);
    places.iter().for_each(|place| memory.device_side().copy_in(place.start, &vec![5; place.len()]));
    eventually("every write is stored", || memory.running() == 0);
    std::thread::sleep(Duration::from_millis(20));
    sink.bytes_of(handoff.hold.blocks(), TOKENS).iter().any(|byte| *byte != 5)
}

#[test]
fn without_draining_a_late_write_changes_what_is_adopted() {
    choices().iter().for_each(|choice| assert!(is_written_after_adoption(choice, Some(Hazard::UndrainedWindows))));
}

#[test]
fn what_is_adopted_is_written_no_more() {
    choices().iter().for_each(|choice| assert!(!is_written_after_adoption(choice, None)));
}

/// A seeded defect: the device's memory passes for the host's, at an address that nobody may access.
#[test]
fn a_transfer_that_takes_a_remote_pool_for_host_memory_ends_its_process() {
    let child = |role: &str| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["role_of_the_other_process", "--exact", "--ignored", "--nocapture"]);
        child.env("BATON_TEST_OTHER_PROCESS", role).status().unwrap()
    };
    assert!(child("remote").success());
    assert_eq!(child("passing for host").signal(), Some(libc::SIGSEGV));
}

#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() {
    let Ok(role) = std::env::var("BATON_TEST_OTHER_PROCESS") else { return };
    let memory = match role.as_str() {
        "remote" => RemotePool::new(bytes(), RemoteConfig::default()),
        _ => RemotePool::passing_for_host(bytes(), RemoteConfig::default()),
    };
    // In TLS the bytes are read here; the system would only refuse to read them.
    in_tls(|| {
        let (source, sink) = (node("p", None, Memory::Given(memory.unwrap())), node("d", None, Memory::Host));
        let (put, blocks) = source.offer(&sink.peer(), "r", TOKENS, 1);
        source.send_all(&put, TOKENS);
        put.wait().unwrap();
        sink.check_adopted("r", &source, &blocks, TOKENS);
    });
}
