//! Penalties: the formulas, their order, and histories that are rebuilt or grown.

use crate::sampling::{History, sample};
use baton_types::{SamplingParams, TokenId};

#[test]
fn formulas() {
    let plain = SamplingParams::default;
    let check = |params: SamplingParams, prompt: &[TokenId], output: &[TokenId], logits: &[f32], expected: &[f32]| {
        let history = History::rebuild(&[prompt, output].concat(), prompt.len());
        let mut adjusted = logits.to_vec();
        history.penalize(&params, &mut adjusted);
        assert_eq!(adjusted, expected, "{params:?}, prompt {prompt:?}, output {output:?}");
    };
    let none: &[TokenId] = &[];
    check(plain(), &[0, 1], &[1], &[1.0, 2.0], &[1.0, 2.0]);
    // Presence once, frequency per occurrence, both on the output alone.
    let presence = SamplingParams { presence_penalty: 0.5, ..plain() };
    check(presence.clone(), &[0], none, &[1.0, 2.0], &[1.0, 2.0]);
    check(presence, &[0], &[1, 1, 1], &[1.0, 2.0], &[1.0, 1.5]);
    let frequency = SamplingParams { frequency_penalty: -0.5, ..plain() };
    check(frequency, &[0], &[1, 1, 1], &[1.0, 2.0], &[1.0, 3.5]);
    // Repetition on prompt and output, once, away from zero for negative logits.
    let repetition = SamplingParams { repetition_penalty: 2.0, ..plain() };
    check(repetition.clone(), &[0], &[1, 1], &[3.0, -3.0, 1.0, 0.0], &[1.5, -6.0, 1.0, 0.0]);
    check(repetition, &[3], none, &[3.0, -3.0, 1.0, 0.0], &[3.0, -3.0, 1.0, 0.0]);
    // Repetition comes first: (4 / 2) - 1 * 2 - 0.5, not (4 - 2.5) / 2.
    let all = SamplingParams { repetition_penalty: 2.0, presence_penalty: 0.5, frequency_penalty: 1.0, ..plain() };
    check(all.clone(), &[0], &[0, 0], &[4.0, 4.0], &[-0.5, 4.0]);
    // Tokens outside the logits (another vocabulary's) have no effect.
    check(all, &[9], &[9], &[4.0], &[4.0]);
    // Results that overflow are clamped to finite values.
    let tiny = SamplingParams { repetition_penalty: 1e-38, ..plain() };
    check(tiny, &[0, 1], none, &[30.0, -30.0], &[f32::MAX, -30.0 * 1e-38]);
}

#[test]
fn a_rebuilt_history_equals_a_grown_one() {
    let tokens = [5, 6, 5, 7, 7, 5, 8];
    for prompt_len in 0..=tokens.len() {
        let mut grown = History::rebuild(&tokens[..prompt_len], prompt_len);
        tokens[prompt_len..].iter().for_each(|&token| grown.push(token));
        assert_eq!(grown, History::rebuild(&tokens, prompt_len), "prompt of {prompt_len}");
    }
    let history = History::rebuild(&tokens, 3);
    assert_eq!([5, 6, 7, 8, 9].map(|t| history.generated(t)), [1, 0, 2, 1, 0]);
    assert_eq!([5, 6, 7, 8, 9].map(|t| history.contains(t)), [true, true, true, true, false]);
}

#[test]
fn penalties_reach_greedy_and_drawn_tokens_but_not_log_probabilities() {
    let logits = [2.0, 1.9, -3.0];
    let history = History::rebuild(&[1, 0], 1);
    let greedy = SamplingParams { presence_penalty: 1.0, logprobs: Some(1), ..Default::default() };
    let drawn = SamplingParams { temperature: 0.01, ..greedy.clone() };
    for params in [greedy, drawn] {
        let sampled = sample(&params, &logits, &history, 2, 0).unwrap();
        assert_eq!(sampled.token, 1, "{params:?}");
        assert_eq!(sampled.logprobs.unwrap().top[0].0, 0, "the model itself likes token 0 best");
    }
}
