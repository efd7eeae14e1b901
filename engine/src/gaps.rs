//! How long a device had no step between two steps.

use std::time::Duration;

/// Gaps between steps: from the end of a step, with none launched behind it, to the launch of the next one, where rows could run at once.
/// The time of an engine that has nothing to run is no gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepGaps {
    /// Gaps no longer than each of [`StepGaps::BOUNDS`] and longer than the one before; the last are longer than all.
    pub counts: [u64; Self::BOUNDS.len() + 1],
    /// Sum of all gaps.
    pub total: Duration,
}

impl StepGaps {
    /// From what a launch takes at best to what clients notice.
    pub const BOUNDS: [Duration; 9] = [
        Duration::from_micros(10),
        Duration::from_micros(30),
        Duration::from_micros(100),
        Duration::from_micros(300),
        Duration::from_millis(1),
        Duration::from_millis(3),
        Duration::from_millis(10),
        Duration::from_millis(100),
        Duration::from_secs(1),
    ];

    pub(crate) fn add(&mut self, gap: Duration) {
        self.counts[Self::BOUNDS.partition_point(|bound| *bound < gap)] += 1;
        self.total += gap;
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_at_the_least_bound_that_holds_it() {
        let mut gaps = StepGaps::default();
        for micros in [0, 10, 11, 1_000, 999_999, 1_000_000, 1_000_001, 60_000_000] {
            gaps.add(Duration::from_micros(micros));
        }
        assert_eq!(gaps.counts, [2, 1, 0, 0, 1, 0, 0, 0, 2, 2]);
        assert_eq!((gaps.count(), gaps.total), (8, Duration::from_micros(63_001_021)));
    }
}
