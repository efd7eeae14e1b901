//! The router's retry budget, which keeps retries from overloading a failing cluster.

use parking_lot::Mutex;
use std::time::Instant;

/// A token bucket. One retry takes one token.
#[derive(Debug)]
pub(crate) struct RetryBucket {
    burst_max: f64,
    per_s: f64,
    state: Mutex<(f64, Option<Instant>)>,
}

impl RetryBucket {
    /// A full bucket of `burst_max` retries, which refills by `per_s` per second.
    pub(crate) fn new(burst_max: u32, per_s: f64) -> Self {
        let burst_max = f64::from(burst_max);
        Self { burst_max, per_s, state: Mutex::new((burst_max, None)) }
    }

    /// Takes a token for one retry, if there is one. Half of the tokens are for answers that would be `lost` without it.
    pub(crate) fn take(&self, lost: bool, now: Instant) -> bool {
        let mut state = self.state.lock();
        let (left, at) = *state;
        let passed = at.map_or(0.0, |at| now.saturating_duration_since(at).as_secs_f64());
        let left = (left + passed * self.per_s).min(self.burst_max);
        let reserved = if lost { 0.0 } else { (self.burst_max / 2.0).floor() };
        let paid = left >= reserved + 1.0;
        *state = (if paid { left - 1.0 } else { left }, Some(now));
        paid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let (bucket, start) = (RetryBucket::new(3, 2.0), Instant::now());
        let given = |ms: u64| (0..10).filter(|_| bucket.take(true, start + Duration::from_millis(ms))).count();
        // (time, retries granted)
        for (ms, expected) in [(0, 3), (400, 0), (500, 1), (1_500, 2), (60_000, 3)] {
            assert_eq!(given(ms), expected, "{ms} ms");
        }
    }

    #[test]
    fn half_of_it_is_for_answers_that_would_be_lost() {
        let (bucket, now) = (RetryBucket::new(10, 0.0), Instant::now());
        assert_eq!((0..10).filter(|_| bucket.take(false, now)).count(), 5);
        assert_eq!((0..10).filter(|_| bucket.take(true, now)).count(), 5);
    }
}
