//! Summaries of times.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Percentiles by nearest rank; all 0 if there is no value.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Distribution {
    pub(crate) count: u64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Distribution {
    /// Of values in any order.
    pub(super) fn of(ms: impl Iterator<Item = f64>) -> Self {
        let mut sum = 0.0;
        let times = Times::of(ms.inspect(|ms| sum += ms));
        let at = |share| times.quantile(share).unwrap_or_default();
        Self {
            count: times.0.len(),
            mean: sum / times.0.len().max(1) as f64,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}

/// Significant digits kept of a time.
const DIGITS: u8 = 4;

/// Histogram of times, in microseconds.
pub(super) struct Times(Histogram<u64>);

impl Times {
    /// Of milliseconds in any order.
    pub(super) fn of(ms: impl Iterator<Item = f64>) -> Self {
        let mut times = Histogram::new(DIGITS).expect("at most 5 digits");
        ms.for_each(|ms| times.record((ms * 1e3).round() as u64).expect("it grows with its values"));
        Self(times)
    }

    /// The smallest time in milliseconds that is at least as great as `share` of all, 0 to 1. `None` if there is none.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let time = self.0.lowest_equivalent(self.0.value_at_quantile(share));
        (!self.0.is_empty()).then(|| time as f64 / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_the_nearest_ones() {
        let hundred = Distribution::of((1..=100).rev().map(f64::from));
        assert_eq!((hundred.p50, hundred.p90, hundred.p95, hundred.p99, hundred.max), (50.0, 90.0, 95.0, 99.0, 100.0));
        assert_eq!((hundred.mean, hundred.count), (50.5, 100));
        let one = Distribution::of([7.0].into_iter());
        assert_eq!((one.p50, one.p99, one.mean), (7.0, 7.0, 7.0));
        assert_eq!(Distribution::of(std::iter::empty()), Distribution::default());
    }
}
