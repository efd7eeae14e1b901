//! Frequencies of 20,000 draws against the exact probabilities, for each parameter alone and for all of them.

use super::{chi_square, chi_square_max, exact};
use crate::sampling::{Constraints, Draw, History};
use baton_types::{SamplingParams, TokenId};

const DRAWS: u64 = 20_000;
const LOGITS: [f32; 10] = [1.0, -0.5, 2.0, 0.0, 1.5, -1.0, 0.3, 0.9, -2.0, 2.2];
/// Prompt and answer, for the penalties: token 2 twice in the answer, 9 once, 0 and 1 in the prompt alone.
const TOKENS: [TokenId; 6] = [0, 1, 1, 2, 9, 2];
const PROMPT: usize = 3;

/// What is asked of the logits beside the parameters.
#[derive(Clone, Copy, Default)]
struct Asked<'a> {
    bias: &'a [(TokenId, f32)],
    barred: &'a [TokenId],
}

/// Draws, and compares. `kept` tokens have a probability.
fn check(what: &str, kept: usize, asked: Asked<'_>, change: impl FnOnce(&mut SamplingParams)) {
    let mut params = SamplingParams { temperature: 1.0, seed: 41, ..Default::default() };
    change(&mut params);
    let history = History::rebuild(&TOKENS, PROMPT);
    let expected = exact::probabilities(&params, &LOGITS, &history, asked.bias, asked.barred);
    let mut counts = [0; LOGITS.len()];
    for position in 0..DRAWS {
        let constraints = Constraints { bias: asked.bias, allowed: [None, None], barred: asked.barred };
        let draw = Draw { params: &params, history: &history, position, sample_index: 0, constraints };
        counts[draw.sample(&LOGITS).unwrap().token as usize] += 1;
    }
    let of_kept: Vec<(usize, f64)> = counts.into_iter().zip(expected).filter(|(_, p)| *p > 0.0).collect();
    assert_eq!(of_kept.len(), kept, "{what} keeps {of_kept:?}");
    let (counts_of_kept, probabilities): (Vec<_>, Vec<_>) = of_kept.into_iter().unzip();
    assert_eq!(counts_of_kept.iter().sum::<usize>() as u64, DRAWS, "{what}: {counts:?} has tokens that are not kept");
    let statistic = chi_square(&counts_of_kept, &probabilities);
    assert!(statistic < chi_square_max(kept - 1), "{what}: {statistic} of {counts:?}, expected {probabilities:?}");
}

#[test]
fn draws_follow_the_exact_probabilities() {
    let none = Asked::default();
    check("nothing", 10, none, |_| ());
    check("temperature 0.5", 10, none, |p| p.temperature = 0.5);
    check("temperature 2", 10, none, |p| p.temperature = 2.0);
    check("top_p", 5, none, |p| p.top_p = 0.8);
    check("top_k", 3, none, |p| p.top_k = 3);
    check("min_p", 5, none, |p| p.min_p = 0.16);
    check("typical_p", 4, none, |p| p.typical_p = 0.5);
    check("wide typical_p", 6, none, |p| p.typical_p = 0.9);
    check("presence_penalty", 10, none, |p| p.presence_penalty = 1.2);
    check("negative presence_penalty", 10, none, |p| p.presence_penalty = -0.7);
    check("frequency_penalty", 10, none, |p| p.frequency_penalty = 0.9);
    check("repetition_penalty", 10, none, |p| p.repetition_penalty = 1.7);
    check("repetition_penalty below 1", 10, none, |p| p.repetition_penalty = 0.6);
    check("logit_bias", 10, Asked { bias: &[(2, -1.5), (8, 3.0), (5, 0.25)], ..none }, |_| ());
    check("bad_words", 8, Asked { barred: &[2, 9], ..none }, |_| ());
    check("all of them", 6, Asked { bias: &[(2, -0.5), (8, 2.0)], barred: &[4] }, |p| {
        (p.temperature, p.min_p, p.top_k, p.top_p, p.typical_p) = (1.3, 0.05, 8, 0.95, 0.7);
        (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) = (0.3, 0.2, 1.2);
    });
}

#[test]
fn another_distribution_is_noticed() {
    let params = SamplingParams { temperature: 1.0, seed: 41, ..Default::default() };
    let warmer = SamplingParams { temperature: 1.1, ..params.clone() };
    let history = History::default();
    let mut counts = [0; LOGITS.len()];
    for position in 0..DRAWS {
        let constraints = Constraints::default();
        let draw = Draw { params: &params, history: &history, position, sample_index: 0, constraints };
        counts[draw.sample(&LOGITS).unwrap().token as usize] += 1;
    }
    let expected = exact::probabilities(&warmer, &LOGITS, &history, &[], &[]);
    assert!(chi_square(&counts, &expected) > chi_square_max(LOGITS.len() - 1));
}
