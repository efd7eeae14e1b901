//! Connections that have ended, whose end the transport reports only once the pool's device has ended its work for them.

use super::*;

fn lost(conn: ConnId) -> Event {
    Event::Closed { conn, reason: "gone".into(), fenced: true, draining: false, unproven: false }
}

/// The connection is over, and the device still works for it.
fn lost_to_the_device(conn: ConnId) -> Event {
    Event::Closed { conn, reason: "gone".into(), fenced: false, draining: true, unproven: false }
}

/// A driver, and the number of its connections that have ended.
fn ending() -> (Driver, Arc<Mutex<u64>>) {
    let (mut driver, notes) = Driver::noting();
    let ended = Arc::<Mutex<u64>>::default();
    driver.transport = Box::new(Noting { notes, ended: ended.clone(), ..Noting::default() });
    (driver, ended)
}

fn peer() -> Peer {
    Peer { party: party("peer"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 }
}

#[test]
fn a_connection_that_has_ended_is_handed_out_no_more() {
    let (mut driver, ended) = ending();
    driver.config.limits.peers_max = 1;
    let (now, again) = (Instant::now(), ConnId(CONN.0 + 1));
    assert_eq!(driver.connection_to(&peer(), now), Ok(CONN));
    *ended.lock() = 1;
    assert_eq!(driver.connection_to(&peer(), now), Ok(again), "it takes no place");
    assert_eq!(driver.connection_to(&peer(), now), Ok(again));
    driver.event(lost(CONN), now);
    assert_eq!(driver.connection_to(&peer(), now), Ok(again));
}

#[test]
fn connections_that_have_ended_are_bounded() {
    let (mut driver, ended) = ending();
    driver.config.limits.peers_max = 2;
    let now = Instant::now();
    for conn in 0..4 {
        *ended.lock() = conn;
        assert_eq!(driver.connection_to(&peer(), now), Ok(ConnId(CONN.0 + conn)));
    }
    *ended.lock() = 4;
    assert!(driver.connection_to(&peer(), now).is_err());
    driver.event(lost(CONN), now);
    assert_eq!(driver.connection_to(&peer(), now), Ok(ConnId(CONN.0 + 4)));
}

#[test]
fn a_peer_whose_connection_has_ended_may_come_back() {
    let (mut driver, ended) = ending();
    driver.config.limits.accepted_max = 1;
    let now = Instant::now();
    let mut is_greeted = |conn: ConnId| {
        driver.event(Event::Accepted { conn, proven: false }, now);
        driver.event(Event::Message(conn, Message::Hello(greeting()).encode()), now);
        driver.is_greeted(conn)
    };
    assert!(is_greeted(CONN));
    assert!(!is_greeted(ConnId(CONN.0 + 1)));
    *ended.lock() = 2;
    assert!(is_greeted(ConnId(CONN.0 + 2)));
}

#[test]
fn connections_that_outlast_their_end_are_bounded() {
    let (mut driver, ended) = ending();
    driver.config.limits.peers_max = 2;
    let now = Instant::now();
    for conn in 0..4 {
        assert_eq!(driver.connection_to(&peer(), now), Ok(ConnId(CONN.0 + conn)));
        *ended.lock() = conn + 1;
        driver.event(lost_to_the_device(ConnId(CONN.0 + conn)), now);
    }
    let told = driver.connection_to(&peer(), now).unwrap_err().to_string();
    assert!(told.contains("0 are open, of 2; 4 have ended and wait for the pool's device, of 4 in all"), "{told}");
    driver.event(Event::Drained { conn: CONN, fenced: true }, now);
    assert_eq!(driver.connection_to(&peer(), now), Ok(ConnId(CONN.0 + 4)));
}

/// A peer that connects, leaves work to the device, goes and connects again.
#[test]
fn a_peer_that_comes_back_leaves_no_more_to_the_device_than_the_bound() {
    let (mut driver, ended) = ending();
    driver.config.limits.accepted_max = 1;
    driver.config.limits.peers_max = 1;
    let now = Instant::now();
    let comes = |driver: &mut Driver, conn: ConnId| {
        driver.event(Event::Accepted { conn, proven: false }, now);
        driver.event(Event::Message(conn, Message::Hello(greeting()).encode()), now);
        let is_greeted = driver.is_greeted(conn);
        *ended.lock() += 1;
        driver.event(lost_to_the_device(conn), now);
        is_greeted
    };
    let came: Vec<_> = (0..4).map(|conn| comes(&mut driver, ConnId(CONN.0 + conn))).collect();
    assert_eq!(came, [true, true, false, false]);
    let ours = ConnId(CONN.0 + 4);
    assert_eq!(driver.connection_to(&peer(), now), Ok(ours), "those of peers take no place of this side's");
    (0..4).for_each(|conn| driver.event(Event::Drained { conn: ConnId(CONN.0 + conn), fenced: true }, now));
    assert!(comes(&mut driver, ConnId(CONN.0 + 5)));
}
