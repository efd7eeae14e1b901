//! How long answers come out: what a prediction can know of an answer before it is made.

use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Weight of the newest answer in the mean.
const NEWEST: f64 = 1.0 / 32.0;
/// Models remembered; a cluster serves a handful.
const MODELS_MAX: usize = 1024;

/// Mean length of answers, by model.
#[derive(Debug, Default)]
pub(crate) struct AnswerLengths(Mutex<BTreeMap<String, f64>>);

impl AnswerLengths {
    /// Takes the length of a finished answer, in tokens.
    pub(crate) fn finished(&self, model: &str, tokens: u32) {
        let mut means = self.0.lock();
        if let Some(mean) = means.get_mut(model) {
            *mean += (f64::from(tokens) - *mean) * NEWEST;
        } else if means.len() < MODELS_MAX {
            means.insert(model.to_owned(), f64::from(tokens));
        }
    }

    /// Tokens that an answer of at most `max` may be expected to have: the mean, or one where nothing is known. Not what it may have at
    /// most: who asks for all that comes until the deadline is not refused for it.
    pub(crate) fn expected(&self, model: &str, max: u32) -> u64 {
        let mean = self.0.lock().get(model).copied().unwrap_or(1.0);
        (mean.round() as u64).clamp(1, u64::from(max.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_expected_as_long_as_those_before() {
        let lengths = AnswerLengths::default();
        assert_eq!(lengths.expected("m", 50), 1, "nothing is known");
        (0..100).for_each(|_| lengths.finished("m", 20));
        assert_eq!((lengths.expected("m", 50), lengths.expected("other", 50)), (20, 1));
        (0..1000).for_each(|_| lengths.finished("m", 400));
        assert_eq!(lengths.expected("m", 50), 50, "no longer than it may be");
        (0..1000).for_each(|_| lengths.finished("m", 3));
        assert_eq!(lengths.expected("m", 50), 3);
    }
}
