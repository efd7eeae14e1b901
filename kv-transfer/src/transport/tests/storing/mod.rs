//! Pools that are not host memory: what counts as stored, and what a slow device, a device that fails and a peer without manners do to it.

use super::*;
use baton_memory::{MemoryError, NoRoom, Pending, RemoteConfig, RemotePool, Rows};
use baton_types::MemoryKind;
use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

mod sending;

const TICKET: TicketId = TicketId(5);

/// A side that writes, and a side whose device holds what it is given until `memory.release`.
struct Slow {
    a: Side,
    from: ConnId,
    b: Side,
    to: ConnId,
    memory: Arc<RemotePool>,
}

impl Slow {
    /// The sink's device has room for so many operations.
    fn sink(way: &Way, operations_max: usize) -> Self {
        let memory = RemotePool::new(BYTES, RemoteConfig { operations_max, ..RemoteConfig::default() }).unwrap();
        let sink = Side::over(way, memory.clone(), memory.device_side().clone());
        Self::between(Side::start(way), sink, memory)
    }

    /// The same of the source's.
    fn source(way: &Way, operations_max: usize) -> Self {
        let memory = RemotePool::new(BYTES, RemoteConfig { operations_max, ..RemoteConfig::default() }).unwrap();
        let source = Side::over(way, memory.clone(), memory.device_side().clone());
        Self::between(source, Side::start(way), memory)
    }

    fn between(a: Side, b: Side, memory: Arc<RemotePool>) -> Self {
        let (a, from, mut b, to) = connect(a, b, |address| address);
        memory.hold();
        b.transport.open_window(to, TICKET, window(0..BYTES));
        a.region.copy_in(0, &[9; BYTES]);
        Self { a, from, b, to, memory }
    }

    fn put(&mut self, ticket: TicketId, to: usize, len: usize) {
        self.a.transport.put(self.from, ticket, CopyRun { from: 0, to, len });
    }

    /// Both sides progress for a while.
    fn pass(&mut self, ms: u64) {
        let by = Instant::now() + Duration::from_millis(ms);
        while Instant::now() < by {
            let now = Instant::now();
            self.a.transport.progress(now, &mut self.a.events);
            self.b.transport.progress(now, &mut self.b.events);
        }
    }

    /// Both sides progress until that.
    fn until(&mut self, what: &str, done: impl Fn(&mut Self) -> bool) {
        let by = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < by, "never: {what}");
            self.pass(1);
        }
    }

    /// Both sides progress until the device works on so many operations.
    fn until_running(&mut self, operations: usize) {
        self.until("the device works", |slow| slow.memory.running() == operations);
    }

    fn has_flushed(&self) -> bool {
        self.a.events.iter().any(|event| flushed(event).is_some())
    }

    fn refused(&self) -> usize {
        self.b.events.iter().filter(|event| matches!(event, Event::PutRefused(_))).count()
    }

    fn is_closed(&self) -> bool {
        self.a.events.iter().chain(&self.b.events).any(|event| closed(event).is_some())
    }
}

/// A device's memory that counts the bytes for which reads were begun, and may fail to store at one place.
#[derive(Debug)]
struct Observed {
    memory: Arc<RemotePool>,
    bytes_read: AtomicUsize,
    fails_at: Option<usize>,
}

impl Observed {
    fn new(memory: &Arc<RemotePool>, fails_at: Option<usize>) -> Arc<Self> {
        Arc::new(Self { memory: memory.clone(), bytes_read: AtomicUsize::new(0), fails_at })
    }
}

impl PoolMemory for Observed {
    fn kind(&self) -> MemoryKind {
        self.memory.kind()
    }
    fn bytes(&self) -> usize {
        self.memory.bytes()
    }
    fn try_read(&self, from: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        self.bytes_read.fetch_add(from.len(), Ordering::SeqCst);
        self.memory.try_read(from, into)
    }
    fn try_write(&self, to: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
        match self.fails_at == Some(to.start) {
            true => Ok(Pending::ended(Err(MemoryError::Failed("the test".into())))),
            false => self.memory.try_write(to, data),
        }
    }
    fn copy(&self, from: Rows, to: Rows) -> Pending<()> {
        self.memory.copy(from, to)
    }
    fn try_checksum(&self, rows: Vec<Rows>) -> Result<Pending<Vec<u64>>, NoRoom<Vec<Rows>>> {
        self.memory.try_checksum(rows)
    }
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

fn advance(side: &mut Side) {
    side.transport.progress(Instant::now(), &mut side.events);
}

fn ways() -> [Way; 6] {
    [tcp(), tls(), tls_control(), ucx(), ucx_shared_memory(), ucx_tls()]
}

#[test]
fn a_refused_write_does_not_count_for_one_that_is_being_stored() {
    for way in ways() {
        let mut slow = Slow::sink(&way, 64);
        slow.put(TICKET, 64, 64);
        slow.a.transport.flush(slow.from, 7);
        slow.put(TicketId(6), 64, 64);
        slow.until("it is refused", |slow| slow.refused() == 1);
        slow.pass(20);
        assert!(!slow.has_flushed(), "{:?}", way.choice);
        slow.memory.release();
        assert_eq!(until(&mut slow.a, &mut slow.b, "flushed", flushed), 7);
        assert_eq!(slow.b.read(64, 64), [9; 64]);
    }
}

#[test]
fn no_flush_is_answered_after_a_write_that_the_device_did_not_store() {
    for way in ways() {
        let memory = RemotePool::new(BYTES, RemoteConfig::default()).unwrap();
        let sink = Side::over(&way, Observed::new(&memory, Some(256)), memory.device_side().clone());
        let mut slow = Slow::between(Side::start(&way), sink, memory);
        slow.put(TICKET, 64, 64);
        slow.put(TICKET, 256, 64);
        slow.put(TicketId(6), 64, 64);
        slow.a.transport.flush(slow.from, 7);
        slow.until("the last write is refused", |slow| slow.refused() == 1);
        slow.pass(20);
        slow.memory.release();
        until(&mut slow.a, &mut slow.b, "closed", closed);
        assert!(!slow.has_flushed(), "{:?}", way.choice);
    }
}

/// Far more writes than the device has room for, all of a byte, and far fewer bytes than the bound.
#[test]
fn many_small_writes_wait_for_their_turn() {
    const WRITES: usize = 30_000;
    for way in ways() {
        // Room for what one record of TLS, or one round of UCX, brings beyond the bound.
        for mut slow in [Slow::sink(&way, 8 << 10), Slow::source(&way, 300)] {
            (0..WRITES).for_each(|at| slow.put(TICKET, at, 1));
            slow.a.transport.flush(slow.from, 7);
            slow.pass(200);
            // Nothing that waits holds back what goes the other way.
            slow.b.transport.send(slow.to, b"meanwhile".to_vec());
            assert_eq!(until(&mut slow.a, &mut slow.b, "a message", message), b"meanwhile");
            assert!(!slow.is_closed() && !slow.has_flushed(), "{:?}", way.choice);
            slow.memory.release();
            assert_eq!(until(&mut slow.a, &mut slow.b, "flushed", flushed), 7);
            assert!(slow.b.read(0, WRITES) == [9; WRITES], "{:?}", way.choice);
            assert!(!slow.is_closed(), "{:?}", way.choice);
        }
    }
}

#[test]
fn a_window_is_closed_once_its_last_write_is_stored() {
    let window_closed = |event: &Event| if let Event::WindowClosed(_, ticket) = event { Some(*ticket) } else { None };
    for way in ways() {
        let mut slow = Slow::sink(&way, 64);
        slow.b.transport.close_window(slow.to, TicketId(6));
        assert_eq!(until(&mut slow.b, &mut slow.a, "closed a window that was never open", window_closed), TicketId(6));
        slow.put(TICKET, 64, 64);
        slow.until_running(1);
        // Each call has its answer.
        (0..2).for_each(|_| slow.b.transport.close_window(slow.to, TICKET));
        slow.put(TICKET, 256, 64);
        slow.until("the next write is refused", |slow| slow.refused() == 1);
        assert!(slow.b.events.iter().all(|event| window_closed(event).is_none()), "{:?}", way.choice);
        slow.memory.release();
        for _ in 0..2 {
            assert_eq!(until(&mut slow.b, &mut slow.a, "closed a window", window_closed), TICKET);
            assert_eq!((slow.b.read(64, 64), slow.b.read(256, 64)), (vec![9; 64], vec![0; 64]));
        }
    }
}

/// Lets both sides progress as if this much time had passed, until `take` finds its event on the side that `of` names.
fn late<T>(slow: &mut Slow, of: fn(&mut Slow) -> &mut Side, ms: u64, take: impl Fn(&Event) -> Option<T>) -> T {
    let by = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = of(slow).events.iter().find_map(&take) {
            return found;
        }
        assert!(Instant::now() < by, "never");
        slow.pass(5);
        let side = of(slow);
        side.transport.progress(Instant::now() + Duration::from_millis(ms), &mut side.events);
    }
}

#[test]
fn a_connection_that_closes_while_writes_are_stored_is_fenced_after_the_last_one() {
    let end = |event: &Event| match event {
        Event::Closed { fenced, draining, .. } => Some((*fenced, *draining)),
        _ => None,
    };
    let drained = |event: &Event| if let Event::Drained { fenced, .. } = event { Some(*fenced) } else { None };
    for way in ways() {
        for is_sink in [true, false] {
            let of: fn(&mut Slow) -> &mut Side = if is_sink { |slow| &mut slow.b } else { |slow| &mut slow.a };
            let mut slow = if is_sink { Slow::sink(&way, 64) } else { Slow::source(&way, 64) };
            slow.put(TICKET, 64, 64);
            slow.until_running(1);
            let conn = if is_sink { slow.to } else { slow.from };
            of(&mut slow).transport.close(conn, "the test");
            slow.pass(50);
            assert!(of(&mut slow).events.iter().all(|event| end(event).is_none()), "{:?}", way.choice);
            assert_eq!(late(&mut slow, of, 6_000, end), (false, true), "{:?}", way.choice);
            slow.pass(50);
            assert!(of(&mut slow).events.iter().all(|event| drained(event).is_none()), "{:?}", way.choice);
            slow.memory.release();
            assert!(late(&mut slow, of, 0, drained), "{:?}", way.choice);
            if is_sink {
                assert_eq!(slow.b.read(64, 64), [9; 64]);
            }
        }
    }
}

#[test]
fn a_transport_that_shuts_down_waits_for_its_last_operations() {
    for way in ways() {
        for released in [true, false] {
            let mut slow = Slow::sink(&way, 64);
            slow.put(TICKET, 64, 64);
            slow.until_running(1);
            if released {
                slow.memory.release();
            }
            let (mut events, wait) = (Vec::new(), if released { PATIENCE } else { Duration::from_millis(300) });
            slow.b.transport.shutdown(Instant::now() + wait, &mut events);
            let fenced = events.iter().find_map(|event| match event {
                Event::Closed { fenced, draining, .. } if fenced != draining => Some(*fenced),
                _ => None,
            });
            assert_eq!(fenced, Some(released), "{:?}", way.choice);
        }
    }
}

#[test]
fn room_that_becomes_free_is_progress() {
    for way in ways() {
        let mut slow = Slow::sink(&way, 64 << 10);
        // More than there is room for, and than sockets hold.
        (0..20).for_each(|_| slow.put(TICKET, 0, BYTES));
        let progress = |side: &mut Side| side.transport.progress(Instant::now(), &mut side.events);
        slow.until("there is no room", |slow| (0..20).all(|_| !progress(&mut slow.b)) && slow.memory.running() > 0);
        assert!(slow.memory.end_all(Instant::now() + PATIENCE), "never stored");
        assert!(progress(&mut slow.b), "{:?}", way.choice);
    }
}

#[test]
fn a_device_that_peers_fill_together_makes_them_wait() {
    for way in ways() {
        let Slow { mut a, from, b, to: _, memory } = Slow::sink(&way, 300);
        let (mut c, from_c, mut b, to_c) = connect(Side::start(&way), b, |address| address);
        b.transport.open_window(to_c, TICKET, window(0..BYTES));
        c.region.copy_in(0, &[7; 64]);
        let fill = |writer: &mut Side, conn, at: usize, writes: usize, b: &mut Side, running: usize| {
            (at..at + writes).for_each(|to| writer.transport.put(conn, TICKET, CopyRun { from: 0, to, len: 1 }));
            writer.transport.flush(conn, 7);
            let by = Instant::now() + PATIENCE;
            while memory.running() < running {
                assert!(Instant::now() < by, "{} operations run", memory.running());
                writer.transport.progress(Instant::now(), &mut writer.events);
                b.transport.progress(Instant::now(), &mut b.events);
            }
        };
        fill(&mut a, from, 0, 256, &mut b, 256);
        fill(&mut c, from_c, 256, 64, &mut b, 300);
        for _ in 0..200 {
            for side in [&mut a, &mut b, &mut c] {
                side.transport.progress(Instant::now(), &mut side.events);
            }
        }
        let of_interest = |event: &&Event| closed(event).is_some() || flushed(event).is_some();
        let events = a.events.iter().chain(&b.events).chain(&c.events);
        assert_eq!(events.filter(of_interest).count(), 0, "{:?}", way.choice);
        memory.release();
        assert_eq!(until(&mut a, &mut b, "flushed", flushed), 7);
        assert_eq!(until(&mut c, &mut b, "flushed", flushed), 7);
        assert!(b.read(0, 320) == [[9; 256].as_slice(), &[7; 64]].concat(), "{:?}", way.choice);
    }
}

/// Two peers that write without end fill a device that ends operations together. A third one has its turn all the same.
#[test]
fn no_peer_waits_until_others_need_no_room() {
    for way in ways() {
        let Slow { mut a, from, b, memory, .. } = Slow::sink(&way, 4);
        let (mut c, from_c, b, to_c) = connect(Side::start(&way), b, |address| address);
        let (mut d, from_d, mut b, to_d) = connect(Side::start(&way), b, |address| address);
        [to_c, to_d].into_iter().for_each(|conn| b.transport.open_window(conn, TICKET, window(0..BYTES)));
        let write = |side: &mut Side, conn, writes| {
            (0..writes).for_each(|to| side.transport.put(conn, TICKET, CopyRun { from: 0, to, len: 1 }));
            side.transport.flush(conn, 7);
        };
        let has_flushed = |side: &Side| side.events.iter().any(|event| flushed(event).is_some());
        write(&mut a, from, 4_000);
        write(&mut c, from_c, 4_000);
        (0..100).for_each(|_| [&mut a, &mut b, &mut c].into_iter().for_each(advance));
        write(&mut d, from_d, 1);
        let by = Instant::now() + PATIENCE;
        while !has_flushed(&d) {
            assert!(Instant::now() < by && !has_flushed(&a) && !has_flushed(&c), "it waits: {:?}", way.choice);
            assert!(memory.end_all(by), "never stored");
            [&mut a, &mut b, &mut c, &mut d].into_iter().for_each(advance);
        }
    }
}

/// The same of reads: the other connection's take all the room.
#[test]
fn a_device_that_is_full_makes_reads_wait() {
    for way in ways() {
        let mut slow = Slow::source(&way, 300);
        let mut others: Vec<_> = (0..300).map(|at| slow.memory.read(Rows::run(at, 1), Vec::new())).collect();
        (0..64).for_each(|at| slow.put(TICKET, at, 1));
        slow.a.transport.flush(slow.from, 7);
        slow.pass(20);
        assert!(!slow.is_closed() && !slow.has_flushed(), "{:?}", way.choice);
        slow.memory.release();
        assert_eq!(until(&mut slow.a, &mut slow.b, "flushed", flushed), 7);
        assert_eq!(slow.b.read(0, 64), [9; 64]);
        assert!(others.iter_mut().all(|read| read.poll_now().is_some()));
    }
}

/// A peer on a thread of its own. After each number that it is sent, it waits a while and writes so many times without a window.
struct Elsewhere {
    writes: mpsc::Sender<usize>,
    _peer: std::thread::JoinHandle<()>,
}

impl Elsewhere {
    fn connect(way: &Way, to: &mut Side) -> Self {
        let (writes, asked) = mpsc::channel();
        let (way, address, region) = (way.clone(), to.transport.address(), to.transport.region());
        let peer = std::thread::spawn(move || {
            let mut side = Side::start(&way);
            let conn = side.transport.connect(&address).unwrap();
            side.transport.send(conn, vec![1]);
            let mut is_greeted = false;
            loop {
                side.transport.progress(Instant::now(), &mut side.events);
                if !is_greeted && side.events.iter().any(|event| message(event).is_some()) {
                    side.transport.greeted(conn, &region, MESSAGE_BYTES_MAX).unwrap();
                    is_greeted = true;
                }
                match asked.try_recv() {
                    Ok(writes) => {
                        std::thread::sleep(Duration::from_millis(100));
                        let run = CopyRun { from: 0, to: 0, len: 64 };
                        (0..writes).for_each(|_| side.transport.put(conn, TicketId(6), run));
                    }
                    Err(mpsc::TryRecvError::Empty) => std::thread::yield_now(),
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
        });
        let by = Instant::now() + PATIENCE;
        let conn = loop {
            assert!(Instant::now() < by, "never said anything");
            advance(to);
            if let Some(conn) =
                to.events.iter().find_map(|e| if let Event::Message(conn, _) = e { Some(*conn) } else { None })
            {
                break conn;
            }
        };
        to.transport.send(conn, vec![2]);
        to.transport
            .greeted(conn, &RemoteRegion { bytes: BYTES as u64, ..RemoteRegion::default() }, MESSAGE_BYTES_MAX)
            .unwrap();
        to.events.clear();
        Self { writes, _peer: peer }
    }
}

/// The lanes of a connection without room end no sleep; those of others do, and so does the device.
#[test]
fn ucx_sleeps_until_something_happens_while_a_connection_has_no_room() {
    for way in [ucx(), ucx_shared_memory(), ucx_tls()] {
        let mut slow = Slow::sink(&way, 64 << 10);
        slow.b.events.clear();
        let other = Elsewhere::connect(&way, &mut slow.b);
        (0..30_000).for_each(|at| slow.put(TICKET, at, 1));
        slow.pass(300);
        let (mut turns, by) = (0, Instant::now() + Duration::from_millis(300));
        while Instant::now() < by {
            advance(&mut slow.b);
            slow.b.transport.sleep(Duration::from_millis(100));
            turns += 1;
        }
        assert!(turns <= 30, "{turns} turns in 300 ms: {:?}", way.choice);
        assert!(!slow.is_closed() && slow.memory.running() > 0);
        let soon = Instant::now() + PATIENCE / 2;
        let running = slow.memory.running();
        other.writes.send(1).unwrap();
        while slow.refused() == 0 {
            slow.b.transport.sleep(PATIENCE);
            advance(&mut slow.b);
            assert!(Instant::now() < soon, "deaf to others: {:?}", way.choice);
        }
        assert_eq!(slow.memory.running(), running, "it still has no room");
        let memory = slow.memory.clone();
        let device = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            memory.release();
        });
        while !slow.b.transport.progress(Instant::now(), &mut slow.b.events) {
            slow.b.transport.sleep(PATIENCE);
            assert!(Instant::now() < soon, "deaf to the device: {:?}", way.choice);
        }
        device.join().unwrap();
        drop(other);
        slow.a.transport.flush(slow.from, 7);
        assert_eq!(until(&mut slow.a, &mut slow.b, "flushed", flushed), 7);
        assert!(slow.b.read(0, 30_000) == [9; 30_000]);
    }
}
