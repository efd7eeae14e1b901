//! The order of attention of the tensor-core classes, by values that no other order takes to the same bits: for the reference and the CPU.
//!
//! Mostly scores are whole, and the factor of scores is 1, so that weights are powers of two.

mod common;

use baton_kernels::cpu::SimdLevel;
use baton_kernels::host::{KvStep, Scores};
use baton_kernels::numerics::{Half, Numerics, TensorCore, exp2};
use baton_kernels::step::StepSegment;
use baton_types::{BlockId, BlockTable, KvLayout};
use common::{cpu, pool, reference};
use std::f32::consts::{LN_2, LOG2_E};

const BLOCK: usize = 16;

const CLASSES: [(TensorCore, Half); 4] = [
    (TensorCore::Tc16F25, Half::Bf16),
    (TensorCore::Tc16F25, Half::F16),
    (TensorCore::Tc8F24, Half::Bf16),
    (TensorCore::Tc8F24, Half::F16),
];

/// Weight 0 beside a score of 0.
const NOTHING: f32 = -512.0;

/// A scale with which weights are no powers of two.
const SCALE: f32 = 0.3;

/// A sequence whose heads have two elements.
#[derive(Clone)]
struct Sequence {
    /// Score of each token, before the factor.
    scores: Vec<f32>,
    values: Vec<f32>,
    scale: f32,
    window: Option<usize>,
    /// Of the only head.
    sink: Option<f32>,
}

impl Sequence {
    /// All scores and values alike. The factor of scores is 1.
    fn new(tokens: usize, score: f32, value: f32) -> Self {
        let factor = LN_2 * LOG2_E;
        assert_eq!(factor, 1.0);
        Self { scores: vec![score; tokens], values: vec![value; tokens], scale: LN_2, window: None, sink: None }
    }

    fn scores(mut self, scores: &[(usize, f32)]) -> Self {
        scores.iter().for_each(|&(token, score)| self.scores[token] = score);
        self
    }

    fn values(mut self, values: &[(usize, f32)]) -> Self {
        values.iter().for_each(|&(token, value)| self.values[token] = value);
        self
    }

    fn sink(mut self, sink: f32) -> Self {
        self.sink = Some(sink);
        self
    }

    fn window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// Checks the output of the row that sees `seen` tokens, in each class.
    fn check(&self, seen: usize, want: f32) {
        CLASSES.into_iter().for_each(|class| self.check_in(class, seen, want));
    }

    fn check_in(&self, (cores, half): (TensorCore, Half), seen: usize, want: f32) {
        let (tokens, class) = (self.scores.len(), Numerics::TensorCore { cores, half });
        let layout = KvLayout::llama(BLOCK as u32, 1, 1, 2, half.dtype()).unwrap();
        let (memory, map, kv) = pool(layout, tokens.div_ceil(BLOCK));
        for token in 0..tokens {
            for (plane, x) in [self.scores[token], self.values[token]].into_iter().enumerate() {
                let at = (token % BLOCK) as u32;
                let range = map.token_range(0, 0, BlockId((token / BLOCK) as u32), plane, at..at + 1);
                assert!(half.round(x) == x || x.is_nan(), "{x} is not of {half:?}");
                memory.copy_in(range.start, &[half.from_f32(x).to_le_bytes(), [0, 0]].concat());
            }
        }
        let blocks: Vec<_> = (0..tokens.div_ceil(BLOCK) as u32).map(BlockId).collect();
        // Alone, behind a row that sees less, and before one that sees more.
        for (before, after) in [(0, 0), (1, 0), (0, 1)] {
            let rows = before + 1 + after;
            if seen + after > tokens {
                continue;
            }
            let segments =
                [StepSegment { position: seen - before - 1, rows, table: BlockTable::from_start(blocks.clone()) }];
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
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{class} {half:?}, {name}, {before} rows before, {after} after: {got:e}, not {want:e}");
            };
            check("reference", &|out| reference(class).attend(step, &q, scores, out));
            for (level, threads) in [(SimdLevel::Portable, 1), (SimdLevel::Avx2Fma, 2), (SimdLevel::Avx512, 1)] {
                let Some(cpu) = cpu(threads, level, class) else { continue };
                check(&format!("{level:?}, {threads} threads"), &|out| cpu.attend(step, &q, scores, out));
            }
        }
    }
}

#[test]
fn values_are_summed_in_groups_of_exact_products() {
    const BIG: f32 = 4096.0;
    for class in CLASSES {
        let (group, fraction) = (class.0.group(), class.0.fraction() as i32);
        // The least term beside the large one, and what is cut.
        let least = BIG * 2f32.powi(-fraction);
        let cut = least / 2.0;
        for (values, sum) in [
            (vec![(0, BIG), (1, least), (2, -BIG)], least),
            (vec![(0, BIG), (1, cut), (2, -BIG)], 0.0),
            (vec![(0, BIG), (1, -cut), (2, -BIG)], 0.0), // towards zero
            (vec![(0, BIG), (1, least), (group - 1, -BIG)], least), // the end of a group
            (vec![(0, BIG), (1, least), (group, -BIG)], 0.0), // behind it, 24 bits are left
            (vec![(0, least), (group - 1, BIG), (group, -BIG)], 0.0),
            (vec![(group - 1, least), (group, BIG), (group + 1, -BIG)], least), // groups ascend
            (vec![(63, least), (64, BIG), (65, -BIG)], least),                  // into the next block
        ] {
            Sequence::new(128, 0.0, 0.0).values(&values).check_in(class, 128, sum / 128.0);
        }
    }
}

#[test]
fn weights_are_summed_in_eight_lanes() {
    // Beside 1, 2^-24 is lost alone, and two of them are not if they are added to each other first.
    for (tokens, sum) in [
        ([8, 16], 1.0),                // ascending within lane 0
        ([1, 9], 1.0 + f32::EPSILON),  // lane 1
        ([7, 63], 1.0 + f32::EPSILON), // to the end of the block
        ([4, 12], 1.0 + f32::EPSILON),
        ([2, 6], 1.0 + f32::EPSILON),
        ([1, 5], 1.0 + f32::EPSILON),
        ([3, 7], 1.0 + f32::EPSILON),
        ([1, 3], 1.0 + f32::EPSILON),
        ([4, 2], 1.0),
        ([4, 1], 1.0),
        ([2, 1], 1.0),
        ([65, 73], 1.0 + f32::EPSILON), // lanes go on in the next block
        ([8, 65], 1.0),
        ([1, 65], 1.0 + f32::EPSILON),
    ] {
        let scores = [(0, 0.0), (tokens[0], -24.0), (tokens[1], -24.0)];
        Sequence::new(128, NOTHING, 0.0).scores(&scores).values(&[(0, 1.0)]).check(128, 1.0 / sum);
    }
}

/// [`SCALE`] as a factor of powers of two.
const FACTOR: f32 = SCALE * LOG2_E;

/// The weight of a score beside this maximum. That of the maximum is not always 1.
fn weight(score: f32, max: f32) -> f32 {
    exp2(score.mul_add(FACTOR, -(max * FACTOR)))
}

/// What values of a smaller maximum are multiplied with.
fn decay(max: f32, of_all: f32) -> f32 {
    exp2((max - of_all) * FACTOR)
}

/// All tokens but these have weight 0 and value 0.
fn scaled(tokens: usize, scores: &[(usize, f32)], values: &[(usize, f32)]) -> Sequence {
    Sequence { scale: SCALE, ..Sequence::new(tokens, NOTHING, 0.0).scores(scores).values(values) }
}

#[test]
fn the_first_weight_of_a_lane_is_added_by_fma() {
    let mut shown = 0;
    for m in (1..=12).map(|m| m as f32) {
        // Lane 0 has two weights of the first block, and one of the second.
        let (l, a, last) = (1.0 + weight(-3.0, 0.0), decay(0.0, m), weight(m, m));
        let sum = l.mul_add(a, last);
        scaled(65, &[(0, 0.0), (8, -3.0), (64, m)], &[(64, 1.0)]).check(65, 1.0 / sum);
        // Token 72 is not the first of its lane.
        let later = l * a + last;
        scaled(73, &[(0, 0.0), (8, -3.0), (72, m)], &[(72, 1.0)]).check(73, 1.0 / later);
        shown += usize::from(1.0 / sum != 1.0 / later);
    }
    assert!(shown > 0, "both round alike: nothing is shown");
}

#[test]
fn weights_are_relative_to_the_maximum_so_far() {
    let mut shown = [0; 3];
    for m in (1..=40).map(|m| m as f32 / 4.0) {
        // Within a block: by fma.
        let (w, last) = (weight(-1.0, m), weight(m, m));
        let r = 1.0 / (last + w);
        let scores = [(1, -1.0), (2, m)];
        scaled(3, &scores, &[(2, 1.0)]).check(3, r);
        shown[0] += usize::from(w != decay(-1.0, m));
        // The sum takes it as it is, the output rounded.
        for class in CLASSES {
            let rounded = class.1.round(w);
            scaled(3, &scores, &[(1, 1.0)]).check_in(class, 3, rounded * r);
            shown[1] += usize::from(rounded * r != w * r);
        }
        // Between blocks: by a difference, and without rounding to 16 bits.
        let a = decay(-1.0, m);
        let r = 1.0 / (last + a);
        let scores = [(1, -1.0), (64, m)];
        scaled(65, &scores, &[(64, 1.0)]).check(65, r);
        scaled(65, &scores, &[(1, 1.0)]).check(65, a * r);
        shown[2] += usize::from(r != 1.0 / (last + w));
    }
    assert!(shown.into_iter().all(|shown| shown > 0), "nothing is shown: {shown:?}");
}

#[test]
fn splits_merge_in_order_and_round_twice() {
    let [mut split_or_block, mut orders] = [0, 0];
    for m in (1..=20).map(|m| m as f32) {
        let a = decay(0.0, m);
        // The state of the first split, whose weights are in lanes 3 and 5, and the weight in the second one.
        let (w, second) = (weight(-3.0, 0.0), weight(m, m));
        let (l, o) = (1.0 + w, 3.0);
        let (sum, total) = (l * a + second, o * a + 7.0);
        let scores = |token| [(3, 0.0), (5, -3.0), (token, m)];
        scaled(513, &scores(512), &[(3, o), (512, 7.0)]).check(513, total * (1.0 / sum));
        // One token earlier it is a block of the same split, where tensor cores add to the output.
        let block_sum = w * a + (a + second);
        for (cores, half) in CLASSES {
            let block_total = cores.dot(half, o * a, &[half.from_f32(second)], &[half.from_f32(7.0)]);
            let want = block_total * (1.0 / block_sum);
            scaled(512, &scores(511), &[(3, o), (511, 7.0)]).check_in((cores, half), 512, want);
            split_or_block += usize::from(want != total * (1.0 / sum));
        }
        // A third split is merged with both: (0 + 1) + 2, never 0 + (1 + 2).
        let top = m + 2.0;
        let (b, third) = (decay(m, top), weight(top, top));
        let want = (total * b + 9.0) * (1.0 / (sum * b + third));
        let values = [(3, o), (512, 7.0), (1024, 9.0)];
        scaled(1025, &[&scores(512)[..], &[(1024, top)]].concat(), &values).check(1025, want);
        let c = decay(0.0, top);
        let other = (o * c + (7.0 * b + 9.0)) * (1.0 / (l * c + (second * b + third)));
        orders += usize::from(want != other);
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
        let before = Sequence::new(200, 0.0, 1.0).values(&[(3, hidden), (130, hidden)]).scores(&[(131, hidden)]);
        before.clone().window(64).check(199, 1.0);
        before.window(5).check(137, 1.0);
    }
    // A window of one token, and one that begins with a split.
    Sequence::new(600, 3.0, 2.0).values(&[(577, 5.0)]).window(1).check(578, 5.0);
    Sequence::new(600, 0.0, 1.0).values(&[(511, f32::NAN)]).window(64).check(576, 1.0);
}

#[test]
fn what_is_not_finite_goes_to_the_result() {
    for x in [f32::NAN, f32::INFINITY] {
        Sequence::new(70, 0.0, 1.0).scores(&[(66, x)]).check(70, f32::NAN);
        Sequence::new(70, 0.0, 1.0).values(&[(3, x)]).check(70, x);
    }
    // A weight of zero times infinity.
    Sequence::new(70, 0.0, 1.0).scores(&[(3, NOTHING)]).values(&[(3, f32::INFINITY)]).check(70, f32::NAN);
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
