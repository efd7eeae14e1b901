//! Pools that are not host memory: what counts as stored, and what a slow device, a device that fails and a peer without manners do to it.

use super::*;
use baton_memory::{RemoteConfig, RemotePool};

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
    /// The sink's device has room for so many operations; one more fails.
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
        let by = Instant::now() + PATIENCE;
        while slow.refused() == 0 {
            assert!(Instant::now() < by, "never refused");
            slow.pass(1);
        }
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
        let mut slow = Slow::sink(&way, 1);
        slow.put(TICKET, 64, 64);
        slow.put(TICKET, 256, 64);
        slow.a.transport.flush(slow.from, 7);
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
fn room_that_becomes_free_is_progress() {
    for way in ways() {
        let mut slow = Slow::sink(&way, 64 << 10);
        // More than there is room for, and than sockets hold.
        (0..20).for_each(|_| slow.put(TICKET, 0, BYTES));
        slow.pass(200);
        let progress = |side: &mut Side| side.transport.progress(Instant::now(), &mut side.events);
        assert!(!progress(&mut slow.b), "there is no room");
        slow.memory.release();
        std::thread::sleep(Duration::from_millis(100));
        slow.memory.hold();
        assert!(progress(&mut slow.b), "{:?}", way.choice);
    }
}
