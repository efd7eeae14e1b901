//! Checks the guarantees of [`Transport`] on each implementation, without a service around it.

use super::*;
use crate::message::MESSAGE_BYTES_MAX;
use crate::{Credentials, Party, UcxLanes, UcxWrites};
use authority::Authority;
use baton_memory::{HostPool, PoolMemory};
use baton_types::{Compatibility, Digest, Dtype, Incarnation, InstanceId, KvLayout, KvPoolMap, NumericsClass};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;

#[allow(dead_code, unreachable_pub)] // The crate's integration tests include it too.
#[path = "../../../tests/common/authority.rs"]
mod authority;
mod handshakes;
mod proving;
mod records;
mod storing;
mod unread;

const PATIENCE: Duration = Duration::from_secs(20);
const BYTES: usize = 1 << 20;

/// The configuration with which two sides communicate.
#[derive(Clone)]
struct Way {
    choice: TransportChoice,
    credentials: Option<Arc<dyn Credentials>>,
    encrypt: bool,
    connect_ms: u64,
}

impl Way {
    fn plain(choice: TransportChoice) -> Self {
        Self { choice, credentials: None, encrypt: true, connect_ms: 5_000 }
    }

    fn with(self, credentials: Arc<dyn Credentials>) -> Self {
        Self { credentials: Some(credentials), ..self }
    }
}

struct Side {
    transport: Box<dyn Transport>,
    region: Arc<HostPool>,
    events: Vec<Event>,
}

impl Side {
    fn start(way: &Way) -> Self {
        let region = HostPool::new(BYTES).unwrap();
        Self::over(way, region.clone(), region)
    }

    /// A side whose pool is `memory`, of which a test sees `region`.
    fn over(way: &Way, memory: Arc<dyn PoolMemory>, region: Arc<HostPool>) -> Self {
        let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
        let class =
            NumericsClass { order: "t".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 0 };
        let compatibility = Compatibility { model: Digest([0; 32]), layout: layout.clone(), class };
        let party = Party { instance: InstanceId::try_new("t").unwrap(), incarnation: Incarnation(1) };
        let map = KvPoolMap::try_new(layout, 1).unwrap();
        let mut config = TransferConfig::new(party, compatibility, map, way.choice.clone());
        (config.credentials, config.encrypt) = (way.credentials.clone(), way.encrypt);
        (config.limits.connect_ms, config.limits.ungreeted_max) = (way.connect_ms, 64);
        let (transport, _) = start(&config, SharedPoolMemory::new(memory)).unwrap();
        Self { transport, region, events: Vec::new() }
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.region.copy_out(at, &mut bytes);
        bytes
    }
}

/// Where a side accepts connections.
fn socket(side: &Side) -> SocketAddr {
    let (TransferAddress::Tcp(socket) | TransferAddress::Ucx(socket)) = side.transport.address();
    socket
}

/// Both sides progress until `take` finds its event among the first side's events.
fn until<T>(side: &mut Side, other: &mut Side, what: &str, mut take: impl FnMut(&Event) -> Option<T>) -> T {
    let by = Instant::now() + PATIENCE;
    loop {
        let found = side.events.iter().enumerate().find_map(|(i, event)| take(event).map(|value| (i, value)));
        if let Some((i, value)) = found {
            side.events.remove(i);
            return value;
        }
        assert!(Instant::now() < by, "never: {what}");
        let now = Instant::now();
        let moved = side.transport.progress(now, &mut side.events);
        if !(other.transport.progress(now, &mut other.events) || moved) {
            std::thread::yield_now();
        }
    }
}

fn accepted(event: &Event) -> Option<ConnId> {
    if let Event::Accepted { conn, .. } = event { Some(*conn) } else { None }
}
fn message(event: &Event) -> Option<Vec<u8>> {
    if let Event::Message(_, bytes) = event { Some(bytes.clone()) } else { None }
}
fn flushed(event: &Event) -> Option<u64> {
    if let Event::Flushed(_, id) = event { Some(*id) } else { None }
}
fn closed(event: &Event) -> Option<ConnId> {
    if let Event::Closed { conn, .. } = event { Some(*conn) } else { None }
}

/// Why a connection closed.
fn closed_because(event: &Event) -> Option<String> {
    if let Event::Closed { reason, .. } = event { Some(reason.clone()) } else { None }
}

/// Forwards one connection to `address`; `there` and `back` carry the bytes of each direction. Returns the address to connect to.
fn forwarded(
    address: TransferAddress,
    there: impl FnOnce(TcpStream, TcpStream) + Send + 'static,
    back: impl FnOnce(TcpStream, TcpStream) + Send + 'static,
) -> TransferAddress {
    let (TransferAddress::Tcp(to) | TransferAddress::Ucx(to)) = address;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let between = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (dialler, _) = listener.accept().unwrap();
        let other = TcpStream::connect(to).unwrap();
        [&dialler, &other].into_iter().for_each(|stream| stream.set_nodelay(true).unwrap());
        let (from, to) = (dialler.try_clone().unwrap(), other.try_clone().unwrap());
        std::thread::spawn(move || there(from, to));
        back(other, dialler);
    });
    TransferAddress::Tcp(between)
}

/// Two connected sides, with the connection of each.
fn connected(choice: &Way) -> (Side, ConnId, Side, ConnId) {
    connected_by(choice, |address| address)
}

/// The same, where the first side connects to the address that this makes from the other's.
fn connected_by(choice: &Way, dials: impl FnOnce(TransferAddress) -> TransferAddress) -> (Side, ConnId, Side, ConnId) {
    connect(Side::start(choice), Side::start(choice), dials)
}

fn connect(
    mut a: Side,
    mut b: Side,
    dials: impl FnOnce(TransferAddress) -> TransferAddress,
) -> (Side, ConnId, Side, ConnId) {
    let from = a.transport.connect(&dials(b.transport.address())).unwrap();
    let to = until(&mut b, &mut a, "accepted", accepted);
    a.transport.send(from, vec![1]);
    until(&mut b, &mut a, "a first message", message);
    b.transport.send(to, vec![2]);
    until(&mut a, &mut b, "a first answer", message);
    let (remote, local) = (b.transport.region(), a.transport.region());
    a.transport.greeted(from, &remote, MESSAGE_BYTES_MAX).unwrap();
    b.transport.greeted(to, &local, MESSAGE_BYTES_MAX).unwrap();
    (a, from, b, to)
}

fn messages_arrive_whole_and_in_order(choice: &Way) {
    let (mut a, from, mut b, to) = connected(choice);
    let sizes = [1usize, 3 << 20, 7, 70_000, 8_000, 1, 1 << 20, 2];
    for (i, &size) in sizes.iter().enumerate() {
        a.transport.send(from, vec![i as u8; size]);
        b.transport.send(to, vec![100 + i as u8; size]);
    }
    for (i, &size) in sizes.iter().enumerate() {
        assert!(until(&mut b, &mut a, "a message", message) == vec![i as u8; size], "message {i}");
        assert!(until(&mut a, &mut b, "a message", message) == vec![100 + i as u8; size], "message {i} back");
    }
}

fn writes_are_visible_once_flushed(choice: &Way) {
    let (mut a, from, mut b, to) = connected(choice);
    let noise: Vec<u8> = (0..BYTES).map(|i| ((i * 31) >> 3) as u8).collect();
    a.region.copy_in(0, &noise);
    b.transport.open_window(to, TicketId(5), Window::of(vec![0..BYTES / 2, BYTES / 2 + 64..BYTES]));
    // Odd offsets and lengths, from a byte to a quarter of a mebibyte.
    let runs = [(0, 6000, 1), (100, 3, 5000), (5001, 200_000, 70_001), (1, 600_000, 262_144)];
    for (from_at, to_at, len) in runs {
        a.transport.put(from, TicketId(5), CopyRun { from: from_at, to: to_at, len });
    }
    a.transport.flush(from, 7);
    assert_eq!(until(&mut a, &mut b, "flushed", flushed), 7);
    for (from_at, to_at, len) in runs {
        assert!(b.read(to_at, len) == noise[from_at..from_at + len], "run of {len} bytes");
        assert_eq!(b.read(to_at + len, 1), [0], "a byte beyond the run");
    }
    let done = a.events.iter().map(|e| if let Event::PutDone(_, bytes) = e { *bytes } else { 0 }).sum::<usize>();
    assert_eq!(done, runs.iter().map(|r| r.2).sum());
}

fn closing_reaches_the_other_side(choice: &Way) {
    let (mut a, from, mut b, to) = connected(choice);
    a.transport.send(from, b"last words".to_vec());
    a.transport.close(from, "test");
    assert_eq!(until(&mut b, &mut a, "a message", message), b"last words");
    assert_eq!(until(&mut b, &mut a, "closed there", closed), to);
    assert_eq!(until(&mut a, &mut b, "closed here", closed), from);
    // Operations on a closed connection do nothing, and a new connection works.
    a.transport.send(from, vec![1]);
    a.transport.put(from, TicketId(1), CopyRun { from: 0, to: 0, len: 1 });
    a.transport.flush(from, 1);
    a.transport.connect(&b.transport.address()).unwrap();
    until(&mut b, &mut a, "accepted again", accepted);
    assert!(a.events.iter().chain(&b.events).all(|e| flushed(e).is_none() && closed(e).is_none()));
}

macro_rules! on_each {
    ($($name:ident),*) => {$(
        mod $name {
            #[test]
            fn tcp() {
                super::$name(&super::tcp());
            }
            #[test]
            fn tls() {
                super::$name(&super::tls());
            }
            #[test]
            fn tls_control() {
                super::$name(&super::tls_control());
            }
            #[test]
            fn ucx() {
                super::$name(&super::ucx());
            }
            #[test]
            fn ucx_shared_memory() {
                super::$name(&super::ucx_shared_memory());
            }
            #[test]
            fn ucx_tls() {
                super::$name(&super::ucx_tls());
            }
            #[test]
            fn ucx_one_sided() {
                super::$name(&super::ucx_one_sided());
            }
            #[test]
            fn ucx_read() {
                super::$name(&super::ucx_read());
            }
        }
    )*};
}
on_each![messages_arrive_whole_and_in_order, writes_are_visible_once_flushed, closing_reaches_the_other_side];

#[test]
#[ignore = "measures what connections cost; run alone"]
fn ucx_connections_cost() {
    let status = |name: &str| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap()
    };
    let costs = || (std::fs::read_dir("/proc/self/fd").unwrap().count() as i64, status("VmRSS"), status("Threads"));
    let choice = ucx();
    let (mut a, mut b) = (Side::start(&choice), Side::start(&choice));
    let connect = |a: &mut Side, b: &mut Side| {
        let from = a.transport.connect(&b.transport.address()).unwrap();
        let to = until(b, a, "accepted", accepted);
        a.transport.send(from, vec![1]);
        until(b, a, "a message", message);
        b.transport.send(to, vec![1]);
        until(a, b, "an answer", message);
        from
    };
    let first = connect(&mut a, &mut b);
    let (before, begin) = (costs(), Instant::now());
    let open: Vec<_> = (0..32).map(|_| connect(&mut a, &mut b)).collect();
    eprintln!("32 connections, both sides here: {before:?} to {:?} in {:?}", costs(), begin.elapsed());
    let begin = Instant::now();
    for _ in 0..1000 {
        a.transport.progress(Instant::now(), &mut a.events);
    }
    eprintln!("a turn over 33 idle connections: {:?}", begin.elapsed() / 1000);
    for conn in open.into_iter().chain([first]) {
        a.transport.close(conn, "done");
        until(&mut a, &mut b, "closed", closed);
        until(&mut b, &mut a, "closed there", closed);
    }
    for round in 0..4 {
        eprintln!("after {} rounds of 50 connections: {:?}", round, costs());
        for _ in 0..50 {
            let conn = connect(&mut a, &mut b);
            a.transport.close(conn, "done");
            until(&mut a, &mut b, "closed", closed);
            until(&mut b, &mut a, "closed there", closed);
        }
    }
}

fn window(range: Range<usize>) -> Window {
    Window::of(std::iter::once(range).collect())
}

const LOOPBACK: std::net::IpAddr = std::net::IpAddr::V4(Ipv4Addr::LOCALHOST);

fn ucx() -> Way {
    Way::plain(TransportChoice::ucx(UcxLanes::LoopbackTcp, LOOPBACK))
}

fn ucx_one_sided() -> Way {
    let (lanes, writes) = (UcxLanes::LoopbackTcp, UcxWrites::OneSided);
    Way::plain(TransportChoice::Ucx { lanes, bind: LOOPBACK, port: 0, devices: None, writes })
}

fn ucx_read() -> Way {
    let (lanes, writes) = (UcxLanes::LoopbackTcp, UcxWrites::Read);
    Way::plain(TransportChoice::Ucx { lanes, bind: LOOPBACK, port: 0, devices: None, writes })
}

fn ucx_shared_memory() -> Way {
    Way::plain(TransportChoice::ucx(UcxLanes::SharedMemory, LOOPBACK))
}

fn ucx_tls() -> Way {
    ucx_shared_memory().with(Authority::new().worker())
}

fn tcp() -> Way {
    Way::plain(TransportChoice::tcp(LOOPBACK))
}

fn tls() -> Way {
    tcp().with(Authority::new().worker())
}

/// Only messages are encrypted.
fn tls_control() -> Way {
    Way { encrypt: false, ..tls() }
}

fn only_what_an_open_window_covers_is_stored(choice: &Way) {
    let (mut a, from, mut b, to) = connected(choice);
    a.region.copy_in(0, &[9; 4096]);
    b.transport.open_window(to, TicketId(5), window(1000..2000));
    b.transport.open_window(to, TicketId(6), window(3000..4000));
    b.transport.close_window(to, TicketId(6));
    let stored = [(5, 1000, 1000), (5, 1999, 1)];
    let refused = [(5, 999, 2), (5, 1999, 2), (5, 3000, 1), (6, 3000, 10), (7, 1000, 1)];
    for (ticket, to_at, len) in stored.into_iter().chain(refused) {
        a.transport.put(from, TicketId(ticket), CopyRun { from: 0, to: to_at, len });
    }
    a.transport.flush(from, 1);
    until(&mut a, &mut b, "flushed", flushed);
    let expected: Vec<u8> = (0..4096).map(|i| if (1000..2000).contains(&i) { 9 } else { 0 }).collect();
    assert!(b.read(0, 4096) == expected);
    assert_eq!(b.events.iter().filter(|e| matches!(e, Event::PutRefused(_))).count(), refused.len());
}

fn a_write_outside_of_the_region_closes_the_connection(choice: &Way) {
    let (mut a, from, mut b, to) = connected(choice);
    b.transport.open_window(to, TicketId(5), window(0..BYTES));
    a.transport.put(from, TicketId(5), CopyRun { from: 0, to: BYTES - 1, len: 2 });
    assert_eq!(until(&mut b, &mut a, "closed", closed), to);
}

/// On transports that store their peers' writes themselves.
#[test]
fn tcp_guards_its_region() {
    for way in [tcp(), tls(), tls_control()] {
        only_what_an_open_window_covers_is_stored(&way);
        a_write_outside_of_the_region_closes_the_connection(&way);
    }
}

#[test]
fn ucx_guards_its_region_where_writes_are_messages_or_reads() {
    for way in [ucx(), ucx_shared_memory(), ucx_tls(), ucx_read()] {
        only_what_an_open_window_covers_is_stored(&way);
        a_write_outside_of_the_region_closes_the_connection(&way);
    }
}

#[test]
fn an_address_of_the_other_transport_is_refused() {
    let (mut tcp, mut ucx) = (Side::start(&tcp()), Side::start(&ucx()));
    assert!(tcp.transport.connect(&ucx.transport.address()).unwrap_err().contains("speaks ucx"));
    assert!(ucx.transport.connect(&tcp.transport.address()).unwrap_err().contains("speaks tcp"));
}
