//! When what a dead peer could have written is released.

use super::*;

#[test]
fn dead_peers_are_fenced_on_a_busy_thread_too() {
    for (moving, not_yet, then) in [(false, 50, 150), (true, 1_000, 6_000)] {
        let (mut driver, notes) = Driver::noting();
        let begin = Instant::now();
        let after = |ms| begin + Duration::from_millis(ms);
        driver.event(Event::Accepted { conn: CONN, proven: false }, begin);
        driver.hear(&Message::Hello(greeting()), begin);
        driver.hear(&offer(1, 16), begin);
        driver.commands(begin);
        driver.command(Command::PeerDead(party("peer")), begin);
        driver.event(Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, unproven: false }, begin);
        assert_eq!(*notes.lock(), ["quarantined"]);
        driver.tick(after(not_yet), moving);
        assert_eq!(*notes.lock(), ["quarantined"], "moving: {moving}");
        driver.tick(after(then), moving);
        assert_eq!(*notes.lock(), ["quarantined", "let go"], "moving: {moving}");
    }
}

#[test]
fn a_dead_peer_is_not_fenced_while_its_connection_is_open() {
    let (mut driver, notes) = Driver::noting();
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    driver.event(Event::Accepted { conn: CONN, proven: false }, begin);
    driver.hear(&Message::Hello(greeting()), begin);
    driver.hear(&offer(1, 16), begin);
    driver.commands(begin);
    driver.command(Command::PeerDead(party("peer")), begin);
    driver.tick(after(5), false);
    assert_eq!(*notes.lock(), [""; 0], "what its connection still holds may be stored here");
    driver.event(Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, unproven: false }, after(6));
    assert_eq!(*notes.lock(), ["quarantined"]);
    driver.tick(after(7), false);
    assert_eq!(*notes.lock(), ["quarantined", "let go"]);
}
