//! Recorded draws: known answers for every backend that samples. A change of any of them needs a new kernel revision.

use super::super::{Constraints, Draw, History, TokenSet};
use baton_types::{SamplingParams, TokenId};
use expect_test::{Expect, expect};

/// Logits from -12 to 4 in steps of 2^-12, made of whole numbers alone (the generator of Knuth's MMIX).
fn logits(vocab: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 48) as f32 / 4096.0 - 12.0
    };
    (0..vocab).map(|_| next()).collect()
}

/// Eight draws in a row, each from other logits, with the tokens before them as history.
fn check(params: SamplingParams, constraints: Constraints<'_>, expected: Expect) {
    let (mut tokens, params): (Vec<TokenId>, _) = (vec![17, 3, 17], SamplingParams { seed: 5, ..params });
    for step in 0..8 {
        let history = History::rebuild(&tokens, 2);
        let draw =
            Draw { params: &params, history: &history, position: tokens.len() as u64, sample_index: 1, constraints };
        tokens.push(draw.sample(&logits(1000, step)).unwrap().token);
    }
    expected.assert_eq(&format!("{:?}", &tokens[3..]));
}

fn warm() -> SamplingParams {
    SamplingParams { temperature: 0.9, ..SamplingParams::default() }
}

#[test]
fn draws_are_as_recorded() {
    let none = Constraints::default();
    check(SamplingParams::default(), none, expect!["[252, 781, 725, 893, 988, 914, 608, 473]"]);
    check(warm(), none, expect!["[721, 623, 483, 630, 851, 715, 557, 614]"]);
    check(SamplingParams { top_k: 40, ..warm() }, none, expect!["[734, 623, 547, 630, 911, 611, 599, 614]"]);
    check(SamplingParams { top_p: 0.8, ..warm() }, none, expect!["[721, 653, 504, 607, 851, 714, 557, 604]"]);
    check(
        SamplingParams { top_k: 200, top_p: 0.95, temperature: 1.7, ..warm() },
        none,
        expect!["[721, 621, 462, 630, 843, 719, 557, 633]"],
    );
    let penalties = SamplingParams {
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        temperature: 0.05,
        ..warm()
    };
    check(penalties, none, expect!["[773, 751, 699, 799, 988, 914, 608, 564]"]);
    let even: TokenSet = (0..1000).filter(|token| token % 2 == 0).collect();
    let low: TokenSet = (0..500).collect();
    let constraints =
        Constraints { bias: &[(4, 9.5), (5, 40.0), (800, 40.0)], allowed: [Some(&even), Some(&low)], barred: &[] };
    check(SamplingParams { top_p: 0.9, ..warm() }, constraints, expect!["[292, 4, 260, 4, 478, 324, 4, 216]"]);
}
