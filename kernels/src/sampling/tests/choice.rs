//! Which token is chosen: greedy, ties, filters at their limits, invalid logits, determinism.

use super::{logits, sample_at};
use crate::sampling::order::Descending;
use crate::sampling::{History, SampleError, random, sample};
use baton_types::{SamplingParams, TokenId};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Every token that occurs in 400 draws.
fn support(params: SamplingParams, logits: &[f32]) -> BTreeSet<TokenId> {
    (0..400).map(|position| sample_at(&params, logits, position).token).collect()
}

fn warm() -> SamplingParams {
    SamplingParams { temperature: 1.0, ..Default::default() }
}

#[test]
fn greedy_takes_the_first_of_the_best() {
    let cases: [(&[f32], TokenId); 6] = [
        (&[1.0], 0),
        (&[0.0, 3.0, 2.0], 1),
        (&[3.0, 1.0, 3.0], 0),
        (&[-5.0, -2.0, -2.0], 1),
        (&[-0.0, 0.0], 0),
        (&[f32::MIN, f32::MIN], 0),
    ];
    for (logits, token) in cases {
        assert_eq!(sample_at(&SamplingParams::default(), logits, 0).token, token, "{logits:?}");
    }
    let almost_zero = SamplingParams { temperature: 9e-6, ..Default::default() };
    assert_eq!(sample_at(&almost_zero, &[1.0, 1.0], 7).token, 0);
}

#[test]
fn broken_logits_are_an_error_and_never_a_token() {
    for params in [SamplingParams::default(), warm()] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = sample(&params, &[0.0, 9.0, bad, bad], &History::default(), 0, 0).unwrap_err();
            assert!(matches!(error, SampleError::NotFinite { token: 2, .. }), "{error}");
        }
        assert_eq!(sample(&params, &[], &History::default(), 0, 0), Err(SampleError::Empty));
    }
}

#[test]
fn filters_at_their_edges() {
    let flat = [1.0; 4];
    let all = BTreeSet::from([0, 1, 2, 3]);
    let check = |change: fn(&mut SamplingParams), logits: &[f32], expected: &[TokenId]| {
        let mut params = warm();
        change(&mut params);
        assert_eq!(support(params.clone(), logits), expected.iter().copied().collect(), "{params:?} on {logits:?}");
    };
    assert_eq!(support(warm(), &flat), all);
    // A share that is met exactly suffices; ties are kept by lowest id.
    check(|p| p.top_p = 0.5, &flat, &[0, 1]);
    check(|p| p.top_p = 0.50001, &flat, &[0, 1, 2]);
    check(|p| p.top_p = 1e-30, &flat, &[0]);
    check(|p| p.top_p = 1e-30, &[0.0, 0.0, 0.5], &[2]);
    check(|p| p.top_k = 1, &[0.0, 2.0, 2.0, 1.0], &[1]);
    check(|p| p.top_k = 2, &[0.0, 2.0, 1.0, 1.0], &[1, 2]);
    check(|p| p.top_k = 4, &flat, &[0, 1, 2, 3]);
    check(|p| p.top_k = 4000, &flat, &[0, 1, 2, 3]);
    // top-p applies to the mass that top-k left: 2 of 3 equal tokens reach 0.6.
    check(|p| (p.top_k, p.top_p) = (3, 0.6), &[1.0; 10], &[0, 1]);
    // Temperature applies before top-p: a flatter distribution needs more tokens for the same share.
    check(|p| p.top_p = 0.8, &[4.0, 2.0, 0.0], &[0]);
    check(|p| (p.top_p, p.temperature) = (0.8, 2.0), &[4.0, 2.0, 0.0], &[0, 1]);
    // A temperature near zero neither overflows nor chooses another than the best token.
    check(|p| p.temperature = 1e-5, &[f32::MIN, 5.0, f32::MAX], &[2]);
}

#[test]
fn keeping_everything_is_the_same_draw_however_it_is_said() {
    let logits = logits(300, 5);
    let by_top_k = SamplingParams { top_k: 300, ..warm() };
    for position in 0..200 {
        assert_eq!(sample_at(&by_top_k, &logits, position), sample_at(&warm(), &logits, position));
    }
}

#[test]
fn the_draw_depends_on_seed_sample_and_position_alone() {
    let logits = logits(1000, 1);
    let tokens = |seed, index| -> Vec<TokenId> {
        let params = SamplingParams { seed, temperature: 2.0, ..Default::default() };
        (0..64).map(|position| sample(&params, &logits, &History::default(), position, index).unwrap().token).collect()
    };
    assert_eq!(tokens(3, 0), tokens(3, 0));
    assert_ne!(tokens(3, 0), tokens(4, 0));
    assert_ne!(tokens(3, 0), tokens(3, 1));
    assert!(tokens(3, 0).iter().collect::<BTreeSet<_>>().len() > 8, "positions draw alike");
}

/// Replay depends on the mapping: a change needs a new context string and a note to users.
#[test]
fn random_numbers_have_known_values() {
    let hash = |seed: u64, index: u32, position: u64| {
        let record =
            [b"baton.sample.v1\0".as_slice(), &seed.to_le_bytes(), &index.to_le_bytes(), &position.to_le_bytes()];
        blake3::hash(&record.concat())
    };
    for (seed, index, position) in [(0, 0, 0), (1, 2, 3), (u64::MAX, u32::MAX, u64::MAX)] {
        let uniform = random::uniform(seed, index, position);
        let word = u64::from_le_bytes(*hash(seed, index, position).as_bytes().first_chunk().unwrap());
        assert_eq!((uniform * 9_007_199_254_740_992.0) as u64, word >> 11);
        assert!((0.0..1.0).contains(&uniform));
    }
}

proptest! {
    #[test]
    fn descending_order_is_a_full_sort(values in prop::collection::vec(-4i8..4, 1..400), ranks in prop::collection::vec(0usize..500, 1..8)) {
        let logits: Vec<f32> = values.iter().map(|&v| f32::from(v) / 2.0).collect();
        let mut sorted: Vec<TokenId> = (0..logits.len() as TokenId).collect();
        sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        let mut order = Descending::new(&logits);
        for &rank in &ranks {
            prop_assert_eq!(order.get(rank), sorted.get(rank).copied());
        }
        sorted.truncate(ranks[0]);
        prop_assert_eq!(Descending::new(&logits).top(ranks[0]), sorted);
    }
}
