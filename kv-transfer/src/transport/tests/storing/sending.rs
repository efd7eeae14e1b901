//! Sources whose pools are not host memory: what is read ahead of a peer that takes nothing, and what passes a slow read.

use super::*;
use crate::pool_turns::OPERATION_MAX;
use crate::transport::pool::STAGED_BYTES_MAX;
use std::sync::atomic::Ordering;

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
        let memory = Observed::new(&remote, None);
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
            most = most.max(memory.bytes_read.load(Ordering::SeqCst) - done(&a));
        }
        assert!(done(&a) < 2 * PUTS * BYTES, "they did: {:?}", way.choice);
        assert!(most <= 2 * STAGED_BYTES_MAX, "{most} bytes in buffers: {:?}", way.choice);
        let (mut b, by) = (b, Instant::now() + PATIENCE);
        while a.events.iter().filter(|event| flushed(event).is_some()).count() < 2 {
            assert!(Instant::now() < by, "never flushed: {:?}", way.choice);
            [&mut a, &mut b, &mut c].into_iter().for_each(advance);
        }
        assert_eq!((done(&a), memory.bytes_read.load(Ordering::SeqCst)), (2 * PUTS * BYTES, 2 * PUTS * BYTES));
        assert!([&b, &c].into_iter().all(|side| side.read(0, BYTES) == [9; BYTES]), "{:?}", way.choice);
    }
}

#[test]
fn messages_pass_a_slow_read() {
    for way in ways() {
        let mut slow = Slow::source(&way, 64);
        slow.put(TICKET, 64, 64);
        slow.a.transport.flush(slow.from, 7);
        slow.until_running(1);
        slow.a.transport.send(slow.from, b"meanwhile".to_vec());
        assert_eq!(until(&mut slow.b, &mut slow.a, "a message", message), b"meanwhile", "{:?}", way.choice);
        slow.pass(20);
        assert!(slow.memory.running() == 1 && !slow.has_flushed());
        slow.memory.release();
        assert_eq!(until(&mut slow.a, &mut slow.b, "flushed", flushed), 7);
        assert_eq!(slow.b.read(64, 64), [9; 64]);
    }
}

#[test]
fn answers_to_flushes_pass_a_slow_read() {
    for way in ways() {
        let mut slow = Slow::source(&way, 64);
        slow.put(TICKET, 64, 64);
        slow.until_running(1);
        slow.b.transport.flush(slow.to, 8);
        assert_eq!(until(&mut slow.b, &mut slow.a, "flushed", flushed), 8, "{:?}", way.choice);
        assert_eq!(slow.memory.running(), 1);
    }
}

/// A read that takes longer than the longest silence of a peer, and less than the longest life of a read.
#[test]
fn a_slow_read_is_no_silence() {
    for way in ways() {
        let mut slow = Slow::source(&way, 64);
        slow.put(TICKET, 64, 64);
        slow.a.transport.flush(slow.from, 7);
        slow.until_running(1);
        let begin = Instant::now();
        for step in 0..(OPERATION_MAX.as_millis() as u64 * 3 / 4 / 250) {
            let now = begin + Duration::from_millis(step * 250);
            // What one side sends, the other one receives in the same step.
            for _ in 0..3 {
                slow.a.transport.progress(now, &mut slow.a.events);
                slow.b.transport.progress(now, &mut slow.b.events);
                std::thread::yield_now();
            }
        }
        assert!(!slow.is_closed(), "{:?}", way.choice);
        slow.memory.release();
        let (last, by) = (begin + OPERATION_MAX * 3 / 4, Instant::now() + PATIENCE);
        while !slow.has_flushed() {
            assert!(Instant::now() < by, "never flushed");
            slow.a.transport.progress(last, &mut slow.a.events);
            slow.b.transport.progress(last, &mut slow.b.events);
        }
        assert_eq!(slow.b.read(64, 64), [9; 64]);
    }
}

#[test]
fn a_connection_that_the_peer_has_closed_is_not_open_while_the_device_works_for_it() {
    for way in ways() {
        for is_sink in [true, false] {
            let mut slow = if is_sink { Slow::sink(&way, 64) } else { Slow::source(&way, 64) };
            slow.put(TICKET, 64, 64);
            slow.until_running(1);
            let Slow { mut a, from, mut b, to, memory } = slow;
            let (mine, conn, peer, other) =
                if is_sink { (&mut b, to, &mut a, from) } else { (&mut a, from, &mut b, to) };
            assert!(mine.transport.is_open(conn));
            peer.transport.close(other, "the test");
            let by = Instant::now() + PATIENCE;
            while mine.transport.is_open(conn) {
                assert!(Instant::now() < by, "open forever: {:?}", way.choice);
                [&mut *mine, &mut *peer].into_iter().for_each(advance);
            }
            assert!(mine.events.iter().all(|event| closed(event).is_none()), "{:?}", way.choice);
            // A new one works meanwhile.
            let again = mine.transport.connect(&peer.transport.address()).unwrap();
            mine.transport.send(again, b"again".to_vec());
            assert_eq!(until(peer, mine, "a message", message), b"again");
            assert!(mine.transport.is_open(again));
            memory.release();
            assert_eq!(until(mine, peer, "closed", closed), conn);
        }
    }
}

#[test]
fn a_connection_whose_peer_has_gone_is_not_open_while_what_it_sent_waits_for_room() {
    for way in ways() {
        let mut slow = Slow::sink(&way, 64 << 10);
        // More than there is room for, and less than sockets hold: behind that comes the end.
        (0..600).for_each(|to| slow.put(TICKET, to, 1));
        slow.until("its device works on many", |slow| slow.memory.running() > 200);
        assert!(slow.b.transport.is_open(slow.to));
        slow.a.transport.close(slow.from, "the test");
        // No time passes: no keep-alive finds it.
        let (now, by) = (Instant::now(), Instant::now() + PATIENCE);
        while slow.b.transport.is_open(slow.to) {
            assert!(Instant::now() < by, "open forever: {:?}", way.choice);
            slow.a.transport.progress(now, &mut slow.a.events);
            slow.b.transport.progress(now, &mut slow.b.events);
        }
        assert!(slow.b.events.iter().all(|event| closed(event).is_none()), "{:?}", way.choice);
    }
}
