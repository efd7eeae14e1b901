//! The order of attention of class `bf16x32`, by values that no other order takes to the same bits: for the reference and every level.
//!
//! Mostly scores are whole multiples of ln 2, so that weights are powers of two, exact after rounding to bf16.

mod common;

use baton_kernels::cpu::SimdLevel;
use baton_kernels::host::{KvStep, Scores};
use baton_kernels::numerics::Numerics;
use baton_kernels::numerics::exp;
use baton_kernels::step::StepSegment;
use baton_types::{BlockId, BlockTable, Dtype, KvLayout};
use common::{cpu, pool};
use half::bf16;
use std::f32::consts::LN_2;

const BLOCK: usize = 16;

/// Absorbs a 1 that is added to it.
const BIG: f32 = 33_554_432.0;

/// Weight 0 beside a score of 0.
const NOTHING: f32 = -250.0;

/// A sequence whose heads have two elements.
struct Sequence {
    /// Score of each token in units of `scale`; bf16.
    scores: Vec<f32>,
    values: Vec<f32>,
    scale: f32,
    window: Option<usize>,
    /// Of the only head.
    sink: Option<f32>,
}

impl Sequence {
    /// All scores and values alike.
    fn new(tokens: usize, score: f32, value: f32) -> Self {
        Self { scores: vec![score; tokens], values: vec![value; tokens], scale: LN_2, window: None, sink: None }
    }

    fn sink(mut self, sink: f32) -> Self {
        self.sink = Some(sink);
        self
    }

    fn scores(mut self, scores: &[(usize, f32)]) -> Self {
        scores.iter().for_each(|&(token, score)| self.scores[token] = score);
        self
    }

    fn values(mut self, values: &[(usize, f32)]) -> Self {
        values.iter().for_each(|&(token, value)| self.values[token] = value);
        self
    }

    /// Checks the output of the row that sees `seen` tokens.
    fn check(&self, seen: usize, want: f32) {
        let tokens = self.scores.len();
        let layout = KvLayout::llama(BLOCK as u32, 1, 1, 2, Dtype::Bf16).unwrap();
        let (memory, map, kv) = pool(layout, tokens.div_ceil(BLOCK));
        for token in 0..tokens {
            for (plane, x) in [self.scores[token], self.values[token]].into_iter().enumerate() {
                let at = (token % BLOCK) as u32;
                let range = map.token_range(0, 0, BlockId((token / BLOCK) as u32), plane, at..at + 1);
                let rounded = bf16::from_f32(x);
                assert!(rounded.to_f32() == x || x.is_nan(), "{x} is no bf16");
                memory.copy_in(range.start, &[rounded.to_le_bytes(), [0, 0]].concat());
            }
        }
        let blocks = (0..tokens.div_ceil(BLOCK) as u32).map(BlockId).collect();
        // Alone, behind a row that sees less, and before one that sees more.
        for (before, after) in [(0, 0), (1, 0), (0, 1)] {
            let rows = before + 1 + after;
            if seen + after > tokens {
                continue;
            }
            let segments =
                [StepSegment { position: seen - before - 1, rows, table: BlockTable::from_start(Vec::clone(&blocks)) }];
            let step = KvStep { kv: &kv, layer: 0, segments: &segments };
            let scores = Scores {
                scale: self.scale,
                window: self.window,
                soft_cap: None,
                sinks: self.sink.as_ref().map(std::slice::from_ref),
            };
            let q = [1.0, 0.0].repeat(rows);
            let check = |name: &str, attend: &dyn Fn(&mut [f32])| {
                let mut out = vec![f32::NAN; q.len()];
                attend(&mut out);
                let got = out[2 * before];
                let company = format!("{before} rows before, {after} after");
                assert_eq!(got.to_bits(), want.to_bits(), "{name}, {company}: {got:e} is not {want:e}");
            };
            check("reference", &|out| common::reference(Numerics::Bf16x32).attend(step, &q, scores, out));
            for (level, threads) in [
                (SimdLevel::Portable, 1),
                (SimdLevel::AmxScalar, 1),
                (SimdLevel::Amx, 1),
                (SimdLevel::Avx512Bf16, 1),
                (SimdLevel::Avx512Bf16, 2),
                (SimdLevel::Avx2Fma, 2),
            ] {
                let Some(cpu) = cpu(threads, level, Numerics::Bf16x32) else { continue };
                check(&format!("{level:?}, {threads} threads"), &|out| cpu.attend(step, &q, scores, out));
            }
        }
    }
}

#[test]
fn values_are_summed_in_even_and_odd_chains_of_groups() {
    for (values, sum) in [
        (vec![(0, 1.0), (2, BIG), (4, -BIG)], 0.0), // ascending within the even chain
        (vec![(0, BIG), (1, 1.0), (2, -BIG)], 1.0), // odd is apart from even
        (vec![(1, 1.0), (29, BIG), (31, -BIG)], 0.0), // to the end of a group
        (vec![(31, 1.0), (32, BIG), (34, -BIG)], 1.0), // chains end with the group
        (vec![(0, 1.0), (32, BIG), (33, -BIG)], 1.0), // even and odd are added before the total
        (vec![(0, 1.0), (31, BIG), (32, -BIG)], 0.0), // groups ascend
        (vec![(63, 1.0), (64, BIG), (65, -BIG)], 1.0), // into the next block
    ] {
        Sequence::new(128, 0.0, 0.0).values(&values).check(128, sum / 128.0);
    }
}

#[test]
fn weights_are_summed_in_sixteen_lanes() {
    // Beside 1, 2^-24 is lost alone, and two of them are not if they are added to each other first.
    for (tokens, sum) in [
        ([16, 32], 1.0),               // ascending within lane 0
        ([1, 17], 1.0 + f32::EPSILON), // lane 1
        ([1, 9], 1.0 + f32::EPSILON),  // 1 and 9 before all else
        ([8, 24], 1.0 + f32::EPSILON), // lane 8
        ([8, 4], 1.0),                 // 8, then 4 are added to 0
        ([4, 12], 1.0 + f32::EPSILON),
        ([2, 6], 1.0 + f32::EPSILON),
        ([1, 3], 1.0 + f32::EPSILON),
        ([4, 2], 1.0),
        ([4, 1], 1.0),
    ] {
        let scores = [(0, 0.0), (tokens[0], -24.0), (tokens[1], -24.0)];
        Sequence::new(64, NOTHING, 0.0).scores(&scores).values(&[(0, 1.0)]).check(64, 1.0 / sum);
    }
}

/// Its bf16.
fn weight(difference: f32) -> f32 {
    bf16::from_f32(exp(difference)).to_f32()
}

/// Not a multiple of ln 2, so that no factor is a power of two.
const SCALE: f32 = 0.3;

#[test]
fn each_block_has_the_maximum_so_far() {
    // Three weights of 1 below a later maximum: they are scaled by a factor that is not rounded to bf16.
    let max = 7.0 * SCALE;
    let a = exp(0.0 - max);
    assert_ne!(a, weight(0.0 - max));
    for (block, later) in [(0, 64), (1, 128)] {
        let at = 64 * block;
        let scores = [(at, 0.0), (at + 1, 0.0), (at + 2, 0.0), (later, 7.0)];
        let values = [(at, 1.0), (at + 1, 3.0), (at + 2, 7.0), (later, 5.0)];
        let (sum, o) = (3.0f32.mul_add(a, 1.0), 11.0 * a + 5.0);
        let mut sequence = Sequence::new(later + 1, 4.0 * NOTHING, 0.0).scores(&scores).values(&values);
        sequence.scale = SCALE;
        sequence.check(later + 1, o / sum);
        // Within one block, weights are relative to its own maximum.
        let w = weight(0.0 - max);
        let mut within = Sequence::new(later + 5, 4.0 * NOTHING, 0.0).scores(&[(later + 1, 0.0), (later + 4, 7.0)]);
        within.scale = SCALE;
        within.values(&[(later + 1, 3.0), (later + 4, 5.0)]).check(later + 5, (3.0 * w + 5.0) / (w + 1.0));
    }
}

#[test]
fn splits_merge_in_order_and_round_twice() {
    let [mut split_or_block, mut orders] = [0, 0];
    let sequence = |tokens, scores: &[(usize, f32)], values: &[(usize, f32)]| {
        let mut sequence = Sequence::new(tokens, 4.0 * NOTHING, 0.0).scores(scores).values(values);
        sequence.scale = SCALE;
        sequence
    };
    for m in (1..=20).map(|m| m as f32) {
        let max = m * SCALE;
        let a = exp(0.0 - max);
        // The state of the first split.
        let w = weight(-3.0 * SCALE);
        let (l, o) = (1.0 + w, 3.0 + 5.0 * w);
        // The second one has one weight of 1.
        let (sum, total) = (l * a + 1.0, 7.0f32.mul_add(1.0, o * a));
        let values = [(3, 3.0), (5, 5.0), (512, 7.0)];
        sequence(513, &[(3, 0.0), (5, -3.0), (512, m)], &values).check(513, total / sum);
        // One token earlier it is a block of the same split.
        let (block_sum, block_total) = (l.mul_add(a, 1.0), o * a + 7.0);
        let values = [(3, 3.0), (5, 5.0), (511, 7.0)];
        sequence(512, &[(3, 0.0), (5, -3.0), (511, m)], &values).check(512, block_total / block_sum);
        split_or_block += usize::from(total / sum != block_total / block_sum);
        // A third split is merged with both: (0 + 1) + 2, never 0 + (1 + 2).
        let top = (m + 2.0) * SCALE;
        let b = exp(max - top);
        let (sum, total) = (sum * b + 1.0, 9.0f32.mul_add(1.0, total * b));
        let values = [(3, 3.0), (5, 5.0), (512, 7.0), (1024, 9.0)];
        let scores = [(3, 0.0), (5, -3.0), (512, m), (1024, m + 2.0)];
        sequence(1025, &scores, &values).check(1025, total / sum);
        let (later_sum, later_total, c) = (b + 1.0, 7.0 * b + 9.0, exp(0.0 - top));
        orders += usize::from(total / sum != (o * c + later_total) / (l * c + later_sum));
    }
    assert!(split_or_block > 0 && orders > 0, "all orders round alike: nothing is shown");
}

#[test]
fn tokens_that_a_row_does_not_attend_to_count_as_zero() {
    for hidden in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        // Behind the row, in its block.
        let after = Sequence::new(80, 0.0, 1.0).values(&[(70, hidden), (79, hidden)]).scores(&[(71, hidden)]);
        after.check(70, 1.0);
        // Before the window, within the block of its first token and in blocks before.
        let mut before = Sequence::new(200, 0.0, 1.0).values(&[(3, hidden), (130, hidden)]).scores(&[(131, hidden)]);
        before.window = Some(60);
        before.check(200, 1.0);
    }
}

#[test]
fn a_chain_of_minus_zero_is_plus_zero_behind_the_last_token() {
    // O is -0, since its scaling was flushed, and so are all chains of the second block, since their products were. So is the result, unless
    // a chain ends with the +0 of tokens that the row does not attend to, whatever the sign of their values.
    let tiny = -(2f32.powi(-60));
    let flushed = [92, 93, 94, 95, 124, 125, 126, 127];
    let scores: Vec<(usize, f32)> =
        flushed.into_iter().map(|token| (token, -100.0)).chain([(0, 0.0), (64, 8.0)]).collect();
    let values: Vec<(usize, f32)> =
        flushed.into_iter().map(|token| (token, tiny)).chain([(0, -(2f32.powi(-120)))]).collect();
    for (seen, want) in [(128, -0.0), (127, 0.0), (126, 0.0), (95, 0.0)] {
        Sequence::new(128, NOTHING, 0.0).scores(&scores).values(&values).check(seen, want);
    }
}

#[test]
fn products_are_flushed() {
    // 2^-100 * 2^-60 is zero, and so is a sum of products below the least normal number.
    let scores = [(0, 0.0), (2, -100.0)];
    let values = [(2, 2f32.powi(-60))];
    Sequence::new(3, NOTHING, 0.0).scores(&scores).values(&values).check(3, 0.0);
    // A result is subnormal if it is so after rounding to 24 bits: 2^-126 - 2^-150, but not 2^-126 - 2^-151.
    for (power, want) in [(-120, 0.0), (-121, f32::MIN_POSITIVE)] {
        let values = [(0, f32::MIN_POSITIVE), (2, -(2f32.powi(power)))];
        Sequence::new(3, NOTHING, 0.0).scores(&[(0, 0.0), (2, -30.0)]).values(&values).check(3, want);
    }
    // A subnormal factor is zero, whatever it scales.
    let scores = [(0, 0.0), (64, 130.0)];
    Sequence::new(65, NOTHING, 0.0).scores(&scores).values(&[(0, 2f32.powi(60))]).check(65, 0.0);
    // The scaling of O: 2^-120 * 2^-8 is flushed, which the next block does not bring back.
    let tiny = 2f32.powi(-120);
    let scores = [(0, 0.0), (64, 8.0)];
    Sequence::new(65, NOTHING, 0.0).scores(&scores).values(&[(0, tiny)]).check(65, 0.0);
    Sequence::new(65, NOTHING, 0.0).scores(&[(0, 0.0), (64, 4.0)]).values(&[(0, tiny)]).check(65, {
        let a = exp(0.0 - 4.0 * LN_2);
        tiny * a / 1.0f32.mul_add(a, 1.0)
    });
}

#[test]
fn a_sink_joins_behind_the_last_split() {
    // Beside 1, less than 2^-24 is lost; two of them are not if they are added to each other first.
    let small = -24.5f32;
    let sequence = Sequence::new(600, NOTHING, 0.0).scores(&[(0, 0.0), (512, small)]).values(&[(0, 1.0)]);
    sequence.sink(small * LN_2).check(600, 1.0);
    Sequence::new(64, 0.0, 1.0).sink(0.0).check(2, 2.0 / 3.0);
    Sequence::new(600, 0.0, 1.0).sink(400.0).check(600, 0.0);
}
