//! Counts of the last 24 hours: a ring of buckets. Pure.

use std::time::{Duration, Instant};

/// How long a count stays, less at most one bucket.
const WINDOW: Duration = Duration::from_secs(24 * 3600);
/// A quarter of an hour each.
const BUCKETS: u64 = 96;

/// Prompt tokens, and how many of them were cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    prompt: u64,
    cached: u64,
}

/// The hits of the last 24 hours.
#[derive(Clone, Debug)]
pub(super) struct HitWindow {
    start: Instant,
    /// Number of the newest bucket, counted from the start.
    last: u64,
    buckets: Box<[Counts; BUCKETS as usize]>,
}

impl HitWindow {
    /// An empty window. No time passed later may be before `start`; an earlier one counts as the latest known.
    pub(super) fn new(start: Instant) -> Self {
        Self { start, last: 0, buckets: Box::new([Counts::default(); BUCKETS as usize]) }
    }

    pub(super) fn add(&mut self, prompt: u64, cached: u64, now: Instant) {
        self.turn(now);
        let bucket = &mut self.buckets[(self.last % BUCKETS) as usize];
        bucket.prompt += prompt;
        bucket.cached += cached;
    }

    /// The cached share of all prompt tokens, 0 to 1; `None` if there were none.
    pub(super) fn ratio(&mut self, now: Instant) -> Option<f64> {
        self.turn(now);
        let (prompt, cached) = self.buckets.iter().fold((0, 0), |(p, c), of| (p + of.prompt, c + of.cached));
        (prompt > 0).then(|| cached as f64 / prompt as f64)
    }

    /// Empties the buckets that have left the window.
    fn turn(&mut self, now: Instant) {
        let every = WINDOW.as_secs() / BUCKETS;
        let current = (now.saturating_duration_since(self.start).as_secs() / every).max(self.last);
        for number in (self.last + 1..=current).take(BUCKETS as usize) {
            self.buckets[(number % BUCKETS) as usize] = Counts::default();
        }
        self.last = current;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_day_old_counts_no_more() {
        let start = Instant::now();
        let at = |minutes: u64| start + Duration::from_secs(60 * minutes);
        let day = 24 * 60;
        let mut window = HitWindow::new(start);
        assert_eq!(window.ratio(at(0)), None);
        window.add(100, 0, at(1));
        window.add(100, 50, at(20));
        assert_eq!(window.ratio(at(20)), Some(0.25));
        assert_eq!(window.ratio(at(day - 1)), Some(0.25), "not a day old");
        assert_eq!(window.ratio(at(day)), Some(0.5), "the first quarter of an hour is over");
        window.add(300, 50, at(day));
        assert_eq!(window.ratio(at(day + 14)), Some(0.25));
        assert_eq!(window.ratio(at(day + 15)), Some(50.0 / 300.0));
        assert_eq!(window.ratio(at(2 * day)), None, "quiet for a day");
        window.add(10, 10, at(20 * day));
        assert_eq!(window.ratio(at(20 * day)), Some(1.0), "whatever many days were quiet");
        // Threads may read the clock in one order and call this in another.
        window.add(10, 0, at(19 * day));
        assert_eq!(window.ratio(at(20 * day)), Some(0.5));
    }
}
