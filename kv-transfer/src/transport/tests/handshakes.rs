//! Handshakes of many that connect at once.

use super::*;
use std::io::Write as _;

fn client(way: &Way) -> rustls::ClientConnection {
    let credentials = way.credentials.as_ref().unwrap();
    rustls::ClientConnection::new(credentials.client(), credentials.worker_name()).unwrap()
}

/// The first bytes of a client.
fn client_hello(way: &Way) -> Vec<u8> {
    let mut bytes = Vec::new();
    client(way).write_tls(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_turn_answers_few_of_those_that_connect() {
    let way = tls();
    let mut side = Side::start(&way);
    let to = socket(&side);
    let connect = |_| {
        let mut stream = TcpStream::connect(to).unwrap();
        stream.write_all(&client_hello(&way)).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let strangers: Vec<_> = (0..40).map(connect).collect();
    let answered = || strangers.iter().filter(|stream| stream.peek(&mut [0]).is_ok_and(|n| n > 0)).count();
    // The turns are short, however slow the test is: a longer one answers more.
    let (by, mut before, mut now) = (Instant::now() + PATIENCE, 0, Instant::now());
    while before < strangers.len() {
        assert!(Instant::now() < by, "{before} are answered");
        now += Duration::from_millis(1);
        let moved = side.transport.progress(now, &mut side.events);
        let after = answered();
        assert!(after <= before + 2, "{} are answered in one turn", after - before);
        assert!(moved, "the others wait for the next turn, which nothing wakes");
        before = after;
    }
}

/// A client of another host of the loopback network, which proves itself.
struct Client {
    tls: rustls::ClientConnection,
    stream: TcpStream,
}

impl Client {
    fn dial(way: &Way, to: SocketAddr, host: u8) -> Self {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 1, host], 0)).into()).unwrap();
        socket.connect_timeout(&to.into(), PATIENCE).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { tls: client(way), stream: socket.into() }
    }

    /// Sends and reads as much as possible.
    fn progress(&mut self) {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.stream).unwrap();
        }
        match self.tls.read_tls(&mut self.stream) {
            Ok(0) => panic!("closed before it was proven"),
            Ok(_) => self.tls.process_new_packets().map(drop).unwrap(),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}"),
        }
    }
}

#[test]
fn many_hosts_that_connect_at_once_all_prove_themselves() {
    let way = tls();
    let mut side = Side::start(&way);
    let to = socket(&side);
    // More than there are places, and than a listener of the usual 128 lets wait.
    let mut clients: Vec<_> = (0..220).map(|host| Client::dial(&way, to, host)).collect();
    let (by, mut now) = (Instant::now() + PATIENCE, Instant::now());
    let (mut greeted, mut turn) = (0, 0);
    while greeted < clients.len() {
        assert!(Instant::now() < by, "{greeted} have proven themselves");
        // They are far away: all first steps are done before any answer comes.
        if turn % 100 == 0 {
            clients.iter_mut().for_each(Client::progress);
        }
        (turn, now) = (turn + 1, now + Duration::from_millis(1));
        side.transport.progress(now, &mut side.events);
        for event in std::mem::take(&mut side.events) {
            if let Some(conn) = accepted(&event) {
                greeted += 1;
                let region = RemoteRegion { bytes: BYTES as u64, ..RemoteRegion::default() };
                side.transport.greeted(conn, &region, 1024).unwrap();
            }
        }
    }
}

/// Who keeps sending does not keep others waiting.
#[test]
fn a_worker_proves_itself_among_strangers_that_go_on() {
    let way = tls();
    let (mut a, mut b) = (Side::start(&way), Side::start(&way));
    let to = socket(&b);
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
