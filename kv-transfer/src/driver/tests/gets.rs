//! Gets, as their reader drives them.

use super::*;
use crate::GetRequest;
use baton_memory::HostPool;

/// A get of two blocks that are no neighbours, welcomed and granted.
fn granted(driver: &mut Driver, notes: &Notes, now: Instant) -> HandoffKey {
    let apart = || BlockTables::from_start(GroupBlocks(vec![vec![BlockId(0), BlockId(2)]]));
    let peer = Peer { party: party("peer"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    let request = GetRequest {
        request_id: RequestId::try_new("r").unwrap(),
        name: Vec::new(),
        from: 0,
        tokens: 32,
        blocks: apart(),
        deadline: now + Duration::from_secs(60),
        hold: Box::new(Held(notes.clone(), apart())),
    };
    let key = driver.inbox.get(peer, request, tokio::sync::oneshot::channel().0).unwrap();
    driver.commands(now);
    driver.hear(&Message::Welcome(greeting()), now);
    driver.hear(&Message::Grant { handoff: key.0, ticket: TicketId(7), blocks: apart(), from: 0 }, now);
    key
}

#[test]
fn a_get_reads_within_its_credit() {
    let mut limited = config("here");
    limited.limits.in_flight_bytes_max = 1; // At least one read is always in flight.
    let region = HostPool::new(limited.map.bytes()).unwrap();
    let (mut driver, notes, _) = Driver::noting_with(limited, region);
    let now = Instant::now();
    granted(&mut driver, &notes, now);
    driver.post(now);
    assert_eq!(*notes.lock(), ["get"], "of the first block; the other one waits");
}

#[test]
fn what_an_owner_may_still_write_is_quarantined_until_it_is_fenced() {
    let mut two = config("here");
    (two.limits.quarantined_blocks_max, two.limits.started_handoffs_max) = (2, 1);
    let region = HostPool::new(two.map.bytes()).unwrap();
    let (mut driver, notes, _) = Driver::noting_with(two, region);
    driver.transport = Box::new(Noting { notes: notes.clone(), ..Noting::default() });
    let now = Instant::now();
    let key = granted(&mut driver, &notes, now);
    assert!(driver.table.get(key).is_some() && notes.lock().is_empty(), "the owner writes");
    driver.event(
        Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, draining: false, unproven: false },
        now,
    );
    assert_eq!(*notes.lock(), ["quarantined"]);
    assert_eq!(driver.exposed(), (2, 0));
    // It takes no place of those that this side has begun.
    let peer = Peer { party: party("other"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    let (request_id, hold) = (RequestId::try_new("next").unwrap(), Box::new(()));
    let request = PutRequest { request_id, tokens: 16, blocks: blocks(), deadline: now, hold };
    assert!(driver.inbox.put(peer, request, tokio::sync::oneshot::channel().0).is_ok());
    driver.command(Command::PeerDead(party("peer")), now);
    driver.tick(now + DRAIN, false);
    assert_eq!(*notes.lock(), ["quarantined", "let go"]);
    assert!(driver.table.is_empty());
}

#[test]
fn blocks_that_this_side_still_reads_into_are_held_after_their_connection() {
    let now = Instant::now();
    let gone = |draining: bool| Event::Closed {
        conn: CONN,
        reason: "gone".into(),
        fenced: !draining,
        draining,
        unproven: false,
    };
    let region = || HostPool::new(config("here").map.bytes()).unwrap();
    for gives_up in [false, true] {
        let (mut driver, notes, _) = Driver::noting_with(config("here"), region());
        let key = granted(&mut driver, &notes, now);
        driver.post(now);
        assert!(notes.lock().iter().all(|note| *note == "get") && !notes.lock().is_empty());
        notes.lock().clear();
        if gives_up {
            driver.input(key, Input::Abort(HandoffFailure::Stopped), now);
        }
        driver.event(gone(true), now);
        assert!(driver.table.is_empty() && notes.lock().is_empty(), "its copies run on");
        driver.event(Event::Drained { conn: CONN, fenced: true }, now);
        assert_eq!(*notes.lock(), ["let go"]);
    }
    let (mut driver, notes, _) = Driver::noting_with(config("here"), region());
    granted(&mut driver, &notes, now);
    notes.lock().clear();
    driver.event(gone(false), now);
    assert_eq!(*notes.lock(), ["let go"]);
}

/// A failed start leaves its place to others.
#[test]
fn what_finds_no_connection_takes_no_place() {
    let mut one = config("here");
    one.limits.started_handoffs_max = 1;
    let region = HostPool::new(one.map.bytes()).unwrap();
    let (mut driver, notes, _) = Driver::noting_with(one, region);
    let now = Instant::now();
    driver.command(Command::PeerDead(party("peer")), now);
    let address = TransferAddress::Tcp(([127, 0, 0, 1], 1).into());
    let peer = || Peer { party: party("peer"), address: address.clone(), shard: 0 };
    for _ in 0..3 {
        let (request_id, deadline) = (RequestId::try_new("r").unwrap(), now + Duration::from_secs(60));
        let hold = Box::new(Held(notes.clone(), blocks()));
        let put = PutRequest { request_id: request_id.clone(), tokens: 16, blocks: blocks(), deadline, hold };
        let (outcome, mut told) = oneshot::channel();
        driver.inbox.put(peer(), put, outcome).unwrap();
        driver.commands(now);
        assert!(matches!(told.try_recv(), Ok(Err(_))), "the peer is dead");
        let (name, hold) = (Vec::new(), Box::new(Held(notes.clone(), blocks())));
        let get = GetRequest { request_id, name, from: 0, tokens: 16, blocks: blocks(), deadline, hold };
        let (outcome, mut told) = oneshot::channel();
        driver.inbox.get(peer(), get, outcome).unwrap();
        driver.commands(now);
        assert!(matches!(told.try_recv(), Ok(Err(_))), "the peer is dead");
    }
}
