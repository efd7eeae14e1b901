//! Handshakes of many that connect at once.

use super::*;
use std::io::Write as _;

/// The first bytes of a client.
fn client_hello(way: &Way) -> Vec<u8> {
    let credentials = way.credentials.as_ref().unwrap();
    let mut client = rustls::ClientConnection::new(credentials.client(), credentials.worker_name()).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_turn_answers_few_of_those_that_connect() {
    let way = tls();
    let mut side = Side::start(&way);
    let (TransferAddress::Tcp(to) | TransferAddress::Ucx(to)) = side.transport.address();
    let connect = |_| {
        let mut stream = TcpStream::connect(to).unwrap();
        stream.write_all(&client_hello(&way)).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let strangers: Vec<_> = (0..40).map(connect).collect();
    let answered = || strangers.iter().filter(|stream| stream.peek(&mut [0]).is_ok_and(|n| n > 0)).count();
    let (by, mut before) = (Instant::now() + PATIENCE, 0);
    while before < strangers.len() {
        assert!(Instant::now() < by, "{before} are answered");
        let moved = side.transport.progress(Instant::now(), &mut side.events);
        let now = answered();
        assert!(now <= before + 2, "{} are answered in one turn", now - before);
        assert!(moved, "the others wait for the next turn, which nothing wakes");
        before = now;
    }
}

/// Who keeps sending does not keep others waiting.
#[test]
fn a_worker_proves_itself_among_strangers_that_go_on() {
    let way = tls();
    let (mut a, mut b) = (Side::start(&way), Side::start(&way));
    let (TransferAddress::Tcp(to) | TransferAddress::Ucx(to)) = b.transport.address();
    let hello = client_hello(&way);
    let mut strangers: Vec<_> = (0..20).map(|_| TcpStream::connect(to).unwrap()).collect();
    let (mut sent, by) = (0, Instant::now() + PATIENCE);
    let from = a.transport.connect(&b.transport.address()).unwrap();
    a.transport.send(from, vec![1]);
    while !b.events.iter().any(|event| message(event).is_some()) {
        assert!(Instant::now() < by, "never heard among strangers that sent {sent} bytes each");
        // A byte at a time of a message that is long.
        for stranger in strangers.iter_mut().filter(|_| sent < hello.len() - 1) {
            stranger.write_all(&hello[sent..=sent]).unwrap();
        }
        sent += 1;
        let now = Instant::now();
        b.transport.progress(now, &mut b.events);
        a.transport.progress(now, &mut a.events);
    }
    assert!(sent < hello.len(), "the strangers went on until then");
}
