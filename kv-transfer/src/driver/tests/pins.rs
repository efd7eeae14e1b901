//! When blocks are released that a peer gets: never while a posted write may read them.

use super::*;
use crate::{PinQuestion, PinReply, RefuseReason};

/// Pins a block for each get.
struct Pinning(Notes);

impl SinkHandler for Pinning {
    fn reserve(&self, _: ReserveOffer, reply: GrantReply) {
        reply.refuse(RefuseReason::NoRoom, "");
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
    fn pin(&self, _: PinQuestion, reply: PinReply) {
        reply.pin(blocks(), Box::new(Held(self.0.clone(), blocks())));
    }
}

/// A driver that pinned a block for a get of the peer.
fn pinned(now: Instant) -> (Driver, Notes) {
    let (mut driver, notes) = Driver::noting();
    driver.calls = Box::new(Inline(Arc::new(Pinning(notes.clone()))));
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    let Message::Offer(mut offer) = offer(1, 16) else { unreachable!() };
    (offer.direction, offer.source, offer.sink) = (Direction::Get, party("here"), party("peer"));
    driver.hear(&Message::Offer(offer), now);
    driver.commands(now);
    (driver, notes)
}

/// The same, where the reader asked for a write that is posted.
fn writing(now: Instant) -> (Driver, Notes) {
    let (mut driver, notes) = pinned(now);
    let mut owners = driver.table.keys().into_iter().filter_map(|key| match &driver.table.get(key)?.role {
        Role::Owner(owner) => Some(owner.ticket()),
        _ => None,
    });
    let ticket = owners.next_back().unwrap();
    driver.hear(&Message::Ask { ticket, blocks: blocks() }, now);
    driver.post(now);
    assert_eq!(*notes.lock(), ["put"]);
    (driver, notes)
}

/// The pin ends: the worker wants its blocks, the reader lets go, or time is over.
fn ends() -> [fn(&mut Driver, Instant); 3] {
    [
        |driver, now| {
            driver.inbox.cancel(&RequestId::try_new("r1").unwrap(), "the blocks are needed");
            driver.commands(now);
        },
        |driver, now| driver.hear(&Message::Unpin { handoff: 1 }, now),
        |driver, now| {
            driver.tick(now + Duration::from_millis(driver.config.limits.pin_ms), false);
        },
    ]
}

#[test]
fn a_pin_that_ends_holds_its_blocks_while_a_posted_write_reads_them() {
    let now = Instant::now();
    for end in ends() {
        let (mut driver, notes) = writing(now);
        end(&mut driver, now);
        driver.post(now);
        assert_eq!(*notes.lock(), ["put"]);
        driver.event(Event::Flushed(CONN, 1), now);
        assert_eq!(*notes.lock(), ["put", "let go"]);
        assert!(driver.table.is_empty());
    }
}

#[test]
fn without_a_posted_write_the_blocks_are_free_at_once() {
    let now = Instant::now();
    for end in ends() {
        let (mut driver, notes) = pinned(now);
        assert_eq!(*notes.lock(), [""; 0]);
        end(&mut driver, now);
        assert_eq!(*notes.lock(), ["let go"]);
    }
}

#[test]
fn pinned_blocks_that_a_device_reads_for_a_closed_connection_are_held() {
    let now = Instant::now();
    for draining in [false, true] {
        let (mut driver, notes) = writing(now);
        let reason = "gone".to_owned();
        driver.event(Event::Closed { conn: CONN, reason, fenced: !draining, draining, unproven: false }, now);
        let free = ["put", "let go"];
        assert_eq!(*notes.lock(), free[..if draining { 1 } else { 2 }]);
        driver.event(Event::Drained { conn: CONN, fenced: true }, now);
        assert_eq!(*notes.lock(), free);
    }
}

/// A write that does not end is ended with its connection after the time for a flush, which is not that of an abort.
#[test]
fn a_posted_write_is_waited_for_as_long_as_for_a_flush() {
    let now = Instant::now();
    let begins: [fn(Instant) -> (Driver, Notes); 2] = [writing, |now| {
        let (mut driver, notes) = Driver::noting();
        let (key, _) = begin_put(&mut driver, &notes, now);
        driver.hear(&Message::Grant { handoff: key.0, ticket: TicketId(7), blocks: blocks(), from: 0 }, now);
        driver.inbox.launched(key, 0, 16, Arc::new(AlreadyDone));
        driver.commands(now);
        driver.post(now);
        (driver, notes)
    }];
    for begin in begins {
        let (mut driver, notes) = begin(now);
        assert_eq!(*notes.lock(), ["put"]);
        let closed = Arc::default();
        driver.transport = Box::new(Noting { notes, closed: Arc::clone(&closed), ..Noting::default() });
        for key in driver.table.keys() {
            driver.input(key, Input::Abort(HandoffFailure::Stopped), now);
        }
        let flush = driver.config.limits.flush();
        assert!(flush < driver.config.limits.abort());
        driver.tick(now + flush - Duration::from_millis(1), false);
        assert_eq!(*closed.lock(), [""; 0]);
        driver.tick(now + flush, false);
        assert_eq!(closed.lock().len(), 1);
    }
}
