//! Measured speed, for placement. Pure: durations in, rates out.

use std::time::Duration;

/// Weight of the newest step; about the last twenty steps matter.
const NEWEST: f64 = 0.1;
/// A step with fewer prefill rows weighs less: the last token of a cached prompt shows little about prefill speed.
const ROWS_TELLING: f64 = 64.0;
/// A step counts for at most this many times the recent time for its work, and the first one for as many times that of the second. So a step
/// during which the process was suspended does not distort the rate, and a lasting change is still followed within a few steps.
const STEP_MAX: f64 = 8.0;
/// Steps from which on there is a rate: nothing tells whether a single one was suspended, or met cold caches.
const STEPS_MIN: u32 = 2;

/// Exponentially weighted rates over the recent steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    prefill: Rate,
    decode: Rate,
}

/// Work over time, both with the same decay, so that steps weigh by their duration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rate {
    /// Up to [`STEPS_MIN`].
    steps: u32,
    work: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, work: f64, seconds: f64, weight: f64) {
        if self.steps == 1 {
            self.seconds = self.seconds.min(STEP_MAX * seconds * self.work / work);
        }
        let of_late = if self.steps > 0 { work * self.seconds / self.work } else { f64::INFINITY };
        let seconds = seconds.min(STEP_MAX * of_late);
        self.work += weight * (work - self.work);
        self.seconds += weight * (seconds - self.seconds);
        self.steps = (self.steps + 1).min(STEPS_MIN);
    }

    fn per_second(self) -> f32 {
        if self.steps == STEPS_MIN && self.seconds > 0.0 { (self.work / self.seconds) as f32 } else { 0.0 }
    }
}

impl Rates {
    /// Adds one step of `prefill_rows`, and of `decoding` sequences that got `tokens` tokens, which took `elapsed`. A mixed step counts fully
    /// for both, because each sequence in such a batch waits for the whole step. One in which sequences get several tokens counts as so many
    /// steps.
    pub fn add(&mut self, prefill_rows: usize, decoding: usize, tokens: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if prefill_rows > 0 {
            let rows = prefill_rows as f64;
            self.prefill.add(rows, seconds, NEWEST * (rows / ROWS_TELLING).min(1.0));
        }
        if decoding > 0 {
            self.decode.add(tokens as f64 / decoding as f64, seconds, NEWEST);
        }
    }

    /// Prefill tokens per second; 0 before the second step with any.
    pub fn prefill_tokens_per_s(&self) -> f32 {
        self.prefill.per_second()
    }

    /// Steps with decode rows per second; 0 before the second.
    pub fn decode_steps_per_s(&self) -> f32 {
        self.decode.per_second()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_work_over_time_and_follow_a_change() {
        let mut rates = Rates::default();
        assert_eq!((rates.prefill_tokens_per_s(), rates.decode_steps_per_s()), (0.0, 0.0));
        rates.add(100, 0, 0, Duration::from_millis(100));
        assert_eq!((rates.prefill_tokens_per_s(), rates.decode_steps_per_s()), (0.0, 0.0), "one step tells nothing");
        rates.add(100, 0, 0, Duration::from_millis(100));
        assert_eq!((rates.prefill_tokens_per_s(), rates.decode_steps_per_s()), (1000.0, 0.0));
        (0..100).for_each(|_| rates.add(50, 3, 3, Duration::from_millis(100)));
        assert!((rates.prefill_tokens_per_s() - 500.0).abs() < 1.0, "{rates:?}");
        assert!((rates.decode_steps_per_s() - 10.0).abs() < 0.1, "{rates:?}");
    }

    #[test]
    fn single_rows_say_little_of_prompts() {
        let mut rates = Rates::default();
        (0..20).for_each(|_| rates.add(500, 0, 0, Duration::from_millis(500)));
        (0..200).for_each(|_| rates.add(1, 0, 0, Duration::from_millis(10)));
        assert!(rates.prefill_tokens_per_s() > 900.0, "{rates:?}");
        (0..100).for_each(|_| rates.add(64, 0, 0, Duration::from_millis(640)));
        assert!(rates.prefill_tokens_per_s() < 101.0, "{rates:?}");
    }

    #[test]
    fn a_first_step_that_stood_still_is_no_measure() {
        let mut rates = Rates::default();
        rates.add(1, 0, 0, Duration::from_millis(1200));
        assert_eq!(rates.prefill_tokens_per_s(), 0.0);
        rates.add(32, 0, 0, Duration::from_millis(32));
        assert!(rates.prefill_tokens_per_s() > 500.0, "{rates:?}");
        (0..30).for_each(|_| rates.add(64, 0, 0, Duration::from_millis(640)));
        assert!(rates.prefill_tokens_per_s() < 110.0, "{rates:?}");
    }

    #[test]
    fn a_step_that_stood_still_is_no_measure_and_lasting_slowness_is() {
        let mut rates = Rates::default();
        (0..20).for_each(|_| rates.add(0, 1, 1, Duration::from_millis(10)));
        rates.add(0, 1, 1, Duration::from_secs(7));
        assert!(rates.decode_steps_per_s() > 50.0, "{rates:?}");
        (0..10).for_each(|_| rates.add(0, 1, 1, Duration::from_millis(500)));
        assert!(rates.decode_steps_per_s() < 5.0, "{rates:?}");
    }
}
