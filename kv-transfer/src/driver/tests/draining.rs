//! When blocks are released that writes may be on their way into, whatever their writer says.

use super::*;
use crate::message::{Commit, SumRun};

/// A driver that granted a block to a peer, and the ticket.
fn granted(now: Instant) -> (Driver, Notes, TicketId) {
    let (mut driver, notes) = Driver::noting();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    driver.hear(&offer(1, 16), now);
    driver.commands(now);
    let ticket = driver.ticket_of(1);
    (driver, notes, ticket)
}

fn commit(ticket: TicketId, bytes: u64) -> Message {
    let (algorithm, prompt_len, extra) = (crate::checksum::ALGORITHM, 1, Vec::new());
    Message::Commit(Box::new(Commit { ticket, algorithm, sums: 2, bytes, prompt_len, tokens: vec![0; 17], extra }))
}

fn aborted(ticket: TicketId, flushed: bool) -> Message {
    Message::Aborted { handoff: 1, ticket, flushed, detail: String::new() }
}

#[test]
fn what_its_writer_says_is_over_is_released_behind_the_window() {
    let now = Instant::now();
    let ends: [fn(TicketId) -> Message; 2] = [|ticket| aborted(ticket, true), |ticket| commit(ticket, 1)];
    for end in ends {
        let (mut driver, notes, ticket) = granted(now);
        driver.hear(&end(ticket), now);
        assert_eq!(*notes.lock(), [""; 0]);
        assert_eq!(driver.table.sinks(), 0, "the handoff is over");
        driver.windows_close(now);
        assert_eq!(*notes.lock(), ["let go"]);
    }
}

#[test]
fn blocks_whose_last_writes_stay_unseen_are_not_reused() {
    let now = Instant::now();
    let ends: [fn(TicketId) -> Event; 3] = [
        |ticket| Event::Message(CONN, aborted(ticket, true).encode()),
        |ticket| Event::Message(CONN, commit(ticket, 16 * token_bytes()).encode()),
        |_| gone(true, false),
    ];
    for (end, is_blind) in ends.into_iter().flat_map(|end| [(end, false), (end, true)]) {
        let (mut driver, notes, ticket) = granted(now);
        driver.transport = Box::new(Noting { notes: notes.clone(), is_blind, ..Noting::default() });
        driver.event(end(ticket), now);
        // The second time for a commit, which waits for checksums, and is given up.
        driver.windows_close(now);
        driver.input(driver.table.keys().first().copied().unwrap_or(HandoffKey(0)), Input::Fenced, now);
        driver.windows_close(now);
        assert_eq!(notes.lock().contains(&"let go"), !is_blind, "{:?}", end(ticket));
    }
}

#[test]
fn the_last_writes_of_a_handoff_that_is_over_are_looked_at_often() {
    let now = Instant::now();
    let (mut driver, _, ticket) = granted(now);
    driver.hear(&aborted(ticket, true), now);
    driver.commands(now);
    assert!(driver.table.is_empty());
    assert_eq!(driver.wake_at(now), now + TICK);
    driver.windows_close(now);
    assert!(driver.wake_at(now) > now + TICK, "nothing is open");
}

#[test]
fn quarantined_blocks_are_released_behind_the_window() {
    let now = Instant::now();
    let (mut driver, notes, ticket) = granted(now);
    driver.hear(&aborted(ticket, false), now);
    assert_eq!(*notes.lock(), ["quarantined"]);
    driver.hear(&aborted(ticket, true), now);
    driver.event(Event::WindowClosed(CONN, ticket), now);
    assert_eq!(*notes.lock(), ["quarantined"], "that was the first call's");
    assert_eq!(
        (driver.table.sinks(), driver.exposed()),
        (0, (1, 0)),
        "the handoff is over, and the blocks are not back"
    );
    driver.hear(&offer(2, 16), now);
    assert_eq!(refused(&mut driver), [("quarantine", 1)]);
    assert_eq!(driver.published().lock().quarantined.values().sum::<usize>(), 1);
    driver.event(Event::WindowClosed(CONN, ticket), now);
    assert_eq!((notes.lock().clone(), driver.exposed()), (vec!["quarantined", "let go"], (0, 0)));
    driver.hear(&offer(3, 16), now);
    driver.commands(now);
    assert_eq!(driver.granted(), [3]);
}

#[test]
fn what_is_delivered_is_written_no_more() {
    delivered_once_the_window_is_closed(false);
}

#[test]
fn what_may_be_written_unseen_is_not_delivered() {
    delivered_once_the_window_is_closed(true);
}

/// `is_blind`: the device does not show what came behind the checksums.
fn delivered_once_the_window_is_closed(is_blind: bool) {
    let now = Instant::now();
    let (mut driver, notes, ticket) = granted(now);
    driver.transport = Box::new(Noting { notes: notes.clone(), is_blind, ..Noting::default() });
    // The pool is zeroed, and so is what the source says it wrote.
    let map = config("here").map;
    let memory = HostPool::new(map.bytes()).unwrap();
    let heads = crate::heads::Cut::new(map.layout(), crate::HeadShard::WHOLE, crate::HeadShard::WHOLE).unwrap().sink;
    let sums = crate::checksum::layer_sums(&*memory, &map, &blocks().0[0], &heads, 0, 0, 0..16).unwrap();
    let runs = vec![SumRun { group: 0, layer: 0, first_granule: 0, sums }];
    driver.hear(&Message::Checksums { ticket, runs }, now);
    driver.hear(&commit(ticket, 16 * map.layout().bytes_per_token() as u64), now);
    let by = Instant::now() + Duration::from_secs(20);
    while !driver.inbox.has_work() {
        assert!(Instant::now() < by, "never compared");
        std::thread::yield_now();
    }
    driver.commands(now);
    driver.commands(now);
    assert_eq!(*notes.lock(), [""; 0], "everything matches, but more may be on its way");
    driver.windows_close(now);
    driver.commands(now);
    let taken = notes.lock().contains(&"let go");
    assert_eq!(taken, !is_blind, "the worker has taken it, and dropped it");
}

fn gone(fenced: bool, draining: bool) -> Event {
    Event::Closed { conn: CONN, reason: "gone".into(), fenced, draining, unproven: false }
}

#[test]
fn blocks_of_a_connection_that_is_drained_late_come_back() {
    let now = Instant::now();
    // Granted; released, but not drained; quarantined.
    let ends: [fn(TicketId) -> Option<Message>; 3] =
        [|_| None, |ticket| Some(aborted(ticket, true)), |ticket| Some(aborted(ticket, false))];
    for (end, fenced) in ends.into_iter().flat_map(|end| [(end, true), (end, false)]) {
        let (mut driver, notes, ticket) = granted(now);
        let end = end(ticket);
        end.iter().for_each(|message| driver.hear(message, now));
        driver.event(gone(false, true), now);
        let is_released = matches!(end, Some(Message::Aborted { flushed: true, .. }));
        let held = if is_released { vec![] } else { vec!["quarantined"] };
        assert_eq!(*notes.lock(), held);
        driver.tick(now + Duration::from_secs(100), false);
        assert_eq!(*notes.lock(), held);
        driver.event(Event::Drained { conn: CONN, fenced }, now);
        // On a lane without a fence the peer may still write to what it was granted.
        let free = if fenced || is_released { [&held[..], &["let go"]].concat() } else { held };
        assert_eq!(*notes.lock(), free, "{end:?}, fenced: {fenced}");
    }
}

/// Ends of a handoff that leave its blocks only with the device: a commit that does not fit, an abort, and a commit whose window is open.
fn ends_before_the_device() -> [fn(TicketId) -> Message; 3] {
    [|ticket| commit(ticket, 1), |ticket| aborted(ticket, true), |ticket| commit(ticket, 16 * token_bytes())]
}

fn token_bytes() -> u64 {
    config("here").map.layout().bytes_per_token() as u64
}

/// Reasons for which offers of the peer were refused.
fn refused(driver: &mut Driver) -> Vec<(&'static str, u64)> {
    driver.publish();
    driver.published().lock().total.refused.clone().into_iter().collect()
}

#[test]
fn blocks_that_a_closed_connection_leaves_to_the_device_are_in_quarantine() {
    let now = Instant::now();
    for end in ends_before_the_device() {
        let (mut driver, notes, ticket) = granted(now);
        driver.hear(&end(ticket), now);
        driver.event(gone(false, true), now);
        assert_eq!((driver.table.sinks(), driver.exposed()), (0, (1, 0)));
        let other = ConnId(2);
        let hear = |driver: &mut Driver, message: &Message| {
            driver.event(Event::Message(other, message.encode()), now);
            driver.commands(now);
        };
        driver.event(Event::Accepted { conn: other, proven: false }, now);
        hear(&mut driver, &Message::Hello(greeting()));
        hear(&mut driver, &offer(2, 16));
        assert_eq!(refused(&mut driver), [("quarantine", 1)]);
        let gauge = |driver: &Driver| driver.published().lock().quarantined.values().copied().collect::<Vec<_>>();
        assert_eq!(gauge(&driver), [1]);
        driver.event(Event::Drained { conn: CONN, fenced: false }, now);
        assert_eq!((notes.lock().last(), driver.exposed()), (Some(&"let go"), (0, 0)));
        hear(&mut driver, &offer(3, 16));
        assert_eq!((driver.granted(), refused(&mut driver)), (vec![3], vec![("quarantine", 1)]));
        assert_eq!(gauge(&driver), [0; 0]);
    }
}

#[test]
fn puts_whose_blocks_the_device_still_stores_count_against_the_bound_on_puts() {
    let now = Instant::now();
    for end in &ends_before_the_device()[..2] {
        let (mut driver, _, ticket) = granted(now);
        driver.config.limits.accepted_handoffs_max = 1;
        driver.hear(&end(ticket), now);
        driver.hear(&offer(2, 16), now);
        assert_eq!(refused(&mut driver), [("busy", 1)]);
        driver.windows_close(now);
        driver.hear(&offer(3, 16), now);
        assert_eq!((driver.table.sinks(), refused(&mut driver)), (1, vec![("busy", 1)]));
    }
}

#[test]
fn blocks_that_a_device_reads_for_a_closed_connection_are_held() {
    let (mut driver, notes) = Driver::noting();
    let now = Instant::now();
    let (_, _told) = begin_put(&mut driver, &notes, now);
    driver.event(gone(false, true), now);
    assert_eq!(*notes.lock(), [""; 0]);
    driver.event(Event::Drained { conn: CONN, fenced: true }, now);
    assert_eq!(*notes.lock(), ["let go"]);
}

#[test]
fn what_is_never_drained_is_leaked() {
    let now = Instant::now();
    let (mut driver, notes, ticket) = granted(now);
    driver.hear(&aborted(ticket, true), now);
    driver.event(gone(false, true), now);
    driver.finish(now, now);
    drop(driver);
    assert_eq!(*notes.lock(), ["shutdown"]);
}

#[test]
fn a_connection_that_is_fenced_has_no_writes_on_their_way() {
    let now = Instant::now();
    let (mut driver, notes, ticket) = granted(now);
    driver.hear(&aborted(ticket, true), now);
    driver.event(gone(true, false), now);
    assert_eq!(*notes.lock(), ["let go"]);
}
