//! Which token is chosen: greedy, ties, filters at their limits, invalid logits, determinism.

use super::{logits, sample_at};
use crate::sampling::order::{keys, least_of_largest, top};
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
    fn a_radix_selection_is_the_head_of_a_full_sort(values in prop::collection::vec((-4i8..4, 0u64..9), 1..400), n in 0usize..500, enough in 1u64..2000) {
        let logits: Vec<f32> = values.iter().map(|(value, _)| f32::from(*value) / 2.0).collect();
        let mut sorted: Vec<TokenId> = (0..logits.len() as TokenId).collect();
        sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        // The shortest head whose shares reach `enough`, or all.
        let (mut sum, mut head) = (0, Vec::new());
        for &token in &sorted {
            if sum < enough {
                head.push(token);
                sum += values[token as usize].1;
            }
        }
        head.sort_unstable();
        let keys = keys(&logits);
        let least = least_of_largest(&keys, |token| values[token].1, enough);
        let kept: Vec<TokenId> = (0..keys.len()).filter(|&at| keys[at] >= least).map(|at| at as TokenId).collect();
        prop_assert_eq!(kept, head);
        sorted.truncate(n);
        prop_assert_eq!(top(&logits, n), sorted);
    }
}
