//! Peers that divide what they say into records as no correct peer does, and somebody in between who adds bytes.

use super::*;
use baton_memory::{RemoteConfig, RemotePool};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ServerSessionMemoryCache;
use rustls::{ClientConfig, ServerConfig};
use std::io::{Read as _, Write as _};

/// Bytes of a record's header.
const HEADER: usize = 5;

/// A worker whose messages of TLS itself come in several records each, after the handshake too.
struct Dividing(Arc<dyn Credentials>);

impl Credentials for Dividing {
    fn server(&self) -> Arc<ServerConfig> {
        let mut config = ServerConfig::clone(&self.0.server());
        config.max_fragment_size = Some(32);
        config.session_storage = ServerSessionMemoryCache::new(16);
        config.send_tls13_tickets = 4;
        Arc::new(config)
    }
    fn client(&self) -> Arc<ClientConfig> {
        self.0.client()
    }
    fn worker_name(&self) -> ServerName<'static> {
        self.0.worker_name()
    }
    fn is_worker(&self, chain: &[CertificateDer<'_>]) -> bool {
        self.0.is_worker(chain)
    }
}

fn all_at_once(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..n]).is_err() {
            return;
        }
    }
}

/// So few bytes at once that records end between them.
fn in_pieces(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 23];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..n]).is_err() {
            return;
        }
        std::thread::sleep(Duration::from_micros(300));
    }
}

/// TLS remembers where a message of its own continues, and must be shown the same bytes again.
#[test]
fn messages_of_tls_in_many_records_are_taken_in_pieces() {
    for base in [tls(), tls_control()] {
        let dividing = base.clone().with(Arc::new(Dividing(base.credentials.clone().unwrap())));
        let memory = RemotePool::new(BYTES, RemoteConfig::default()).unwrap();
        for a in [Side::start(&base), Side::over(&base, memory.clone(), memory.device_side().clone())] {
            let dials = |address| forwarded(address, all_at_once, in_pieces);
            let (mut a, from, mut b, to) = connect(a, Side::start(&dividing), dials);
            for i in 0..20 {
                a.transport.send(from, vec![i; 100]);
                b.transport.send(to, vec![100 + i; 100]);
                assert_eq!(until(&mut b, &mut a, "a message", message), vec![i; 100]);
                assert_eq!(until(&mut a, &mut b, "an answer", message), vec![100 + i; 100]);
            }
        }
    }
}

/// After the first long record come other bytes, and nothing else.
fn continued_in_clear(mut from: TcpStream, mut to: TcpStream) {
    while let Some(record) = next_record(&mut from) {
        to.write_all(&record).unwrap();
        if record.len() > 8 << 10 {
            to.write_all(&[0x7a; 64 << 10]).ok(); // The first byte of a frame.
            return;
        }
    }
}

/// The next record, with its header; `None` at the end of the stream.
fn next_record(from: &mut TcpStream) -> Option<Vec<u8>> {
    let mut record = vec![0; HEADER];
    from.read_exact(&mut record).ok()?;
    record.resize(HEADER + usize::from(u16::from_be_bytes([record[3], record[4]])), 0);
    from.read_exact(&mut record[HEADER..]).unwrap();
    Some(record)
}

/// A message of this length is sent in a record whose header is damaged.
const DAMAGED: usize = 300;

/// The record claims to be 8 KiB longer than it is; everything else comes as it was sent.
fn lengthened(mut from: TcpStream, mut to: TcpStream) {
    while let Some(mut record) = next_record(&mut from) {
        if (DAMAGED..DAMAGED + 60).contains(&record.len()) {
            record[3] += 0x20;
        }
        if to.write_all(&record).is_err() {
            return;
        }
    }
}

/// Pings alone would take minutes to fill it.
#[test]
fn a_record_that_claims_to_be_longer_than_it_is_ends_its_connection_although_bytes_come() {
    let (mut a, from, mut b, _) = connected_by(&tls(), |address| forwarded(address, lengthened, all_at_once));
    a.transport.send(from, vec![1; DAMAGED]);
    let reason = until(&mut b, &mut a, "closed", closed_because);
    assert!(reason.contains("a record is not complete"), "{reason}");
}

#[test]
fn what_began_in_a_record_does_not_continue_in_clear() {
    let way = tls_control();
    let (mut a, from, mut b, _) = connected_by(&way, |address| forwarded(address, continued_in_clear, all_at_once));
    a.transport.send(from, vec![3; 40_000]);
    let reason = until(&mut b, &mut a, "closed", closed_because);
    assert!(reason.contains("in clear"), "{reason}");
    assert!(b.events.iter().all(|event| message(event).is_none()), "a message with bytes of somebody else");
}

/// TLS keeps a part of a message of its own, and fails on the record behind it. What waits for the socket must not be given to it any more.
#[test]
fn a_session_that_failed_in_the_middle_of_a_message_encrypts_nothing_more() {
    let way = tls();
    let dividing = Dividing(way.credentials.clone().unwrap());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut side = Side::start(&way);
    let conn = side.transport.connect(&TransferAddress::Tcp(listener.local_addr().unwrap())).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut server = rustls::ServerConnection::new(dividing.server()).unwrap();
    let by = Instant::now() + PATIENCE;
    while server.is_handshaking() {
        assert!(Instant::now() < by, "the handshake does not end");
        side.transport.progress(Instant::now(), &mut side.events);
        match server.read_tls(&mut stream) {
            Ok(_) => drop(server.process_new_packets().unwrap()),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}"),
        }
        while server.is_handshaking() && server.wants_write() {
            server.write_tls(&mut stream).unwrap();
        }
    }
    // The first record of a ticket, and then one that nobody encrypted.
    let mut ticket = Vec::new();
    server.write_tls(&mut ticket).unwrap();
    let first = HEADER + usize::from(u16::from_be_bytes([ticket[3], ticket[4]]));
    assert!(ticket.len() > first, "a ticket has several records");
    stream.write_all(&[&ticket[..first], &[0x17, 3, 3, 0, 40], &[9; 40]].concat()).unwrap();
    side.transport.send(conn, vec![1; 100]);
    while !side.events.iter().any(|event| closed(event) == Some(conn)) {
        assert!(Instant::now() < by, "never closed");
        side.transport.progress(Instant::now(), &mut side.events);
    }
}
