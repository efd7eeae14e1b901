//! The time of a decode step by its rows, measured; of the model, and of the draft model.
//!
//! A line through the last steps, by least squares with weights that decay. Where these steps had nearly the same number of rows, they say
//! little of another number: then the slope is near an assumed one, so that a slope that was wrong is tried again.

use std::time::Duration;

/// Weight that a step keeps with each later one: about the last 200 matter.
const DECAY: f64 = 0.995;
/// Assumed time of a further row, by that of the first. CPUs show about 0.1 (docs/benchmarks.md), GPUs less.
const ROW: f64 = 0.2;
/// The assumption counts as so many steps whose rows differ by one from the mean.
const ASSUMED: f64 = 4.0;
/// A step counts for at most this many times what the line says: the process may have been suspended.
const STEP_MAX: f64 = 4.0;

/// The line, by weighted sums of rows `x` and seconds `y`.
#[derive(Clone, Debug, Default)]
pub(super) struct StepCost {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl StepCost {
    /// A step of so many rows.
    pub(super) fn add(&mut self, rows: usize, elapsed: Duration) {
        let (x, mut y) = (rows as f64, elapsed.as_secs_f64());
        if let Some(expected) = self.seconds(rows) {
            y = y.min(STEP_MAX * expected);
        }
        let Self { weight, x: sum_x, y: sum_y, xx, xy } = self;
        for (sum, new) in [(weight, 1.0), (sum_x, x), (sum_y, y), (xx, x * x), (xy, x * y)] {
            *sum = *sum * DECAY + new;
        }
    }

    /// Seconds of a step with so many rows; `None` before any step.
    pub(super) fn seconds(&self, rows: usize) -> Option<f64> {
        self.seconds_of(rows as f64)
    }

    /// The same for a share of rows.
    pub(super) fn seconds_of(&self, rows: f64) -> Option<f64> {
        if self.y <= 0.0 {
            return None;
        }
        let (x, y) = (self.x / self.weight, self.y / self.weight);
        let (spread, common) = (self.xx - self.x * x, self.xy - self.x * y);
        let assumed = ROW * y / (1.0 + ROW * (x - 1.0));
        let slope = (common + ASSUMED * assumed) / (spread + ASSUMED);
        // More rows take no less time, and no more than as many steps.
        let slope = slope.clamp(0.0, y / x);
        Some(y + slope * (rows - x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    fn ratio(cost: &StepCost, rows: usize, of: usize) -> f64 {
        cost.seconds(rows).unwrap() / cost.seconds(of).unwrap()
    }

    #[test]
    fn it_is_assumed_then_measured() {
        let mut cost = StepCost::default();
        assert_eq!(cost.seconds(1), None);
        cost.add(1, ms(10.0));
        assert!((ratio(&cost, 6, 1) - 2.0).abs() < 0.01, "{cost:?}");
        for rows in [1, 5, 1, 9, 1, 5, 9, 3] {
            cost.add(rows, ms(10.0 + 0.5 * (rows as f64 - 1.0)));
        }
        assert!((ratio(&cost, 9, 1) - 1.4).abs() < 0.1, "{cost:?}");
        assert!((cost.seconds(1).unwrap() - 0.010).abs() < 0.001, "{cost:?}");
    }

    #[test]
    fn what_was_measured_long_ago_is_forgotten() {
        let mut cost = StepCost::default();
        for rows in [1, 9].repeat(50) {
            cost.add(rows, ms(10.0 * rows as f64));
        }
        assert!(ratio(&cost, 9, 1) > 5.0, "{cost:?}");
        (0..3_000).for_each(|_| cost.add(1, ms(10.0)));
        assert!((ratio(&cost, 6, 1) - 2.0).abs() < 0.05, "as assumed: {cost:?}");
    }

    #[test]
    fn a_step_that_stood_still_is_no_measure() {
        let mut cost = StepCost::default();
        for rows in [1, 5].repeat(20) {
            cost.add(rows, ms(10.0 + 0.5 * (rows as f64 - 1.0)));
        }
        cost.add(5, ms(60_000.0));
        assert!(ratio(&cost, 5, 1) < 1.4, "{cost:?}");
    }
}
