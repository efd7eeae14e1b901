//! Statistics of past answers: their lengths, and how far predictions were off.

use super::Prediction;
use super::longest::Longest;
use super::slowness::{Learned, Slowness};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// An answer longer than expected raises the expected length by this share; a shorter one lowers it again.
const LONGER_BY: f64 = 1.0 / 16.0;
/// Most models that are remembered; a cluster serves a handful.
const MODELS_MAX: usize = 1024;

/// An answer that ended, complete or not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) tokens: u32,
    /// Whether it was not cut off by its client, its deadline or a fault.
    pub(crate) finished: bool,
    /// Time from its prediction to its end, and the prediction; `None` if they cannot be compared, as after another
    /// attempt.
    pub(crate) took: Option<(Duration, Prediction)>,
}

#[derive(Clone, Copy, Debug)]
struct Model {
    tokens: f64,
    slowness: Learned,
    longest: Longest,
}

/// Statistics of all answers of this router, by model; newer answers weigh more.
#[derive(Debug, Default)]
pub(crate) struct Experience(Mutex<BTreeMap<String, Model>>);

impl Experience {
    /// Records an answer that ended now.
    pub(crate) fn learn(&self, model: &str, ended: &Ended, now: Instant) {
        let mut models = self.0.lock();
        if !models.contains_key(model) {
            if models.len() == MODELS_MAX {
                return;
            }
            let tokens = if ended.finished { f64::from(ended.tokens.max(1)) } else { 1.0 };
            models
                .insert(model.to_owned(), Model { tokens, slowness: Learned::default(), longest: Longest::default() });
        }
        let Some(known) = models.get_mut(model) else { return };
        let tokens = f64::from(ended.tokens);
        if tokens > known.tokens {
            known.tokens *= 1.0 + LONGER_BY;
        } else if tokens < known.tokens && ended.finished {
            known.tokens = (known.tokens / (1.0 + LONGER_BY)).max(1.0);
        }
        if let Some((took, predicted)) = ended.took {
            known.slowness.learn(predicted.ahead, took, predicted.end(ended.tokens), ended.finished, now);
        }
    }

    /// Expected tokens of an answer of at most `max`: the median, or 1 while nothing is known. The maximum would refuse
    /// clients that set none, and a few endless answers would distort a mean. An answer that was cut off counts only if
    /// it was longer than expected: otherwise long answers that miss their deadlines would not count.
    pub(crate) fn answer_tokens(&self, model: &str, max: u32) -> u64 {
        let median = self.0.lock().get(model).map_or(1.0, |m| m.tokens);
        (median.round() as u64).clamp(1, u64::from(max.max(1)))
    }

    /// Records a request that arrived, accepted or not. It would take `alone` on an idle cluster, and meet its
    /// deadline.
    pub(crate) fn offered(&self, model: &str, alone: Duration) {
        if let Some(known) = self.0.lock().get_mut(model) {
            known.longest.learn(alone);
        }
    }

    /// The time that the longest recent requests would take alone.
    pub(crate) fn longest(&self, model: &str) -> Duration {
        self.0.lock().get(model).map_or(Duration::ZERO, |m| m.longest.get())
    }

    /// The factor by which answers took longer than predicted.
    pub(crate) fn slowness(&self, model: &str, now: Instant) -> Slowness {
        self.0.lock().get(model).map_or_else(Slowness::default, |m| m.slowness.at(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(tokens: u32, finished: bool) -> Ended {
        Ended { tokens, finished, took: None }
    }

    #[test]
    fn answers_are_expected_as_long_as_those_before() {
        let (known, now) = (Experience::default(), Instant::now());
        assert_eq!(known.answer_tokens("m", 50), 1, "nothing is known");
        (0..100).for_each(|_| known.learn("m", &answer(20, true), now));
        assert_eq!((known.answer_tokens("m", 50), known.answer_tokens("other", 50)), (20, 1));
        (0..1000).for_each(|_| known.learn("m", &answer(400, true), now));
        assert_eq!(known.answer_tokens("m", 50), 50, "no longer than it may be");
        (0..1000).for_each(|_| known.learn("m", &answer(3, true), now));
        assert_eq!(known.answer_tokens("m", 50), 3);
    }

    #[test]
    fn long_answers_that_are_cut_off_are_not_forgotten() {
        let (known, now) = (Experience::default(), Instant::now());
        for _ in 0..200 {
            known.learn("m", &answer(10, true), now);
            known.learn("m", &answer(30, false), now);
        }
        (0..100).for_each(|_| known.learn("m", &answer(30, false), now));
        assert!((30..=32).contains(&known.answer_tokens("m", 50)), "{}", known.answer_tokens("m", 50));
        (0..100).for_each(|_| known.learn("m", &answer(5, false), now));
        assert!(known.answer_tokens("m", 50) >= 30, "what is cut off early may have become longer");
    }

    #[test]
    fn a_few_endless_answers_are_no_measure() {
        let (known, now) = (Experience::default(), Instant::now());
        (0..100).for_each(|_| known.learn("m", &answer(100, true), now));
        (0..3).for_each(|_| known.learn("m", &answer(100_000, false), now));
        assert!(known.answer_tokens("m", 1000) <= 120, "{}", known.answer_tokens("m", 1000));
    }

    #[test]
    fn slowness_is_of_its_model() {
        let (known, now) = (Experience::default(), Instant::now());
        let predicted = Prediction { first_token: Duration::from_secs(1), token: Duration::from_secs(1), ahead: 2 };
        let slow = Ended { tokens: 3, finished: true, took: Some((Duration::from_secs(4), predicted)) };
        known.learn("m", &slow, now);
        assert!(known.slowness("m", now).of(2) > 1.05, "three tokens were predicted within three seconds");
        assert_eq!(known.slowness("other", now), Slowness::default());
    }
}
