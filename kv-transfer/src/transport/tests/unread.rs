//! Peers that do not read what is sent to them.

use super::*;

const MIB: usize = 1 << 20;

#[test]
fn memory_for_all_peers_that_do_not_read_is_bounded() {
    let way = tcp();
    let mut side = Side::start(&way);
    let mut peers: Vec<_> = (0..6).map(|_| Side::start(&way)).collect();
    let conns: Vec<_> = peers
        .iter_mut()
        .map(|peer| {
            peer.transport.connect(&side.transport.address()).unwrap();
            until(&mut side, peer, "accepted", accepted)
        })
        .collect();
    // The third has the most to read, and no one reads.
    for (i, &conn) in conns.iter().enumerate() {
        side.transport.send(conn, vec![0; if i == 2 { 100 } else { 80 } * MIB]);
    }
    side.transport.progress(Instant::now(), &mut side.events);
    assert!(side.events.is_empty(), "500 MiB wait at most");
    side.transport.send(conns[0], vec![0; 40 * MIB]);
    side.transport.progress(Instant::now(), &mut side.events);
    let ended: Vec<_> = side.events.iter().filter_map(closed).collect();
    assert_eq!(ended, [conns[0]], "it has the most then");
    side.transport.send(conns[1], vec![0; 128 * MIB]);
    side.transport.progress(Instant::now(), &mut side.events);
    let reasons: Vec<_> = side.events.iter().filter_map(closed_because).collect();
    assert!(reasons.len() == 2 && reasons[1].contains("does not read its messages"), "{reasons:?}");
}

/// The peer of this test never tells where its lanes are.
#[test]
fn messages_that_wait_for_lanes_are_bounded() {
    let mut side = Side::start(&ucx());
    let _peer = TcpStream::connect(socket(&side)).unwrap();
    let next = |side: &mut Side| {
        let by = Instant::now() + PATIENCE;
        while side.events.is_empty() {
            assert!(Instant::now() < by, "nothing happens");
            side.transport.progress(Instant::now(), &mut side.events);
        }
        side.events.remove(0)
    };
    let conn = accepted(&next(&mut side)).unwrap();
    side.transport.send(conn, vec![1; MIB / 2]);
    side.transport.send(conn, vec![2; MIB / 4]);
    assert!(side.transport.is_open(conn));
    side.transport.send(conn, vec![3; MIB / 2]);
    let reason = closed_because(&next(&mut side)).unwrap();
    assert!(reason.contains("too many messages wait"), "{reason}");
}
