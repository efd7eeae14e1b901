//! Sources whose pools are not host memory: what is read ahead of a peer that takes nothing, and what passes a slow read.

use super::*;
use crate::transport::pool::STAGED_BYTES_MAX;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory that counts the bytes for which reads were begun.
#[derive(Debug)]
struct CountsReads(AtomicUsize, Arc<RemotePool>);

impl PoolMemory for CountsReads {
    fn kind(&self) -> MemoryKind {
        self.1.kind()
    }
    fn bytes(&self) -> usize {
        self.1.bytes()
    }
    fn read(&self, from: Rows, into: Vec<u8>) -> Pending<Vec<u8>> {
        self.0.fetch_add(from.len(), Ordering::SeqCst);
        self.1.read(from, into)
    }
    fn write(&self, to: Rows, data: Vec<u8>) -> Pending<Vec<u8>> {
        self.1.write(to, data)
    }
    fn copy(&self, from: Rows, to: Rows) -> Pending<()> {
        self.1.copy(from, to)
    }
    fn checksum(&self, rows: Vec<Rows>) -> Pending<Vec<u64>> {
        self.1.checksum(rows)
    }
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Bytes of writes that no longer need their buffers.
fn done(side: &Side) -> usize {
    side.events.iter().map(|event| if let Event::PutDone(_, bytes) = event { *bytes } else { 0 }).sum()
}

#[test]
fn what_is_read_and_not_sent_is_bounded_on_each_connection() {
    /// More than sockets and shared memory hold.
    const PUTS: usize = 32;
    for way in ways() {
        let remote = RemotePool::new(BYTES, RemoteConfig::default()).unwrap();
        let memory = Arc::new(CountsReads(AtomicUsize::new(0), remote.clone()));
        let source = Side::over(&way, memory.clone(), remote.device_side().clone());
        let Slow { a, from, b, .. } = Slow::between(source, Side::start(&way), remote.clone());
        let (mut a, other, mut c, to) = connect(a, Side::start(&way), |address| address);
        c.transport.open_window(to, TICKET, window(0..BYTES));
        remote.release();
        for conn in [from, other] {
            (0..PUTS).for_each(|_| a.transport.put(conn, TICKET, CopyRun { from: 0, to: 0, len: BYTES }));
            a.transport.flush(conn, 7);
        }
        // Its peers take nothing.
        let (mut most, end) = (0, Instant::now() + Duration::from_millis(400));
        while Instant::now() < end {
            advance(&mut a);
            most = most.max(memory.0.load(Ordering::SeqCst) - done(&a));
        }
        assert!(done(&a) < 2 * PUTS * BYTES, "they did: {:?}", way.choice);
        assert!(most <= 2 * STAGED_BYTES_MAX, "{most} bytes in buffers: {:?}", way.choice);
        let (mut b, by) = (b, Instant::now() + PATIENCE);
        while a.events.iter().filter(|event| flushed(event).is_some()).count() < 2 {
            assert!(Instant::now() < by, "never flushed: {:?}", way.choice);
            [&mut a, &mut b, &mut c].into_iter().for_each(advance);
        }
        assert_eq!((done(&a), memory.0.load(Ordering::SeqCst)), (2 * PUTS * BYTES, 2 * PUTS * BYTES));
        assert!([&b, &c].into_iter().all(|side| side.read(0, BYTES) == [9; BYTES]), "{:?}", way.choice);
    }
}
