//! What fails, frees its blocks behind a fence, and is never adopted.

use super::pair;
use crate::common::*;
use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Kinds of messages.
pub(super) const OFFER: u8 = 4;
pub(super) const CHECKSUMS: u8 = 7;
pub(super) const COMMIT: u8 = 8;

fn quiet(source: &Node, sink: &Node) {
    eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
    assert_eq!(sink.pool.quarantined(), 0);
}

/// Another handoff between the two works.
fn still_works(source: &Node, sink: &Node) {
    still_works_with(source, sink, 50);
}

fn still_works_with(source: &Node, sink: &Node, tokens: u32) {
    let (put, blocks) = source.offer(&sink.peer(), "after", tokens, 77);
    source.send_all(&put, tokens);
    put.wait().unwrap();
    sink.check_adopted("after", source, &blocks, tokens);
    quiet(source, sink);
}

pub fn wrong_ticket_is_never_adopted(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let left = Arc::new(AtomicU32::new(1));
    source.gate.bend(move |mut message| {
        if message[3] == COMMIT && left.swap(0, Ordering::SeqCst) == 1 {
            message[4] ^= 1; // Lowest byte of the ticket.
        }
        vec![message]
    });
    // The true ticket stays open until its deadline, since nothing that names it fails.
    let deadline = Instant::now() + Duration::from_secs(2);
    let (put, _) = source.offer_until(&sink.peer(), "forged", 32, 1, deadline);
    source.send_all(&put, 32);
    assert!(put.wait().is_err());
    assert!(sink.sink.take_adopted("forged").is_none());
    quiet(&source, &sink);
    eventually("the forged commit is counted", || sink.transfer.stats().total.stale_messages >= 1);
    still_works(&source, &sink);
}

pub fn corrupted_byte_is_found(choice: &TransportChoice) {
    // At the sink, after every byte arrived and before its checksums are compared; and a checksum on its way.
    let (source, sink) = pair(choice);
    source.gate.hold(HoldPoint::Commit);
    let left = Arc::new(AtomicU32::new(1));
    source.gate.bend(move |mut message| {
        if message[3] == CHECKSUMS && left.swap(0, Ordering::SeqCst) == 1 {
            *message.last_mut().unwrap() ^= 0x80;
        }
        vec![message]
    });
    let (put, _) = source.offer(&sink.peer(), "corrupt", 40, 1);
    source.send_all(&put, 40);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Corrupt(_)), "{failure}");
    assert!(failure.to_string().contains("plane"), "{failure}");
    assert!(sink.sink.take_adopted("corrupt").is_none());
    eventually("the sink's worker knows", || matches!(sink.sink.failures()[..], [(_, HandoffFailure::Corrupt(_))]));
    source.gate.open(HoldPoint::Commit);
    quiet(&source, &sink);
    still_works(&source, &sink);
}

/// From one token to one more than two granules: the last byte of each plane is damaged once everything has arrived, and before anything
/// is compared.
pub fn the_last_byte_of_every_length_is_compared(choice: &TransportChoice) {
    let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
    let (source, sink) = (NodeConfig::new("p", layout.clone(), 4), NodeConfig::new("d", layout, 4));
    let (source, sink) = (source.start(choice.clone()), sink.start(choice.clone()));
    source.gate.hold(HoldPoint::Commit);
    let kept = Mutex::new(Vec::new());
    source.gate.bend(move |message| match message[3] {
        CHECKSUMS => {
            kept.lock().unwrap().push(message);
            Vec::new()
        }
        COMMIT => std::mem::take(&mut *kept.lock().unwrap()).into_iter().chain([message]).collect(),
        _ => vec![message],
    });
    // The sink's pool gives the same blocks each time.
    let blocks = sink.pool.take(3, 0x9e37_79b9).unwrap().blocks.clone();
    for (tokens, plane) in (1..=33).flat_map(|tokens| [(tokens, 0), (tokens, 1)]) {
        let request = format!("r{tokens}-{plane}");
        let (put, _) = source.offer(&sink.peer(), &request, tokens, 1);
        source.send_all(&put, tokens);
        eventually("everything has arrived", || source.transfer.stats().held == 1);
        let last = (tokens - 1) % 16;
        let at =
            sink.map.token_range(0, 0, blocks.0[0].blocks[(tokens as usize - 1) / 16], plane, last..last + 1).end - 1;
        let mut byte = [0];
        sink.read(at, &mut byte);
        sink.write(at, &[byte[0] ^ 1]);
        source.gate.open(HoldPoint::Commit);
        let outcome = put.wait();
        assert!(matches!(outcome, Err(HandoffFailure::Corrupt(_))), "{tokens} tokens, plane {plane}: {outcome:?}");
        source.gate.hold(HoldPoint::Commit);
        quiet(&source, &sink);
    }
    source.gate.open(HoldPoint::Commit);
    still_works_with(&source, &sink, 33);
}

pub fn a_hundred_handoffs_leave_nothing_behind(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    for _ in 0..100 {
        still_works_with(&source, &sink, 5);
    }
    assert_eq!((source.transfer.stats().indexed, sink.transfer.stats().indexed), (0, 0));
}

pub fn checksums_sent_twice_are_not_adopted(choice: &TransportChoice) {
    // One message comes again in place of the next: their number is right, and a part of the sequence was never compared.
    let mut config = NodeConfig::new("p", small(16), 24);
    config.limits.epoch_bytes = 1; // Every copy an epoch, with checksums of its own.
    let (source, sink) = (config.start(choice.clone()), NodeConfig::new("d", small(16), 24).start(choice.clone()));
    let first = Mutex::new(None);
    let left = Arc::new(AtomicU32::new(2));
    let bent = left.clone();
    source.gate.bend(move |message| {
        let mut first = first.lock().unwrap();
        if message[3] != CHECKSUMS || bent.load(Ordering::SeqCst) == 0 {
            return vec![message];
        }
        bent.fetch_sub(1, Ordering::SeqCst);
        vec![first.get_or_insert(message).clone()]
    });
    let (put, _) = source.offer(&sink.peer(), "twice", 32, 1);
    source.launch(&put, 32, 16);
    put.finish(commit(32));
    let failure = put.wait().unwrap_err();
    assert_eq!(left.load(Ordering::SeqCst), 0, "two messages were bent: {failure}");
    assert!(sink.sink.take_adopted("twice").is_none());
    eventually("the sink's worker knows", || matches!(sink.sink.failures()[..], [(_, HandoffFailure::Protocol(_))]));
    quiet(&source, &sink);
    still_works(&source, &sink);
}

pub fn doubled_commit_adopts_once(choice: &TransportChoice) {
    // Right behind the first, and once more ahead of the next offer, when its handoff is long over.
    let (source, sink) = pair(choice);
    let sent = Mutex::new(None);
    source.gate.bend(move |message| match message[3] {
        COMMIT => {
            *sent.lock().unwrap() = Some(message.clone());
            vec![message.clone(), message]
        }
        OFFER => sent.lock().unwrap().take().into_iter().chain([message]).collect(),
        _ => vec![message],
    });
    let adopted = || sink.transfer.stats().total.sinks.get("adopted").copied();
    for handoffs in 1..=3 {
        still_works(&source, &sink); // The sink's own handler refuses to adopt one request twice.
        eventually("the adoption is counted", || adopted() >= Some(handoffs));
        assert_eq!(adopted(), Some(handoffs));
        let stale = sink.transfer.stats().total.stale_messages;
        assert!(stale >= handoffs - 1, "{stale} commits of handoffs that are over were seen");
    }
}

/// Brings a handoff to each phase, then runs `end`, which must end it.
pub(super) fn in_every_phase((source, sink): (Node, Node), end: impl Fn(&Node, &Node, &PutHandle)) {
    let phases = [HoldPoint::Offer, HoldPoint::Puts, HoldPoint::Commit, HoldPoint::Verify];
    for (i, &phase) in phases.iter().cycle().take(12).enumerate() {
        let gate = if phase == HoldPoint::Verify { &sink.gate } else { &source.gate };
        gate.hold(phase);
        let (put, _) = source.offer(&sink.peer(), "r", 70, i as u64 + 1);
        source.send_all(&put, 70);
        match phase {
            HoldPoint::Offer => std::thread::sleep(Duration::from_millis(5 * (i as u64 % 3))),
            HoldPoint::Verify => eventually("the sink holds", || sink.transfer.stats().held == 1),
            _ => eventually("the source holds", || source.transfer.stats().held == 1),
        }
        end(&source, &sink, &put);
        // A gate that a cancelled handoff stands at must not keep its blocks.
        if phase == HoldPoint::Offer {
            gate.open(phase);
        }
        assert!(put.wait().is_err(), "{phase:?}");
        quiet(&source, &sink);
        gate.open(phase);
        assert!(sink.sink.take_adopted("r").is_none());
    }
    still_works(&source, &sink);
}

pub fn abort_in_every_phase_frees_both_sides(choice: &TransportChoice) {
    in_every_phase(pair(choice), |_, _, put| put.abort("the client went away"));
}

pub fn cancel_at_the_sink_in_every_phase_frees_both_sides(choice: &TransportChoice) {
    let request = RequestId::try_new("r").unwrap();
    in_every_phase(pair(choice), |source, sink, put| {
        sink.transfer.cancel(&request, "the client went away");
        if sink.transfer.stats().sinks == 0 && source.transfer.stats().held == 0 {
            put.abort("never offered"); // The sink cannot cancel what it does not know.
        }
    });
}

pub fn deadline_frees_both_sides(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    for (i, phase) in [HoldPoint::Puts, HoldPoint::Commit, HoldPoint::Verify].into_iter().enumerate() {
        source.gate.hold(phase);
        sink.gate.hold(phase);
        let deadline = Instant::now() + Duration::from_millis(60);
        let (put, _) = source.offer_until(&sink.peer(), "r", 70, i as u64 + 1, deadline);
        source.send_all(&put, 70);
        let failure = put.wait().unwrap_err();
        let expected = match &failure {
            HandoffFailure::Deadline(_) | HandoffFailure::AbortedByPeer(_) => true,
            // It passed before the sink had asked for blocks, on a busy machine.
            HandoffFailure::Refused { reason, detail } => {
                *reason == RefuseReason::NoRoom && detail.contains("the deadline passed")
            }
            _ => false,
        };
        assert!(expected, "{phase:?}: {failure}");
        quiet(&source, &sink);
        source.gate.open(phase);
        sink.gate.open(phase);
    }
    // No grant in time.
    *sink.sink.room.lock().unwrap() = Room::Later;
    let (put, _) = source.offer_until(&sink.peer(), "r", 70, 9, Instant::now() + Duration::from_millis(60));
    assert!(put.wait().is_err());
    eventually("the sink has given up", || sink.transfer.stats().sinks == 0);
    sink.sink.answer(); // Too late: the hold comes straight back.
    quiet(&source, &sink);
    *sink.sink.room.lock().unwrap() = Room::Ready;
    still_works(&source, &sink);
}

pub fn device_failure_aborts(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let (put, _) = source.offer(&sink.peer(), "r", 32, 1);
    let manual = Arc::new(ManualFence::default());
    let (failing, done): (Fence, Fence) = (manual.clone(), Arc::new(AlreadyDone));
    put.layer_launched(0, 32, &done);
    put.layer_launched(1, 32, &failing);
    put.finish(commit(32));
    eventually("something is written", || source.transfer.stats().total.puts > 0);
    manual.set(FenceStatus::Failed);
    assert!(matches!(put.wait(), Err(HandoffFailure::Device(_))));
    quiet(&source, &sink);
    still_works(&source, &sink);
}

pub fn garbage_closes_the_connection_and_nothing_else(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    let bystander = NodeConfig::new("p2", small(16), 24).start(choice.clone());
    sink.gate.hold(HoldPoint::Verify);
    let (waiting, blocks) = bystander.offer(&sink.peer(), "bystander", 40, 3);
    bystander.send_all(&waiting, 40);
    eventually("the bystander's commit waits", || sink.transfer.stats().held == 1);

    let left = Arc::new(AtomicU32::new(1));
    source.gate.bend(move |mut message| {
        if message[3] == CHECKSUMS && left.swap(0, Ordering::SeqCst) == 1 {
            message.truncate(9);
        }
        vec![message]
    });
    let (put, _) = source.offer(&sink.peer(), "garbage", 32, 1);
    source.send_all(&put, 32);
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::PeerLost(_)), "{failure}");

    sink.gate.open(HoldPoint::Verify);
    waiting.wait().unwrap();
    sink.check_adopted("bystander", &bystander, &blocks, 40);
    quiet(&source, &sink);
    still_works(&source, &sink);
}

pub fn peer_gone_is_noticed(choice: &TransportChoice) {
    // The sink goes while the source waits for its acknowledgement, then the source goes while the sink waits for its commit.
    let (source, sink) = pair(choice);
    sink.gate.hold(HoldPoint::Verify);
    let (put, _) = source.offer(&sink.peer(), "r", 70, 1);
    source.send_all(&put, 70);
    eventually("the sink holds", || sink.transfer.stats().held == 1);
    sink.transfer.stop(Instant::now());
    assert!(put.wait().is_err());
    eventually("the source is quiet", || source.is_quiet());
    // A stopped service holds nothing: all lanes here end with their connections, which are closed by now.
    assert!(sink.transfer.fences() && sink.pool.is_whole());

    let sink = NodeConfig::new("d2", small(16), 24).start(choice.clone());
    source.gate.hold(HoldPoint::Commit);
    let (put, _) = source.offer(&sink.peer(), "r", 70, 1);
    source.send_all(&put, 70);
    eventually("the source holds", || source.transfer.stats().held == 1);
    source.transfer.stop(Instant::now());
    assert!(put.wait().is_err());
    assert!(source.pool.is_whole());
    eventually("the sink noticed", || !sink.sink.failures().is_empty() || sink.is_quiet());
    eventually("the sink is quiet", || sink.is_quiet() && sink.pool.quarantined() == 0);
}

pub fn a_panic_fails_everything_and_shows(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    sink.gate.hold(HoldPoint::Commit);
    let (pending, _) = sink.offer(&source.peer(), "pending", 40, 1);
    sink.send_all(&pending, 40);
    eventually("the sink's own handoff waits", || sink.transfer.stats().held == 1);
    assert!(sink.transfer.healthy());

    *sink.sink.room.lock().unwrap() = Room::Panic;
    let (put, _) = source.offer(&sink.peer(), "r", 16, 1);
    assert!(put.wait().is_err());
    assert_eq!(pending.wait(), Err(HandoffFailure::Stopped));
    assert!(!sink.transfer.healthy());
    let request_id = RequestId::try_new("late").unwrap();
    let blocks = BlockTables::from_start(GroupBlocks(vec![vec![BlockId(0)]]));
    let late = PutRequest { request_id, tokens: 16, blocks, deadline: Instant::now() + PATIENCE, hold: Box::new(()) };
    match sink.transfer.put(&source.peer(), late) {
        Ok(late) => assert_eq!(late.wait(), Err(HandoffFailure::Stopped)), // It came while the service was ending.
        Err(refused) => assert!(matches!(refused, TransferError::Stopped), "{refused}"),
    }
    assert!(source.transfer.healthy());
}

pub fn peer_comes_back(choice: &TransportChoice) {
    let (source, sink) = pair(choice);
    still_works(&source, &sink);
    sink.stop();
    let mut config = NodeConfig::new("d", small(16), 24);
    config.incarnation = 2;
    let sink = config.start(choice.clone());
    still_works(&source, &sink);
}
