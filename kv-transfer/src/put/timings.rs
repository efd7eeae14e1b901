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
    /// Since when they are in flight, and the latest epoch among them.
    moving_since: Option<(Instant, u32)>,
}

impl Timings {
    /// A write for `epoch` was posted.
    pub(super) fn put(&mut self, epoch: u32, bytes: usize, now: Instant) {
        self.bytes += bytes as u64;
        self.puts += 1;
        self.first_put_at.get_or_insert(now);
        self.moving_since = Some((self.moving_since.map_or(now, |(since, _)| since), epoch));
    }

    /// A flush of `epoch` completed; it covers the writes of `epoch` and earlier ones.
    pub(super) fn flushed(&mut self, epoch: u32, now: Instant) {
        self.flushed_at = Some(now);
        if let Some((since, latest)) = self.moving_since
            && latest <= epoch
        {
            self.moving += now.saturating_duration_since(since);
            self.moving_since = None;
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
        timings.flushed(0, at(5));
        timings.put(1, 10, at(20));
        timings.put(2, 10, at(21));
        timings.flushed(1, at(22));
        timings.flushed(2, at(24));
        assert_eq!((timings.bytes, timings.puts, timings.moving), (40, 4, Duration::from_millis(9)));
    }
}
