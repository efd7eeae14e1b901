//! Authentication of peers on transports, and limits on unauthenticated clients.

use super::*;
use crate::message::MESSAGE_BYTES_MAX;
use parking_lot::Mutex;
use std::io::{Read as _, Write as _};

/// A frame's head in its encoded form.
fn head(kind: u16, len: u32, a: u64, b: u64) -> Vec<u8> {
    [&0xb07a_u16.to_le_bytes()[..], &kind.to_le_bytes(), &len.to_le_bytes(), &a.to_le_bytes(), &b.to_le_bytes()]
        .concat()
}

fn turn(side: &mut Side) {
    side.transport.progress(Instant::now(), &mut side.events);
}

/// Runs `side` until `done`.
fn eventually(side: &mut Side, what: &str, mut done: impl FnMut(&mut Side) -> bool) {
    let by = Instant::now() + PATIENCE;
    while !done(side) {
        assert!(Instant::now() < by, "never: {what}");
        turn(side);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether the other side has closed.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

/// Whether a message from the side that connects reaches the other. If not, the connection ended: `true` if because one side refused the
/// other as unproven.
fn greets(dialler: &Way, other: &Way) -> Result<(), bool> {
    let (mut a, mut b) = (Side::start(dialler), Side::start(other));
    let conn = a.transport.connect(&b.transport.address()).unwrap();
    a.transport.send(conn, vec![7]);
    let by = Instant::now() + PATIENCE;
    loop {
        turn(&mut a);
        turn(&mut b);
        if b.events.iter().any(|event| matches!(event, Event::Message(_, bytes) if bytes == &[7])) {
            let proven = other.credentials.is_some();
            assert!(b.events.iter().any(|e| matches!(e, Event::Accepted { proven: p, .. } if *p == proven)));
            return Ok(());
        }
        let closed = a.events.iter().find_map(|event| match event {
            Event::Closed { unproven, .. } => Some(*unproven),
            _ => None,
        });
        if let Some(unproven) = closed {
            assert!(!b.events.iter().any(|e| matches!(e, Event::Message(..) | Event::Accepted { proven: true, .. })));
            return Err(unproven);
        }
        assert!(Instant::now() < by, "neither through nor closed");
    }
}

#[test]
fn only_workers_of_one_authority_get_through() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    for base in [tcp(), ucx_shared_memory()] {
        let with = |credentials: Arc<dyn Credentials>| base.clone().with(credentials);
        let worker = with(ours.worker());
        assert_eq!(greets(&worker, &with(ours.worker())), Ok(()));
        // As the side that connects, and as the side that accepts.
        assert_eq!(greets(&with(theirs.worker()), &worker), Err(true));
        assert_eq!(greets(&worker, &with(theirs.worker())), Err(true));
        assert_eq!(greets(&with(ours.issue(authority::ROUTER)), &worker), Err(true));
        assert_eq!(greets(&worker, &with(ours.issue(authority::ROUTER))), Err(true));
        assert_eq!(greets(&with(ours.nothing()), &worker), Err(true));
        assert!(greets(&base, &worker).is_err(), "in clear");
        assert!(greets(&worker, &base).is_err(), "to somebody in clear");
    }
}

/// The hazard: no certificate is required.
#[test]
fn without_credentials_everybody_gets_through() {
    assert_eq!(greets(&tcp(), &tcp()), Ok(()));
}

/// Forwards a connection to `address`, and keeps a copy of the bytes. Returns the address to connect to.
fn tapped(address: TransferAddress, copy: &Arc<Mutex<Vec<u8>>>) -> TransferAddress {
    let tap = || {
        let copy = copy.clone();
        move |mut from: TcpStream, mut to: TcpStream| {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                copy.lock().extend_from_slice(&bytes[..n]);
                to.write_all(&bytes[..n]).unwrap();
            }
        }
    };
    forwarded(address, tap(), tap())
}

#[test]
fn kv_goes_in_clear_where_that_is_allowed_and_only_there() {
    for encrypt in [true, false] {
        let copy = Arc::default();
        let (mut a, from, mut b, to) = connected_by(&Way { encrypt, ..tls() }, |address| tapped(address, &copy));
        let kv = [0xa5, 0x17, 0x3c].repeat(100);
        a.region.copy_in(0, &kv);
        b.transport.open_window(to, TicketId(5), window(0..BYTES));
        // Between messages, which are always encrypted.
        a.transport.send(from, vec![3]);
        a.transport.put(from, TicketId(5), CopyRun { from: 0, to: 0, len: kv.len() });
        a.transport.flush(from, 1);
        until(&mut a, &mut b, "flushed", flushed);
        assert_eq!(b.read(0, kv.len()), kv);
        assert_eq!(copy.lock().windows(kv.len()).any(|bytes| bytes == kv), !encrypt, "encrypt: {encrypt}");
    }
}

#[test]
fn kv_in_clear_is_refused_where_it_is_to_be_encrypted() {
    let secret = tls();
    let clear = Way { encrypt: false, ..secret.clone() };
    let (mut a, mut b) = (Side::start(&clear), Side::start(&secret));
    let from = a.transport.connect(&b.transport.address()).unwrap();
    let to = until(&mut b, &mut a, "accepted", accepted);
    a.transport.send(from, vec![1]);
    until(&mut b, &mut a, "a first message", message);
    b.transport.greeted(to, &RemoteRegion::default(), MESSAGE_BYTES_MAX).unwrap();
    b.transport.open_window(to, TicketId(5), window(0..BYTES));
    a.transport.put(from, TicketId(5), CopyRun { from: 0, to: 0, len: 10 });
    let reason = until(&mut b, &mut a, "closed", closed_because);
    assert!(reason.contains("transfer.encrypt"), "{reason}");
}

/// Three may be late before the silence limit closes a connection.
#[test]
fn a_ping_goes_in_each_quarter_of_the_longest_silence() {
    let silent_max = Duration::from_millis(10_000);
    let mut side = Side::start(&Way { connect_ms: 60_000, ..tcp() });
    let mut stream = TcpStream::connect(socket(&side)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let began = Instant::now();
    while !side.events.iter().any(|event| accepted(event).is_some()) {
        assert!(began.elapsed() < PATIENCE, "never accepted");
        side.transport.progress(began, &mut side.events);
    }
    side.transport.progress(began + silent_max / 4, &mut side.events);
    stream.set_nonblocking(true).unwrap();
    assert!(stream.read(&mut [0; 24]).is_err(), "a ping came early");
    stream.set_nonblocking(false).unwrap();
    side.transport.progress(began + silent_max / 4 + Duration::from_millis(1), &mut side.events);
    let mut came = [0; 24];
    stream.read_exact(&mut came).unwrap();
    assert_eq!(came[..], head(5, 0, 0, 0));
}

#[test]
fn strangers_have_little_time_and_few_places() {
    let stranger_says: [&[u8]; 4] = [b"", &[22, 3, 1], &[22, 3, 1, 2, 0, 1], b"GET / HTTP/1.1\r\n\r\n"];
    for base in [tls(), ucx_tls(), tcp()] {
        let way = Way { connect_ms: 300, ..base };
        let mut side = Side::start(&way);
        let mut strangers: Vec<_> = stranger_says
            .iter()
            .map(|says| {
                let mut stream = TcpStream::connect(socket(&side)).unwrap();
                stream.write_all(says).unwrap();
                stream
            })
            .collect();
        eventually(&mut side, "strangers are let go", |_| strangers.iter_mut().all(is_closed));
        // More connections than there is room for, all at once: the last ones stay until their time is over.
        let way = Way { connect_ms: 60_000, ..way };
        let mut side = Side::start(&way);
        let mut strangers = Vec::new();
        // No time passes, so connections are closed only to make room.
        let now = Instant::now();
        for _ in 0..300 {
            strangers.push(TcpStream::connect(socket(&side)).unwrap());
            side.transport.progress(now, &mut side.events);
        }
        let by = Instant::now() + PATIENCE;
        while strangers.iter_mut().filter_map(|s| (!is_closed(s)).then_some(())).count() > 64 {
            assert!(Instant::now() < by, "the oldest do not give way");
            side.transport.progress(now, &mut side.events);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!is_closed(strangers.last_mut().unwrap()), "the newest has its place");
        let mut peer = Side::start(&way);
        let conn = peer.transport.connect(&side.transport.address()).unwrap();
        peer.transport.send(conn, vec![1]);
        until(&mut side, &mut peer, "a peer gets through", message);
    }
}

/// It has a certificate, and keeps answering probes.
#[test]
fn who_proves_to_be_a_worker_has_no_more_time_to_greet() {
    for base in [tls(), tls_control(), ucx_tls()] {
        let (mut side, mut peer) = (Side::start(&Way { connect_ms: 300, ..base.clone() }), Side::start(&base));
        peer.transport.connect(&side.transport.address()).unwrap();
        until(&mut side, &mut peer, "it is proven", |event| {
            matches!(event, Event::Accepted { proven: true, .. }).then_some(())
        });
        let reason = until(&mut side, &mut peer, "let go", closed_because);
        assert!(reason.contains("does not say who"), "{reason}");
    }
}

/// A side, and a stream whose greeting it has accepted, with its connection.
fn greeting_accepted() -> (Side, TcpStream, ConnId) {
    let mut side = Side::start(&tcp());
    let mut stream = TcpStream::connect(socket(&side)).unwrap();
    stream.write_all(&[head(1, 2, 0, 0), b"hi".to_vec()].concat()).unwrap();
    eventually(&mut side, "a greeting", |side| side.events.iter().any(|event| message(event).is_some()));
    let conn = side.events.iter().find_map(accepted).unwrap();
    side.transport.greeted(conn, &RemoteRegion::default(), MESSAGE_BYTES_MAX).unwrap();
    (side, stream, conn)
}

/// A peer that is accepted and then sends what no correct peer sends.
fn misbehaves(bytes: &[u8]) -> String {
    let (mut side, mut stream, _) = greeting_accepted();
    stream.set_nonblocking(true).unwrap();
    let (by, mut sent) = (Instant::now() + PATIENCE, 0);
    loop {
        match stream.write(&bytes[sent % bytes.len()..]) {
            Ok(n) => sent += n,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => {}
        }
        turn(&mut side);
        if let Some(reason) = side.events.iter().find_map(closed_because) {
            return reason;
        }
        assert!(Instant::now() < by && sent < 64 << 20, "not closed after {sent} bytes");
    }
}

#[test]
fn answers_to_flushes_that_nobody_reads_are_bounded() {
    let reason = misbehaves(&head(3, 0, 7, 0).repeat(10_000));
    assert!(reason.contains("flushes"), "{reason}");
}

/// A peer that answers a flush, and has read none of the writes before it.
#[test]
fn an_answer_to_a_flush_that_was_not_sent_closes_the_connection() {
    let reason = misbehaves(&head(4, 0, 7, 0));
    assert!(reason.contains("answers a flush"), "{reason}");
    let (mut side, mut stream, conn) = greeting_accepted();
    (0..20).for_each(|_| side.transport.put(conn, TicketId(5), CopyRun { from: 0, to: 0, len: BYTES }));
    side.transport.flush(conn, 7);
    stream.write_all(&head(4, 0, 7, 0)).unwrap();
    eventually(&mut side, "closed", |side| side.events.iter().any(|event| closed(event).is_some()));
    assert!(side.events.iter().all(|event| flushed(event).is_none()));
}

#[test]
fn a_long_message_before_the_greeting_is_refused() {
    let mut side = Side::start(&tcp());
    let mut stream = TcpStream::connect(socket(&side)).unwrap();
    stream.write_all(&head(1, 32 << 20, 0, 0)).unwrap();
    eventually(&mut side, "closed", |side| side.events.iter().any(|event| closed(event).is_some()));
    assert!(is_closed(&mut stream));
}
