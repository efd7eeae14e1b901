//! Vectors against the reference, bit for bit, at every width that the processor has.

use super::Scratch;
use super::passes::{BLOCK, Gather, Maxima, Scale, Shares, Sums};
use crate::cpu::simd::{WIDEST, Width};
use crate::cpu::{CpuConfig, CpuKernels, SimdLevel};
use crate::host::HostKernels as _;
use crate::sampling::{Constraints, Draw, History, SampleError, TokenSet, shares::shares};
use crate::step::{Delta, Join, RowId, SlotRows, SlotSamplers, StepInput};
use baton_skips::{Need, skipped};
use baton_types::{SamplingParams, TokenId};
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

const VOCABULARIES: [usize; 10] = [1, 2, 31, 32, 127, 128, 129, 1000, 5003, 49_152];

fn widths() -> Vec<Width> {
    let levels =
        [(SimdLevel::Portable, None), (SimdLevel::Avx2Fma, Some(Need::Avx2)), (SimdLevel::Avx512, Some(Need::Avx512))];
    let mut widths = Vec::new();
    for (level, need) in levels {
        match need {
            Some(need) if !level.available() => skipped(need, "sampling", "the processor does not say that it has it"),
            _ => widths.push(Width::of(level)),
        }
    }
    widths
}

/// Logits of a kind: like a model's, flat, few values with many ties, extremes, and zeros of both signs.
fn logits(rng: &mut StdRng, kind: usize, vocab: usize) -> Vec<f32> {
    let one = |rng: &mut StdRng| match kind {
        0 => -10.0 * rng.random::<f32>().ln().abs().sqrt() + rng.random_range(0.0..3.0),
        1 => rng.random_range(-0.01..0.01),
        2 => rng.random_range(-6..6) as f32 / 2.0,
        3 => *[f32::MAX, f32::MIN, 0.0, 1e-40, -1e-40, 87.0, -87.0, 1.0].choose(rng).unwrap(),
        4 => *[0.0, -0.0].choose(rng).unwrap(),
        _ => rng.random_range(-40.0..40.0),
    };
    (0..vocab).map(|_| one(rng)).collect()
}
const KINDS: usize = 6;

fn params(rng: &mut StdRng, vocab: usize) -> SamplingParams {
    let near_one = 1.0 - f32::EPSILON / 2.0;
    let k = vocab as u32;
    SamplingParams {
        temperature: *[0.0, 1e-5, 0.05, 0.7, 1.0, 1.0, 1.3, 2.0].choose(rng).unwrap(),
        top_p: *[1.0, 1.0, f32::MIN_POSITIVE, 1e-4, 0.3, 0.9, 0.95, 0.999, near_one].choose(rng).unwrap(),
        top_k: *[0, 0, 0, 1, 2, 20, 40, 1000, k / 2, k - 1, k, k + 9].choose(rng).unwrap(),
        min_p: *[0.0, 0.0, f32::MIN_POSITIVE, 1e-6, 0.02, 0.1, 0.5, near_one, 1.0].choose(rng).unwrap(),
        typical_p: *[1.0, 1.0, 1.0, f32::MIN_POSITIVE, 0.2, 0.5, 0.9, 0.95, near_one].choose(rng).unwrap(),
        logprobs: *[None, None, Some(0), Some(1), Some(20)].choose(rng).unwrap(),
        seed: rng.random(),
        ..SamplingParams::default()
    }
}

#[test]
fn shares_are_those_of_the_reference() {
    // Every 499th exponent from -0 to -inf, NaN, and those at which the share ends.
    let all = (0x8000_0000..=0xff80_0000).step_by(499).map(f32::from_bits);
    let special = [-0.0, f32::NEG_INFINITY, f32::NAN, -27.725, -27.7259, -27.726, -28.0, -87.0, -87.1];
    let mut logits: Vec<f32> = special.into_iter().chain(all).collect();
    logits.resize(logits.len().next_multiple_of(WIDEST), 0.0);
    for temperature in [1.0, 0.7, 2.0, 1e-5] {
        let wanted = shares(&logits, 0.0, temperature);
        for width in widths() {
            let (scale, mut got) = (Scale { best: 0.0, temperature }, vec![0; logits.len()]);
            width.run(Shares { scale, logits: &logits, shares: &mut got });
            let differs = (0..got.len()).find(|at| got[*at] != wanted[*at]);
            assert_eq!(differs.map(|at| (logits[at], got[at], wanted[at])), None, "{width:?}");
        }
    }
}

#[test]
fn passes_are_those_of_plain_loops() {
    let mut rng = StdRng::seed_from_u64(3);
    for (case, vocab) in VOCABULARIES.into_iter().cycle().take(60).enumerate() {
        let logits = logits(&mut rng, case % KINDS, vocab);
        let wanted: Vec<f32> =
            logits.chunks(BLOCK).map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = Scale { best, temperature: [1.0, 0.6][case % 2] };
        let all = shares(&logits, best, scale.temperature);
        let of_blocks: Vec<u64> = all.chunks(BLOCK).map(|block| block.iter().sum()).collect();
        let (from, below) = (best - rng.random_range(0.0..9.0), [f32::INFINITY, best - 0.25][case / 2 % 2]);
        let chosen: Vec<(u32, f32)> =
            (0u32..).zip(logits.iter().copied()).filter(|(_, logit)| (from..below).contains(logit)).collect();
        for width in widths() {
            let (mut maxima, mut sums) = (vec![0.0; wanted.len()], vec![0; wanted.len()]);
            assert_eq!(width.run(Maxima { logits: &logits, maxima: &mut maxima }), (best, true));
            assert_eq!(maxima, wanted, "{width:?}, {vocab}");
            let sum = width.run(Sums { scale, logits: &logits, maxima: &maxima, sums: &mut sums });
            assert_eq!((sum, sums), (all.iter().sum(), of_blocks.clone()), "{width:?}, {vocab}");
            let (mut tokens, mut values) = (vec![0; vocab + WIDEST], vec![0.0; vocab + WIDEST]);
            let (maxima, tokens_to, values_to) = (&maxima, &mut tokens, &mut values);
            let gather = Gather { logits: &logits, maxima, from, below, tokens: tokens_to, values: values_to };
            let count = width.run(gather);
            assert_eq!(tokens.into_iter().zip(values).take(count).collect::<Vec<_>>(), chosen, "{width:?}, {vocab}");
        }
    }
}

#[test]
fn rows_are_those_of_the_reference() {
    let mut rng = StdRng::seed_from_u64(8);
    let mut scratches: Vec<(Width, Scratch)> = widths().into_iter().map(|width| (width, Scratch::default())).collect();
    for case in 0..900 {
        let vocab = VOCABULARIES[case % (VOCABULARIES.len() - usize::from(case % 7 > 0))];
        let (logits, params) = (logits(&mut rng, case % KINDS, vocab), params(&mut rng, vocab));
        let (history, position) = (History::default(), rng.random());
        let draw =
            Draw { params: &params, history: &history, position, sample_index: 2, constraints: Constraints::default() };
        let wanted = draw.sample(&logits);
        for (width, scratch) in &mut scratches {
            assert_eq!(
                scratch.sample(*width, &draw, &logits),
                wanted,
                "{width:?}, {vocab}, kind {}, {params:?}",
                case % KINDS
            );
        }
    }
}

#[test]
fn adjusted_rows_are_those_of_the_reference() {
    let mut rng = StdRng::seed_from_u64(21);
    let mut scratches: Vec<(Width, Scratch)> = widths().into_iter().map(|width| (width, Scratch::default())).collect();
    for case in 0..400 {
        let vocab = [5, 129, 1000, 5003][case % 4];
        let (logits, params) = (logits(&mut rng, case % KINDS, vocab), params(&mut rng, vocab));
        let penalties = SamplingParams {
            repetition_penalty: 1.4,
            frequency_penalty: 0.3,
            presence_penalty: -0.5,
            ..params.clone()
        };
        let params = if case % 3 == 0 { params } else { penalties };
        let token = |rng: &mut StdRng| rng.random_range(0..vocab as TokenId + 3);
        let tokens: Vec<TokenId> = (0..40).map(|_| token(&mut rng)).collect();
        let history = History::rebuild(&tokens, 20);
        let mut bias: Vec<(TokenId, f32)> =
            (0..case % 4).map(|_| (token(&mut rng), rng.random_range(-50.0..50.0))).collect();
        bias.dedup_by_key(|(token, _)| *token);
        let share = [0.0, 0.002, 0.5, 0.99][case / 4 % 4];
        let any: TokenSet = (0..vocab as TokenId).filter(|_| rng.random_bool(share)).collect();
        let one: TokenSet = std::iter::once(token(&mut rng)).collect();
        let allowed = [[None, None], [Some(&any), None], [None, Some(&one)], [Some(&any), Some(&one)]][case / 16 % 4];
        let barred: Vec<TokenId> = (0..[0, 0, 1, 3][case / 8 % 4]).map(|_| token(&mut rng)).collect();
        let constraints = Constraints { bias: &bias, allowed, barred: &barred };
        let draw = Draw { params: &params, history: &history, position: 40, sample_index: 0, constraints };
        let wanted = draw.sample(&logits);
        for (width, scratch) in &mut scratches {
            assert_eq!(scratch.sample(*width, &draw, &logits), wanted, "{width:?}, {vocab}, {params:?}, {bias:?}");
        }
    }
}

#[test]
fn broken_logits_are_found_wherever_they_are() {
    let (params, history) = (SamplingParams::default(), History::default());
    let constraints = Constraints::default();
    let draw = Draw { params: &params, history: &history, position: 0, sample_index: 0, constraints };
    for width in widths() {
        assert_eq!(Scratch::default().sample(width, &draw, &[]), Err(SampleError::Empty));
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (vocab, at) in [(1, 0), (130, 0), (130, 127), (130, 128), (130, 129), (300, 255)] {
                let mut logits = vec![1.0; vocab];
                (logits[at], logits[vocab - 1]) = (bad, bad);
                let error = Scratch::default().sample(width, &draw, &logits).unwrap_err();
                let SampleError::NotFinite { token, value } = error else { panic!("{error}") };
                assert_eq!((token, value.to_bits()), (at as TokenId, bad.to_bits()), "{width:?}");
            }
        }
    }
}

#[test]
fn warm_rows_take_no_memory() {
    let mut rng = StdRng::seed_from_u64(4);
    let width = *widths().last().unwrap();
    let (mut scratch, mut warm) = (Scratch::default(), None);
    for case in 0..12 {
        let logits = logits(&mut rng, case % KINDS, 5003);
        let params =
            SamplingParams { repetition_penalty: 1.2, temperature: 1.0, top_p: 0.999, ..SamplingParams::default() };
        let history = History::rebuild(&[1, 2, 3], 3);
        let constraints = Constraints::default();
        let draw = Draw { params: &params, history: &history, position: 0, sample_index: 0, constraints };
        scratch.sample(width, &draw, &logits).unwrap();
        let sizes = scratch.capacities();
        assert_eq!(*warm.get_or_insert(sizes), sizes);
    }
}

/// Slots with other parameters each, drafts, a prefill in between, and one row without numbers; step by step on three threads.
#[test]
fn steps_of_many_slots_are_those_of_the_reference() {
    const SLOTS: usize = 9;
    const VOCAB: usize = 300;
    let mut rng = StdRng::seed_from_u64(33);
    let kernels = CpuKernels::new(CpuConfig { threads: 3, ..CpuConfig::default() }).unwrap();
    let (mut ours, mut theirs) = (SlotSamplers::new(SLOTS, VOCAB), SlotSamplers::new(SLOTS, VOCAB));
    let mut accepted = 0;
    for round in 0..40 {
        let mut deltas = Vec::new();
        for slot in (0..SLOTS).filter(|slot| round == 0 || round % SLOTS == *slot) {
            let sampling = SamplingParams { repetition_penalty: 1.2, ..params(&mut rng, VOCAB) };
            deltas.push(Delta::Join(Box::new(Join {
                slot,
                tokens: vec![1, 2],
                prompt_len: 2,
                sampling,
                ..Join::default()
            })));
        }
        let (mut segments, mut ids) = (Vec::new(), Vec::new());
        for slot in 0..SLOTS {
            let samples = [1, 3, 0][(slot + round) % 3];
            let rows = samples.max(2);
            segments.push(SlotRows { slot, position: round, rows, samples, masks: Vec::new() });
            ids.extend((0..rows).map(|_| RowId::Token(rng.random_range(0..3))));
        }
        let mut step = StepInput { deltas, ids, segments, ..StepInput::default() };
        let rows = step.sampling_rows().count();
        // Few tokens are likely, so that drafts are accepted.
        let few = |at: usize| if at % VOCAB < 3 { 9.0 } else { 0.0 };
        let mut logits: Vec<f32> = (0..rows * VOCAB).map(|at| few(at) + rng.random_range(0.0..2.0)).collect();
        logits[round % rows * VOCAB + 7] = f32::NAN;
        step.logit_rows.extend(step.sampling_rows().last());
        let mut ids = [Vec::new(), Vec::new()];
        ours.begin(&step, &mut ids[0]);
        theirs.begin(&step, &mut ids[1]);
        assert_eq!(ids[0], ids[1]);
        let sampled = kernels.sample(&mut ours, &step, &logits);
        let wanted = theirs.sample(&step, &logits);
        // Requested logits may be NaN, which equals nothing.
        assert_eq!(sampled.sampled.len(), 6);
        assert_eq!(format!("{sampled:?}"), format!("{wanted:?}"));
        accepted += sampled.sampled.iter().map(|output| output.accepted).sum::<usize>();
    }
    assert!(accepted > 20, "{accepted} drafts are too few to show anything");
}
