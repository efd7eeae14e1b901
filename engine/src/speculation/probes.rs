//! Time for proposals of the draft model that do not pay as far as is known. Without them, nobody would see that they pay again.

use std::time::Duration;

/// Part of the time of decode steps.
const PART: f64 = 0.01;

/// The time that was spent and is not yet made up for.
#[derive(Debug, Default)]
pub(super) struct Probes {
    owed_s: f64,
}

impl Probes {
    /// Decode steps took this long.
    pub(super) fn decoded(&mut self, elapsed: Duration) {
        self.owed_s = (self.owed_s - PART * elapsed.as_secs_f64()).max(0.0);
    }

    /// A probe, or a part of it, took this long.
    pub(super) fn spent(&mut self, elapsed: Duration) {
        self.owed_s += elapsed.as_secs_f64();
    }

    /// Whether there may be one now.
    pub(super) fn is_due(&self) -> bool {
        self.owed_s <= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_take_a_hundredth_of_the_time() {
        let (mut probes, mut spent) = (Probes::default(), Duration::ZERO);
        let (step, probe) = (Duration::from_millis(10), Duration::from_millis(7));
        for _ in 0..100_000 {
            if probes.is_due() {
                probes.spent(probe);
                spent += probe;
            }
            probes.decoded(step);
        }
        let part = spent.as_secs_f64() / (100_000.0 * step.as_secs_f64());
        assert!((0.009..0.0101).contains(&part), "{part}");
    }
}
