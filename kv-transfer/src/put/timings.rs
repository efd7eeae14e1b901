//! Collects the instants and durations of a put for its [`crate::PutReport`].

use std::time::{Duration, Instant};

#[derive(Default)]
pub(super) struct Timings {
    pub(super) bytes: u64,
    pub(super) puts: u64,
    pub(super) granted_at: Option<Instant>,
    pub(super) first_put_at: Option<Instant>,
    pub(super) flushed_at: Option<Instant>,
    /// How long writes of this handoff, or their flush, have been in flight.
    pub(super) moving: Duration,
    /// Since when they are in flight.
    moving_since: Option<Instant>,
    /// The latest epoch of a write.
    latest: u32,
}

impl Timings {
    /// A write for `epoch` was posted.
    pub(super) fn put(&mut self, epoch: u32, bytes: usize, now: Instant) {
        self.latest = epoch;
        self.bytes += bytes as u64;
        self.puts += 1;
        self.first_put_at.get_or_insert(now);
        self.moving_since.get_or_insert(now);
    }

    /// A flush of its writes was posted.
    pub(super) fn flushing(&mut self, now: Instant) {
        self.moving_since.get_or_insert(now);
    }

    /// A flush of `epoch` completed; it covers the writes of `epoch` and earlier ones.
    pub(super) fn flushed(&mut self, epoch: u32, now: Instant) {
        self.flushed_at = Some(now);
        if self.latest <= epoch {
            self.idle(now);
        }
    }

    /// No write or flush of its connection is in flight.
    pub(super) fn idle(&mut self, now: Instant) {
        if let Some(since) = self.moving_since.take() {
            self.moving += now.saturating_duration_since(since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_with_writes_under_way_counts() {
        let (mut timings, start) = (Timings::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        timings.put(0, 10, at(0));
        timings.put(0, 10, at(2));
        timings.idle(at(3));
        // The next layer's computation takes long; its write, and the flush of both, do not.
        timings.put(0, 10, at(20));
        timings.idle(at(21));
        timings.flushing(at(30));
        timings.flushed(0, at(32));
        // Others keep the connection busy: a flush of an earlier epoch does not end what is under way.
        timings.put(1, 10, at(50));
        timings.flushing(at(51));
        timings.put(2, 10, at(52));
        timings.flushed(1, at(53));
        timings.flushed(2, at(55));
        timings.idle(at(90));
        assert_eq!((timings.bytes, timings.puts, timings.moving), (50, 5, Duration::from_millis(11)));
        assert_eq!((timings.first_put_at, timings.flushed_at), (Some(at(0)), Some(at(55))));
    }
}
