//! How long the longest answers of late would take alone, of those that could be in time.
//!
//! A full cluster has a queue that is nearly as long as deadlines allow. Were each request judged by its own length, the short ones would
//! fill every gap as it opens, and the queue would never be so short that a long one fits. So where others are ahead, all are judged as
//! though they were long: who is refused depends on the queue then, and no more on the prompt.

use std::time::Duration;

/// One request in so many is longer.
const LONGER_ONE_IN: f64 = 20.0;
/// A longer one raises the bound by this share; the steps cancel where one in [`LONGER_ONE_IN`] is.
const RISES_BY: f64 = 0.2;

/// A bound that nineteen in twenty keep to; `None` before the first one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Longest(Option<f64>);

impl Longest {
    /// A request that would take so long alone, and would be in time.
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
