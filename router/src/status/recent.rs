//! Recent times to the first token, for percentiles that people read. The histograms of `/metrics` are cumulative.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a time counts.
const WINDOW: Duration = Duration::from_secs(60);
/// Most times that count; the newest ones.
const TIMES_MAX: usize = 1024;

/// The times of the last minute.
#[derive(Debug, Default)]
pub(crate) struct RecentTimes(Mutex<VecDeque<(Instant, Duration)>>);

/// Percentiles of these times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Percentiles {
    pub(crate) count: usize,
    /// Half of them are at most this.
    pub(crate) p50: Duration,
    /// 95 of 100 are at most this.
    pub(crate) p95: Duration,
}

impl RecentTimes {
    pub(crate) fn add(&self, time: Duration, now: Instant) {
        let mut times = self.0.lock();
        if times.len() == TIMES_MAX {
            times.pop_front();
        }
        times.push_back((now, time));
    }

    /// Their percentiles; `None` without any time.
    pub(crate) fn percentiles(&self, now: Instant) -> Option<Percentiles> {
        let mut times = self.0.lock();
        while times.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > WINDOW) {
            times.pop_front();
        }
        let mut sorted: Vec<Duration> = times.iter().map(|(_, time)| *time).collect();
        drop(times);
        sorted.sort_unstable();
        let at = |percent: usize| sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied();
        Some(Percentiles { count: sorted.len(), p50: at(50)?, p95: at(95)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_last_minute() {
        let (recent, start) = (RecentTimes::default(), Instant::now());
        assert_eq!(recent.percentiles(start), None);
        let ms = Duration::from_millis;
        (1..=100).rev().for_each(|n| recent.add(ms(n), start));
        let expected = Percentiles { count: 100, p50: ms(50), p95: ms(95) };
        assert_eq!(recent.percentiles(start + WINDOW), Some(expected));
        recent.add(ms(7), start + WINDOW);
        let one = Percentiles { count: 1, p50: ms(7), p95: ms(7) };
        assert_eq!(recent.percentiles(start + WINDOW + ms(1)), Some(one));
        (0..2 * TIMES_MAX).for_each(|_| recent.add(ms(1), start + WINDOW));
        assert_eq!(recent.percentiles(start + WINDOW).unwrap().count, TIMES_MAX, "as many as are kept");
    }
}
