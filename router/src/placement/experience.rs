//! What answers so far teach about the next: how long they come out, and how far predictions were off.

use super::Prediction;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;

/// An answer that came out longer than expected lengthens the expectation by this share, and a shorter one takes it back.
const LONGER_BY: f64 = 1.0 / 16.0;
/// Models remembered; a cluster serves a handful.
const MODELS_MAX: usize = 1024;
/// One answer in so many may take longer than predicted.
const SLOW_ONE_IN: f64 = 5.0;
/// An answer that took longer lengthens predictions by this share.
const SLOWER_BY: f64 = 0.1;
/// Bounds of [`Experience::slowness`]: what a stopped worker does to a few answers is no experience for all.
const SLOWNESS: (f64, f64) = (0.25, 8.0);

/// An answer that ended, by itself or not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// Its tokens.
    pub(crate) tokens: u32,
    /// Not cut off by its client, its deadline or a fault.
    pub(crate) finished: bool,
    /// From its prediction to its end, and what was predicted; `None` where that says nothing, as after another attempt.
    pub(crate) took: Option<(Duration, Prediction)>,
}

#[derive(Clone, Copy, Debug)]
struct Model {
    tokens: f64,
    slowness: f64,
}

/// Of all answers of this router, by model; the newest weigh most.
#[derive(Debug, Default)]
pub(crate) struct Experience(Mutex<BTreeMap<String, Model>>);

impl Experience {
    /// Learns from an answer.
    pub(crate) fn learn(&self, model: &str, ended: &Ended) {
        let mut models = self.0.lock();
        if !models.contains_key(model) {
            if models.len() == MODELS_MAX {
                return;
            }
            let tokens = if ended.finished { f64::from(ended.tokens.max(1)) } else { 1.0 };
            models.insert(model.to_owned(), Model { tokens, slowness: 1.0 });
        }
        let Some(known) = models.get_mut(model) else { return };
        let tokens = f64::from(ended.tokens);
        if tokens > known.tokens {
            known.tokens *= 1.0 + LONGER_BY;
        } else if tokens < known.tokens && ended.finished {
            known.tokens = (known.tokens / (1.0 + LONGER_BY)).max(1.0);
        }
        let Some((took, predicted)) = ended.took else { return };
        let was_slow = took > predicted.end(ended.tokens).mul_f64(known.slowness);
        // One that was cut off early says nothing. The steps cancel where one answer in SLOW_ONE_IN is slow.
        let step = match (was_slow, ended.finished) {
            (true, _) => SLOWER_BY,
            (false, true) => -SLOWER_BY / (SLOW_ONE_IN - 1.0),
            (false, false) => return,
        };
        known.slowness = (known.slowness * step.exp()).clamp(SLOWNESS.0, SLOWNESS.1);
    }

    /// Tokens that an answer of at most `max` may be expected to have: the median, or 1 where nothing is known. Not what it may have at
    /// most: who asks for all that comes until the deadline is not refused for it, and a few endless answers are no measure for the rest.
    /// One that was cut off counts where it was longer than expected: else long answers would be forgotten where they miss their deadlines.
    pub(crate) fn answer_tokens(&self, model: &str, max: u32) -> u64 {
        let median = self.0.lock().get(model).map_or(1.0, |m| m.tokens);
        (median.round() as u64).clamp(1, u64::from(max.max(1)))
    }

    /// Factor within which four answers in five keep to their prediction; 1 where nothing is known.
    pub(crate) fn slowness(&self, model: &str) -> f64 {
        self.0.lock().get(model).map_or(1.0, |m| m.slowness)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const PREDICTED: Prediction = Prediction { first_token: SECOND, token: SECOND };

    fn answer(tokens: u32, finished: bool) -> Ended {
        Ended { tokens, finished, took: None }
    }

    #[test]
    fn answers_are_expected_as_long_as_those_before() {
        let known = Experience::default();
        assert_eq!(known.answer_tokens("m", 50), 1, "nothing is known");
        (0..100).for_each(|_| known.learn("m", &answer(20, true)));
        assert_eq!((known.answer_tokens("m", 50), known.answer_tokens("other", 50)), (20, 1));
        (0..1000).for_each(|_| known.learn("m", &answer(400, true)));
        assert_eq!(known.answer_tokens("m", 50), 50, "no longer than it may be");
        (0..1000).for_each(|_| known.learn("m", &answer(3, true)));
        assert_eq!(known.answer_tokens("m", 50), 3);
    }

    #[test]
    fn long_answers_that_are_cut_off_are_not_forgotten() {
        let known = Experience::default();
        for _ in 0..200 {
            known.learn("m", &answer(10, true));
            known.learn("m", &answer(30, false));
        }
        (0..100).for_each(|_| known.learn("m", &answer(30, false)));
        assert!((30..=32).contains(&known.answer_tokens("m", 50)), "{}", known.answer_tokens("m", 50));
        (0..100).for_each(|_| known.learn("m", &answer(5, false)));
        assert!(known.answer_tokens("m", 50) >= 30, "what is cut off early may have become longer");
    }

    #[test]
    fn a_few_endless_answers_are_no_measure() {
        let known = Experience::default();
        (0..100).for_each(|_| known.learn("m", &answer(100, true)));
        (0..3).for_each(|_| known.learn("m", &answer(100_000, false)));
        assert!(known.answer_tokens("m", 1000) <= 120, "{}", known.answer_tokens("m", 1000));
    }

    #[test]
    fn slowness_is_what_four_answers_in_five_keep_to() {
        let known = Experience::default();
        // 2 s predicted, and it takes 1 to 1.9 times that.
        for round in 0..2000_u64 {
            let took = Some((Duration::from_millis(2000 + round * 7 % 10 * 200), PREDICTED));
            known.learn("m", &Ended { tokens: 2, finished: true, took });
        }
        assert!((1.6..1.9).contains(&known.slowness("m")), "{}", known.slowness("m"));
        assert_eq!(known.slowness("other"), 1.0);
    }

    #[test]
    fn what_is_cut_off_tells_only_that_it_was_slow() {
        let known = Experience::default();
        let cut = |after| Ended { tokens: 3, finished: false, took: Some((after, PREDICTED)) };
        (0..10).for_each(|_| known.learn("m", &cut(SECOND)));
        assert_eq!(known.slowness("m"), 1.0);
        known.learn("m", &cut(SECOND * 4));
        assert!(known.slowness("m") > 1.05, "three tokens were predicted within three seconds");
        (0..1000).for_each(|_| known.learn("m", &cut(SECOND * 4000)));
        assert_eq!(known.slowness("m"), SLOWNESS.1);
    }
}
