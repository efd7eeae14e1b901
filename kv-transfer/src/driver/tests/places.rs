//! Places of peers: what one peer takes is bounded, and leaves some to the others.

use super::*;
use crate::calls::{Call, Calls};
use crate::{PinQuestion, PinReply};

/// Keeps the calls, as a worker that is busy does.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Call>>>);

impl Calls for Kept {
    fn submit(&mut self, call: Call) {
        self.0.lock().push(call);
    }
    fn joins_legs(&self) -> bool {
        false
    }
}

/// A worker that is asked for no blocks.
struct Unasked;

impl SinkHandler for Unasked {
    fn reserve(&self, offer: ReserveOffer, _: GrantReply) {
        panic!("{} has ended", offer.request_id);
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
    fn pin(&self, question: PinQuestion, _: PinReply) {
        panic!("{} has ended", question.request_id);
    }
}

fn greet(driver: &mut Driver, conn: ConnId, by: Party, now: Instant) {
    let mut hello = greeting();
    hello.party = by;
    driver.event(Event::Accepted { conn, proven: false }, now);
    driver.event(Event::Message(conn, Message::Hello(hello).encode()), now);
}

/// Offers a put or a get in the peer's name.
fn offer_by(driver: &mut Driver, conn: ConnId, peer: &Party, direction: Direction, handoff: u64, now: Instant) {
    let Message::Offer(mut offer) = offer(handoff, 16) else { unreachable!() };
    offer.direction = direction;
    (offer.source, offer.sink) = match direction {
        Direction::Put => (peer.clone(), party("here")),
        Direction::Get => (party("here"), peer.clone()),
    };
    driver.event(Event::Message(conn, Message::Offer(offer).encode()), now);
}

#[test]
fn calls_of_handoffs_that_have_ended_are_bounded_and_ask_for_nothing() {
    let now = Instant::now();
    for direction in [Direction::Put, Direction::Get] {
        let ((mut driver, _), kept) = (Driver::noting(), Kept::default());
        driver.calls = Box::new(kept.clone());
        driver.config.limits.accepted_handoffs_max = 20;
        greet(&mut driver, CONN, party("peer"), now);
        let begin_and_end = |driver: &mut Driver, handoff| {
            offer_by(driver, CONN, &party("peer"), direction, handoff, now);
            let begun = driver.table.keys().len();
            let end = match direction {
                Direction::Put => {
                    Message::Aborted { handoff, ticket: TicketId(1), flushed: true, detail: String::new() }
                }
                Direction::Get => Message::Unpin { handoff },
            };
            driver.hear(&end, now);
            begun
        };
        (1..=1000).for_each(|handoff| {
            begin_and_end(&mut driver, handoff);
        });
        assert!(driver.table.is_empty());
        let calls = std::mem::take(&mut *kept.0.lock());
        assert!((20..=22).contains(&calls.len()), "{direction:?}: {} calls wait", calls.len());
        calls.into_iter().for_each(|call| call.make(&Unasked));
        assert_eq!(begin_and_end(&mut driver, 1001), 1, "{direction:?}: there is a place again");
    }
}

#[test]
fn one_peer_leaves_handoffs_to_the_others() {
    let now = Instant::now();
    for direction in [Direction::Put, Direction::Get] {
        let (mut driver, _) = Driver::noting();
        driver.calls = Box::new(Kept::default());
        driver.config.limits.accepted_handoffs_max = 40;
        let open = |driver: &Driver| driver.table.sinks() + driver.table.owners();
        for (conn, name, total) in [(CONN, "peer", 20), (ConnId(2), "other", 40), (ConnId(3), "third", 40)] {
            greet(&mut driver, conn, party(name), now);
            (1..=30).for_each(|handoff| offer_by(&mut driver, conn, &party(name), direction, handoff, now));
            assert_eq!(open(&driver), total, "{direction:?} of {name}");
        }
    }
}

/// Those that have closed count too, for as long as the device works for them.
#[test]
fn one_peer_leaves_connections_that_drain_to_the_others() {
    let (mut driver, now) = (Driver::noting().0, Instant::now());
    driver.config.limits.accepted_max = 160;
    for conn in (0..40).map(ConnId) {
        greet(&mut driver, conn, party("peer"), now);
        assert!(driver.is_greeted(conn), "{conn:?}");
        driver
            .event(Event::Closed { conn, reason: "gone".into(), fenced: false, draining: true, unproven: false }, now);
    }
    for (conn, name, has_place) in [(100, "peer", false), (101, "other", true)] {
        greet(&mut driver, ConnId(conn), party(name), now);
        assert_eq!(driver.is_greeted(ConnId(conn)), has_place, "{name}");
    }
    driver.event(Event::Drained { conn: ConnId(7), fenced: true }, now);
    greet(&mut driver, ConnId(102), party("peer"), now);
    assert!(driver.is_greeted(ConnId(102)));
}

/// Puts that are over count too, for as long as the device stores what came.
#[test]
fn one_peer_leaves_puts_that_are_being_stored_to_the_others() {
    let (mut driver, now) = (Driver::noting().0, Instant::now());
    driver.config.limits.accepted_handoffs_max = 40;
    let put = |driver: &mut Driver, conn, name: &str, handoff| {
        offer_by(driver, conn, &party(name), Direction::Put, handoff, now);
        driver.commands(now);
        driver.granted().contains(&handoff)
    };
    let other = ConnId(2);
    greet(&mut driver, CONN, party("peer"), now);
    greet(&mut driver, other, party("other"), now);
    for handoff in 1..=20 {
        assert!(put(&mut driver, CONN, "peer", handoff), "{handoff}");
        let ticket = driver.ticket_of(handoff);
        driver.hear(&Message::Aborted { handoff, ticket, flushed: true, detail: String::new() }, now);
    }
    assert_eq!(driver.table.sinks(), 0);
    assert!(!put(&mut driver, CONN, "peer", 21));
    assert!(put(&mut driver, other, "other", 22));
    driver.windows_close(now);
    assert!(put(&mut driver, CONN, "peer", 23));
}

#[test]
fn one_peer_leaves_connections_to_the_others() {
    let (mut driver, now) = (Driver::noting().0, Instant::now());
    driver.config.limits.accepted_max = 160;
    for conn in 0..30 {
        let peer = Party { incarnation: Incarnation(conn % 2), ..party("peer") };
        greet(&mut driver, ConnId(100 + conn), peer, now);
        assert_eq!(driver.is_greeted(ConnId(100 + conn)), conn < 20, "connection {conn}");
    }
    greet(&mut driver, ConnId(200), party("other"), now);
    assert!(driver.is_greeted(ConnId(200)));
}
