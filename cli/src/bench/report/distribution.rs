//! Times in a few numbers.

use serde::Serialize;

/// Percentiles by nearest rank; all 0 where there is no value.
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
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Self {
        let sorted = sorted(values);
        let at = |share| quantile(&sorted, share).unwrap_or_default();
        Self {
            count: sorted.len() as u64,
            mean: sorted.iter().sum::<f64>() / sorted.len().max(1) as f64,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}

/// Values from the least to the greatest.
pub(super) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// The least value that is at least as great as `share` of all, 0 to 1. `None` where there is no value.
pub(super) fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).or(sorted.last()).copied()
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
