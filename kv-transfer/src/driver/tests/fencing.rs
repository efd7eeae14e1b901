//! When what a dead peer could have written is released.

use super::*;

/// A driver that gave blocks to a peer which is dead since; the peer's connection is open.
fn granted_to_a_dead_peer(now: Instant) -> (Driver, Notes) {
    let (mut driver, notes) = Driver::noting();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    driver.hear(&offer(1, 16), now);
    driver.commands(now);
    driver.command(Command::PeerDead(party("peer")), now);
    (driver, notes)
}

#[test]
fn dead_peers_are_fenced_on_a_busy_thread_too() {
    for (moving, not_yet, then) in [(false, 50, 150), (true, 1_000, 6_000)] {
        let begin = Instant::now();
        let (mut driver, notes) = granted_to_a_dead_peer(begin);
        let after = |ms| begin + Duration::from_millis(ms);
        driver.event(
            Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, draining: false, unproven: false },
            begin,
        );
        assert_eq!(*notes.lock(), ["quarantined"]);
        driver.tick(after(not_yet), moving);
        assert_eq!(*notes.lock(), ["quarantined"], "moving: {moving}");
        driver.tick(after(then), moving);
        assert_eq!(*notes.lock(), ["quarantined", "let go"], "moving: {moving}");
    }
}

#[test]
fn a_dead_peer_is_not_fenced_while_its_connection_is_open() {
    let begin = Instant::now();
    let (mut driver, notes) = granted_to_a_dead_peer(begin);
    let after = |seconds| begin + Duration::from_secs(seconds);
    driver.tick(after(5), false);
    assert_eq!(*notes.lock(), [""; 0], "what its connection still holds may be stored here");
    driver.event(
        Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, draining: false, unproven: false },
        after(6),
    );
    assert_eq!(*notes.lock(), ["quarantined"]);
    driver.tick(after(7), false);
    assert_eq!(*notes.lock(), ["quarantined", "let go"]);
}

#[test]
fn whoever_claims_to_be_a_dead_peer_does_not_delay_its_fence() {
    for late in [false, true] {
        let begin = Instant::now();
        let (mut driver, notes) = granted_to_a_dead_peer(begin);
        let after = |ms| begin + Duration::from_millis(ms);
        if late {
            driver.tick(after(61_000), false);
            assert!(driver.fencing.is_empty());
        }
        let liar = ConnId(2);
        driver.event(Event::Accepted { conn: liar, proven: false }, after(61_000));
        driver.event(Event::Message(liar, Message::Hello(greeting()).encode()), after(61_000));
        assert!(!driver.is_greeted(liar));
        let peer = Peer { party: party("peer"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
        assert!(matches!(driver.connection_to(&peer, after(61_000)), Err(HandoffFailure::PeerLost(_))));
        let reason = "gone".into();
        driver.event(
            Event::Closed { conn: CONN, reason, fenced: false, draining: false, unproven: false },
            after(61_000),
        );
        driver.tick(after(61_001), false);
        assert_eq!(*notes.lock(), ["quarantined", "let go"], "late: {late}");
        // Its next start is another party, and so is whoever comes later.
        let next = ConnId(3);
        driver.event(Event::Accepted { conn: next, proven: false }, after(61_001));
        driver.event(Event::Message(next, Message::Hello(greeting()).encode()), after(61_001));
        assert!(driver.is_greeted(next));
    }
}

#[test]
fn a_dead_peer_is_not_fenced_while_its_writes_are_being_stored() {
    for stored_after in [5, 59, 61, 1_000] {
        let begin = Instant::now();
        let (mut driver, notes) = granted_to_a_dead_peer(begin);
        let after = |seconds| begin + Duration::from_secs(seconds);
        let reason = "gone".into();
        driver.event(Event::Closed { conn: CONN, reason, fenced: false, draining: true, unproven: false }, begin);
        driver.tick(after(stored_after) - Duration::from_millis(1), false);
        assert_eq!(*notes.lock(), ["quarantined"]);
        driver.tick(after(stored_after), false);
        assert_eq!(*notes.lock(), ["quarantined"]);
        driver.event(Event::Drained { conn: CONN, fenced: false }, after(stored_after));
        driver.tick(after(stored_after), false);
        assert_eq!(*notes.lock(), ["quarantined", "let go"], "stored after {stored_after} s");
    }
}

#[test]
fn a_dead_peer_whose_writes_are_stored_after_a_minute_is_fenced_then() {
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    let closed = |draining| {
        let reason = "gone".to_owned();
        Event::Closed { conn: CONN, reason, fenced: false, draining, unproven: false }
    };
    // The device is late, or the end of the connection is.
    for by_device in [true, false] {
        let (mut driver, notes) = granted_to_a_dead_peer(begin);
        if by_device {
            driver.event(closed(true), begin);
        }
        driver.tick(after(61), false);
        assert!(driver.fencing.is_empty(), "nothing is polled after a minute");
        driver.tick(after(100), false);
        assert!(!notes.lock().contains(&"let go"));
        let last = if by_device { Event::Drained { conn: CONN, fenced: false } } else { closed(false) };
        driver.event(last, after(101));
        assert_eq!(*notes.lock(), ["quarantined", "let go"]);
    }
}
