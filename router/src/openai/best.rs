//! `best_of`: the best of several answers.

use crate::output::{Delta, Finished};
use baton_types::TokenLogprobs;

/// The answers of each prompt that are shown: those whose tokens have the highest log-probability on average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Best {
    /// How many.
    pub(crate) shown: u32,
    /// Whether the client asked for the log-probabilities.
    pub(crate) logprobs: bool,
}

impl Best {
    /// The best answers of one prompt, best first; of equal ones, the first.
    pub(super) fn of(self, answers: &[(Delta, Finished)]) -> Vec<&(Delta, Finished)> {
        let mut ranked: Vec<_> = answers.iter().map(|answer| (mean(&answer.0.logprobs), answer)).collect();
        ranked.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        ranked.into_iter().take(self.shown as usize).map(|(_, answer)| answer).collect()
    }
}

/// The mean log-probability of the tokens of an answer.
fn mean(logprobs: &[TokenLogprobs]) -> f64 {
    let sum: f64 = logprobs.iter().map(|token| f64::from(token.chosen)).sum();
    sum / logprobs.len().max(1) as f64
}
