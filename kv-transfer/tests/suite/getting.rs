//! Gets: what a reader adopts is what its owner pinned, or nothing.

use super::{a_start, pair};
use crate::common::*;
use baton_kv_transfer::*;
use baton_types::*;
use std::time::{Duration, Instant};

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn quiet(reader: &Node, owner: &Node) {
    eventually("both pools are whole", || reader.is_quiet() && owner.is_quiet());
}

/// A get between the two works, in this direction.
fn still_works(reader: &Node, owner: &Node) {
    let theirs = owner.serve("after", 50, 77);
    let (get, ours) = reader.get(&owner.peer(), "after", 50, soon());
    let got = get.wait().unwrap();
    let bytes = reader.bytes_of(&ours, 50);
    assert!(bytes == owner.bytes_of(&theirs, 50), "other bytes were read");
    assert_eq!(got.bytes, bytes.len() as u64);
    owner.evict("after");
    drop(got);
    quiet(reader, owner);
}

pub fn everything_is_read_whole(choice: &TransportChoice) {
    for (ours, theirs) in [(16, 16), (16, 48), (64, 16)] {
        let reader = NodeConfig::new("p", small(ours), 24).start(choice.clone());
        let owner = NodeConfig::new("d", small(theirs), 24).start(choice.clone());
        still_works(&reader, &owner);
        still_works(&owner, &reader);
    }
}

pub fn gets_and_puts_share_a_connection(choice: &TransportChoice) {
    let (a, b) = pair(choice);
    let served = b.serve("s", 70, 5);
    let (put, sent) = a.offer(&b.peer(), "put", 60, 6);
    let (get, read) = a.get(&b.peer(), "s", 70, soon());
    a.send_all(&put, 60);
    let got = get.wait().unwrap();
    assert!(a.bytes_of(&read, 70) == b.bytes_of(&served, 70));
    put.wait().unwrap();
    b.check_adopted("put", &a, &sent, 60);
    assert_eq!((a.transfer.stats().peers.len(), b.transfer.stats().peers.len()), (1, 1));
    b.evict("s");
    drop(got);
    quiet(&a, &b);
}

pub fn what_is_not_there_is_told(choice: &TransportChoice) {
    let (reader, owner) = pair(choice);
    let (get, _) = reader.get(&owner.peer(), "unknown", 16, soon());
    let failure = get.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::UnknownRequest, .. }), "{failure}");
    quiet(&reader, &owner);
    still_works(&reader, &owner);
}

/// A reader that stands before its reads until the owner's pin has expired and the blocks hold something else; what it got.
fn evicted_while_reading(
    choice: &TransportChoice,
    hazard: Option<Hazard>,
) -> (Result<bool, HandoffFailure>, Node, Node) {
    let reader = NodeConfig::new("p", small(16), 24).start(choice.clone());
    let mut config = NodeConfig::new("d", small(16), 24);
    (config.limits.pin_ms, config.hazards) = (100, hazard.into());
    let owner = config.start(choice.clone());
    reader.gate.hold(HoldPoint::Gets);
    let blocks = owner.serve("s", 64, 5);
    let pinned = owner.bytes_of(&blocks, 64);
    let (get, read) = reader.get(&owner.peer(), "s", 64, soon());
    eventually("the reader holds", || reader.transfer.stats().held == 1);
    owner.evict("s");
    eventually("the pin expired", || owner.pool.is_whole());
    let reused = owner.pool.take(24, 0).unwrap();
    owner.fill(&reused.blocks, 99);
    drop(reused);
    reader.gate.open(HoldPoint::Gets);
    let result = get.wait().map(|got| {
        let bytes = reader.bytes_of(&read, 64);
        drop(got);
        bytes == pinned
    });
    quiet(&reader, &owner);
    (result, reader, owner)
}

pub fn without_the_pin_a_reader_adopts_other_bytes(choice: &TransportChoice) {
    let (result, ..) = evicted_while_reading(choice, Some(Hazard::PretendedPins));
    assert_eq!(result, Ok(false), "the test beside this one shows nothing");
}

pub fn an_expired_pin_is_never_adopted(choice: &TransportChoice) {
    let (result, reader, owner) = evicted_while_reading(choice, None);
    assert!(matches!(result, Err(HandoffFailure::Unpinned(_))), "{result:?}");
    still_works(&reader, &owner);
}

pub fn an_owner_takes_its_blocks_back(choice: &TransportChoice) {
    let (reader, owner) = pair(choice);
    reader.gate.hold(HoldPoint::Gets);
    owner.serve("s", 64, 5);
    let (get, _) = reader.get(&owner.peer(), "s", 64, soon());
    eventually("the reader holds", || reader.transfer.stats().held == 1);
    owner.evict("s");
    assert!(!owner.pool.is_whole(), "pinned");
    owner.transfer.cancel(&RequestId::try_new("r").unwrap(), "the blocks are needed");
    eventually("they are back", || owner.is_quiet());
    reader.gate.open(HoldPoint::Gets);
    let failure = get.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Unpinned(_)), "{failure}");
    quiet(&reader, &owner);
    still_works(&reader, &owner);
}

pub fn an_owner_that_restarts_confirms_nothing(choice: &TransportChoice) {
    let (reader, owner) = pair(choice);
    reader.gate.hold(HoldPoint::Gets);
    owner.serve("s", 64, 5);
    let (get, _) = reader.get(&owner.peer(), "s", 64, soon());
    eventually("the reader holds", || reader.transfer.stats().held == 1);
    owner.stop();
    let mut again = NodeConfig::new("d", small(16), 24);
    again.incarnation = 2;
    let again = again.start(choice.clone());
    again.serve("s", 64, 6);
    reader.gate.open(HoldPoint::Gets);
    let failure = get.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Unpinned(_) | HandoffFailure::PeerLost(_)), "{failure}");
    again.evict("s");
    quiet(&reader, &again);
    still_works(&reader, &again);
}

/// What is read of an owner that restarted, and what its first start served under that name.
fn from_another_start(choice: &TransportChoice, hazard: Option<Hazard>) -> Result<bool, HandoffFailure> {
    let start = |name, incarnation| a_start(choice, name, incarnation, hazard);
    let (reader, owner) = (start("p", 1), start("d", 1));
    let served = owner.serve("s", 64, 5);
    let meant = (owner.transfer.party().clone(), owner.bytes_of(&served, 64));
    owner.evict("s");
    owner.stop();
    let again = start("d", 2);
    again.serve("s", 64, 6);
    let peer = Peer { party: meant.0, ..again.peer() };
    let (get, read) = reader.get(&peer, "s", 64, soon());
    let result = get.wait().map(|got| {
        let bytes = reader.bytes_of(&read, 64);
        drop(got);
        bytes == meant.1
    });
    again.evict("s");
    quiet(&reader, &again);
    result
}

pub fn without_incarnations_a_restarted_owner_is_read_for_the_one_before(choice: &TransportChoice) {
    let result = from_another_start(choice, Some(Hazard::AnyIncarnation));
    assert_eq!(result, Ok(false), "the test beside this one shows nothing");
}

pub fn a_restarted_owner_is_not_the_one_before(choice: &TransportChoice) {
    let result = from_another_start(choice, None);
    assert!(
        matches!(result, Err(HandoffFailure::Refused { reason: RefuseReason::WrongIncarnation, .. })),
        "{result:?}"
    );
}

pub fn a_damaged_byte_is_found(choice: &TransportChoice) {
    const CHECKSUMS: u8 = 7;
    let (reader, owner) = pair(choice);
    owner.gate.bend(|mut message| {
        if message[3] == CHECKSUMS {
            *message.last_mut().unwrap() ^= 0x80;
        }
        vec![message]
    });
    owner.serve("s", 40, 5);
    let (get, _) = reader.get(&owner.peer(), "s", 40, soon());
    let failure = get.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Corrupt(_)), "{failure}");
    owner.evict("s");
    quiet(&reader, &owner);
    owner.gate.bend(|message| vec![message]);
    still_works(&reader, &owner);
}

pub fn a_get_that_is_given_up_frees_both_sides(choice: &TransportChoice) {
    let (reader, owner) = pair(choice);
    for deadline in [false, true] {
        reader.gate.hold(HoldPoint::Gets);
        owner.serve("s", 64, 5);
        // Far longer than a busy machine takes to come to the hold.
        let until = if deadline { Instant::now() + Duration::from_secs(3) } else { soon() };
        let (get, _) = reader.get(&owner.peer(), "s", 64, until);
        eventually("the reader holds", || reader.transfer.stats().held == 1);
        if !deadline {
            get.abort("nobody wants it");
        }
        let failure = get.wait().unwrap_err();
        let expected =
            matches!(failure, HandoffFailure::Aborted(_) | HandoffFailure::Deadline(_) | HandoffFailure::Unpinned(_));
        assert!(expected, "{failure}");
        owner.evict("s");
        quiet(&reader, &owner);
        reader.gate.open(HoldPoint::Gets);
    }
    still_works(&reader, &owner);
}
