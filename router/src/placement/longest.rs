//! The time that the longest recent answers would take alone, among those that could meet their deadlines.
//!
//! A full cluster has a queue that is nearly as long as deadlines allow. If each request were checked with its own
//! length, short ones would fill every gap, and the queue would never be short enough for a long one. So behind other
//! requests, every request is checked as if it were long. Then refusal depends on the queue, not on the prompt.

use std::time::Duration;

/// The share of longer requests: one in this many.
const LONGER_ONE_IN: f64 = 20.0;
/// A longer request raises the bound by this share; the steps cancel if one in [`LONGER_ONE_IN`] is longer.
const RISES_BY: f64 = 0.2;

/// The 95th percentile, estimated; `None` before the first request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Longest(Option<f64>);

impl Longest {
    /// Records a request that takes `alone` on an idle cluster, and would meet its deadline.
    pub(super) fn learn(&mut self, alone: Duration) {
        let alone_s = alone.as_secs_f64();
        self.0 = Some(match self.0 {
            None => alone_s,
            Some(bound) if alone_s > bound => (bound * (1.0 + RISES_BY)).min(alone_s),
            Some(bound) => bound * (1.0 + RISES_BY).powf(-1.0 / (LONGER_ONE_IN - 1.0)),
        });
    }

    pub(super) fn get(self) -> Duration {
        super::choose::duration(self.0.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(of: impl Fn(u64) -> u64) -> u64 {
        let mut longest = Longest::default();
        (0..10_000).for_each(|n| longest.learn(Duration::from_millis(of(n))));
        longest.get().as_millis() as u64
    }

    #[test]
    fn it_is_what_nineteen_in_twenty_keep_to() {
        assert_eq!(Longest::default().get(), Duration::ZERO);
        // 100 to 1,099 ms, evenly.
        let even = learned(|n| 100 + n * 7919 % 1000);
        assert!((950..1_100).contains(&even), "{even}");
        let rare = learned(|n| if n % 100 == 0 { 60_000 } else { 100 });
        assert!(rare < 150, "one in a hundred is no measure: {rare}");
    }
}
