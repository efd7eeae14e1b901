//! Prediction error: the factor by which answers took longer than the measured rates predict, by the number of
//! sequences ahead.
//!
//! Rates describe the present load. A request to an idle cluster shares it with all that arrive later, and takes many
//! times as long as alone. A request to a full cluster is predicted well. One factor for both would oscillate: after a
//! burst it would be so large that the cluster runs empty.

use std::time::{Duration, Instant};

/// Two for each doubling of the number of sequences ahead: the last level starts at 2,900 sequences.
const LEVELS: usize = 24;
/// The share of answers that may take longer than predicted: one in this many. A full cluster accepts what just fits,
/// so all answers are near their deadlines, and work on a late answer is wasted.
const SLOW_ONE_IN: f64 = 10.0;
/// An answer that took longer raises the factor by this share.
const SLOWER_BY: f64 = 0.1;
/// Bounds of a factor: a stopped worker delays a few answers, which must not affect all predictions.
const BOUNDS: (f64, f64) = (0.25, 16.0);
/// Half-life of a level without new answers: it approaches the level below it, and the lowest level approaches 1.
/// Otherwise a factor that refuses every request would never be corrected.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// Factors at one instant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slowness([f64; LEVELS]);

impl Default for Slowness {
    fn default() -> Self {
        Self([1.0; LEVELS])
    }
}

impl Slowness {
    /// The factor for a request with `ahead` sequences ahead of it.
    pub(crate) fn of(&self, ahead: u32) -> f64 {
        self.0[level(ahead)]
    }

    /// The same for all.
    #[cfg(test)]
    pub(super) fn always(factor: f64) -> Self {
        Self([factor; LEVELS])
    }
}

fn level(ahead: u32) -> usize {
    let level = (2.0 * (f64::from(ahead) + 1.0).log2()).round();
    (level as usize).min(LEVELS - 1)
}

/// A learned factor, and its time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Learned([Option<(f64, Instant)>; LEVELS]);

impl Learned {
    pub(super) fn at(&self, now: Instant) -> Slowness {
        let mut below: f64 = 1.0;
        Slowness(self.0.map(|known| {
            if let Some((factor, learned)) = known {
                let half_lives = now.saturating_duration_since(learned).div_duration_f64(HALF_LIFE);
                below *= (factor / below).powf(0.5_f64.powf(half_lives));
            }
            below
        }))
    }

    /// Records an answer with `ahead` sequences ahead of it. It took `took`, or was cut off after that; the rates alone
    /// predicted `predicted`.
    pub(super) fn learn(&mut self, ahead: u32, took: Duration, predicted: Duration, finished: bool, now: Instant) {
        let factor = self.at(now).of(ahead);
        // The steps cancel if one answer in SLOW_ONE_IN is slow. An answer that was cut off early is ignored.
        let step = match (took > predicted.mul_f64(factor), finished) {
            (true, _) => SLOWER_BY,
            (false, true) => -SLOWER_BY / (SLOW_ONE_IN - 1.0),
            (false, false) => return,
        };
        self.0[level(ahead)] = Some(((factor * step.exp()).clamp(BOUNDS.0, BOUNDS.1), now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn levels_double_in_two() {
        let levels = [0, 1, 2, 3, 4, 7, 15, 100, u32::MAX].map(level);
        assert_eq!(levels, [0, 2, 3, 4, 5, 6, 8, 13, LEVELS - 1]);
    }

    #[test]
    fn it_is_what_nine_answers_in_ten_keep_to() {
        let (mut learned, now) = (Learned::default(), Instant::now());
        // 1 s predicted, and it takes 1 to 2.9 times that.
        for round in 0..4000_u64 {
            learned.learn(3, Duration::from_millis(1000 + round * 7 % 20 * 100), SECOND, true, now);
        }
        let factor = learned.at(now).of(3);
        assert!((2.4..3.21).contains(&factor), "{factor}");
    }

    #[test]
    fn what_is_cut_off_tells_only_that_it_was_slow() {
        let (mut learned, now) = (Learned::default(), Instant::now());
        (0..10).for_each(|_| learned.learn(0, SECOND / 2, SECOND, false, now));
        assert_eq!(learned.at(now), Slowness::default());
        learned.learn(0, SECOND * 2, SECOND, false, now);
        assert!(learned.at(now).of(0) > 1.05);
        (0..1000).for_each(|_| learned.learn(0, SECOND * 2000, SECOND, false, now));
        assert_eq!(learned.at(now).of(0), BOUNDS.1);
    }

    #[test]
    fn each_level_has_its_own_and_unknown_ones_are_as_the_one_below() {
        let (mut learned, now) = (Learned::default(), Instant::now());
        for _ in 0..100 {
            learned.learn(0, SECOND * 4, SECOND, true, now);
            learned.learn(15, SECOND * 2, SECOND, true, now);
        }
        let known = learned.at(now);
        assert!((4.0..4.5).contains(&known.of(0)) && (2.0..2.3).contains(&known.of(15)), "{known:?}");
        assert_eq!((known.of(7), known.of(1000)), (known.of(0), known.of(15)));
    }

    #[test]
    fn what_was_slow_once_is_forgotten() {
        let (mut learned, now) = (Learned::default(), Instant::now());
        (0..1000).for_each(|_| learned.learn(7, SECOND * 2000, SECOND, true, now));
        let after = |learned: &Learned, halves: u32| learned.at(now + HALF_LIFE * halves).of(7);
        assert_eq!(after(&learned, 0), BOUNDS.1);
        assert!((after(&learned, 1) - BOUNDS.1.sqrt()).abs() < 1e-9 && after(&learned, 9) < 1.01);
        (0..1000).for_each(|_| learned.learn(0, SECOND * 3, SECOND, true, now + HALF_LIFE * 9));
        assert!((3.0..3.5).contains(&after(&learned, 9)), "it comes to the level below, not to nothing");
    }
}
