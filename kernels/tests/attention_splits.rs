//! Attention of the classes that cut contexts into splits: every level has the bits of the reference, and the reference computes softmax attention.

mod common;

use baton_kernels::KvBinding;
use baton_kernels::cpu::SimdLevel;
use baton_kernels::host::{KvStep, Scores};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::step::StepSegment;
use baton_memory::HostPool;
use baton_types::{Attention, BlockId, BlockTable, KvLayout, KvPoolMap, LayerKv};
use common::{Random, cpu, pool};
use proptest::prelude::*;
use std::sync::Arc;

/// Sequences and heads; every sequence has stored as many tokens as its segment's end.
#[derive(Clone, Debug)]
struct Case {
    numerics: Numerics,
    kv_heads: usize,
    group: usize,
    dim: usize,
    /// One plane of one head, whose first elements are values, as many as this.
    latent: Option<usize>,
    block: usize,
    scores: Scores<'static>,
    /// Position and rows.
    segments: Vec<(usize, usize)>,
    values: Values,
    seed: u64,
}

impl Case {
    /// The type of keys and values.
    fn half(&self) -> Half {
        self.numerics.kv().and_then(Half::of).unwrap()
    }

    fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.dim)
    }

    fn layout(&self) -> KvLayout {
        let (kv_heads, dim) = (self.kv_heads as u32, self.dim as u32);
        let kv = match self.latent {
            Some(_) => LayerKv::Latent { dim },
            None => LayerKv::Heads { kv_heads, head_dim: dim },
        };
        Attention::alike(1, kv, None).layout(self.block as u32, self.half().dtype()).unwrap()
    }
}

/// `i8x32` has the attention of `bf16x32`.
const CLASSES: [Numerics; 3] = [
    Numerics::Bf16x32,
    Numerics::TensorCore { cores: TensorCore::Tc16F25, half: Half::Bf16 },
    Numerics::TensorCore { cores: TensorCore::Tc8F24, half: Half::F16 },
];

/// What keys, values and queries are like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    Plain,
    /// Scores are far below zero.
    Negative,
    /// Differences of scores reach beyond the range of the exponential.
    Sharp,
    /// Around the least normal number, with zeros of both signs.
    Tiny,
    /// Some are infinite or NaN.
    Special,
}

struct Batch {
    case: Case,
    memory: Arc<HostPool>,
    map: KvPoolMap,
    kv: KvBinding,
    segments: Vec<StepSegment>,
    /// `[segment][row][cols]`.
    q: Vec<Vec<f32>>,
}

impl Batch {
    fn new(case: Case) -> Self {
        let mut random = Random(case.seed);
        let half = case.half();
        let layout = case.layout();
        let planes = layout.groups()[0].planes.len();
        let each: Vec<usize> = case.segments.iter().map(|(p, rows)| (p + rows).div_ceil(case.block)).collect();
        let total: usize = each.iter().sum();
        let (memory, map, kv) = pool(layout, total);
        // Scattered: block i of all goes to i * odd mod total, or backwards.
        let odd = (total / 2..).find(|x| gcd(*x, total) == 1).unwrap();
        let mut ids = (0..total).map(|i| BlockId((i * odd % total) as u32));
        let cols = case.kv_heads * case.dim;
        let mut segments = Vec::new();
        for (&(position, rows), each) in case.segments.iter().zip(&each) {
            let blocks: Vec<BlockId> = ids.by_ref().take(*each).collect();
            for token in 0..position + rows {
                for plane in 0..planes {
                    let at = (token % case.block) as u32;
                    let range = map.token_range(0, 0, blocks[token / case.block], plane, at..at + 1);
                    let bytes: Vec<u8> = (0..cols)
                        .flat_map(|_| half.from_f32(case.values.element(&mut random, plane)).to_le_bytes())
                        .collect();
                    assert_eq!(bytes.len(), range.len());
                    memory.copy_in(range.start, &bytes);
                }
            }
            segments.push(StepSegment { position, rows, table: BlockTable::from_start(blocks) });
        }
        let q = |(_, rows): &(usize, usize)| -> Vec<f32> {
            (0..rows * cols * case.group).map(|_| case.values.query(&mut random)).collect()
        };
        let q = case.segments.iter().map(q).collect();
        Self { case, memory, map, kv, segments, q }
    }

    /// Offset of a token's row of a plane.
    fn kv_at(&self, block: BlockId, plane: usize, token: usize) -> usize {
        self.map.token_range(0, 0, block, plane, token as u32..token as u32 + 1).start
    }

    /// All rows in one step.
    fn run(&self, attend: impl Fn(KvStep<'_>, &[f32], Scores<'_>, &mut [f32])) -> Vec<u32> {
        self.step(&self.segments, &self.q.concat(), attend)
    }

    fn step(
        &self,
        segments: &[StepSegment],
        q: &[f32],
        attend: impl Fn(KvStep<'_>, &[f32], Scores<'_>, &mut [f32]),
    ) -> Vec<u32> {
        let mut out = vec![f32::NAN; q.len() / self.case.dim * self.case.value_dim()];
        attend(KvStep { kv: &self.kv, layer: 0, segments }, q, self.case.scores, &mut out);
        out.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    /// Every row in a step of its own.
    fn one_by_one(&self, attend: impl Fn(KvStep<'_>, &[f32], Scores<'_>, &mut [f32])) -> Vec<u32> {
        let cols = self.case.kv_heads * self.case.group * self.case.dim;
        let mut out = Vec::new();
        for (segment, q) in self.segments.iter().zip(&self.q) {
            for (row, q) in q.chunks_exact(cols).enumerate() {
                let alone = StepSegment { position: segment.position + row, rows: 1, ..segment.clone() };
                out.extend(self.step(&[alone], q, &attend));
            }
        }
        out
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Values {
    fn element(self, random: &mut Random, plane: usize) -> f32 {
        let x = random.float();
        let kind = random.next() % 64;
        match self {
            Self::Plain => x,
            Self::Negative if plane == 0 => x.abs() + 0.1,
            Self::Sharp if plane == 0 => 40.0 * x,
            Self::Tiny if plane == 1 => match kind {
                0..8 => 0.0f32.copysign(x),
                _ => x * 2f32.powi(-110 - (kind / 3) as i32),
            },
            Self::Special => match kind {
                0 if random.next().is_multiple_of(16) => {
                    [f32::INFINITY, f32::NEG_INFINITY, f32::NAN][(random.next() % 3) as usize]
                }
                1 => x * f32::MIN_POSITIVE,
                _ => x,
            },
            _ => x,
        }
    }

    fn query(self, random: &mut Random) -> f32 {
        let x = random.float();
        match self {
            Self::Negative => -x.abs(),
            Self::Sharp | Self::Tiny => 8.0 * x,
            Self::Special if random.next().is_multiple_of(256) => x * f32::MIN_POSITIVE,
            _ => 2.0 * x,
        }
    }
}

const OF_BF16X32: [(SimdLevel, usize); 9] = [
    (SimdLevel::Amx, 1),
    (SimdLevel::Amx, 3),
    (SimdLevel::AmxScalar, 1),
    (SimdLevel::AmxScalar, 2),
    (SimdLevel::Avx512Bf16, 1),
    (SimdLevel::Avx512Bf16, 3),
    (SimdLevel::Avx2Fma, 1),
    (SimdLevel::Avx2Fma, 3),
    (SimdLevel::Portable, 2),
];

const OF_TENSOR_CORES: [(SimdLevel, usize); 3] =
    [(SimdLevel::Avx512, 3), (SimdLevel::Avx2Fma, 1), (SimdLevel::Portable, 2)];

/// In each class.
fn check_all(case: &Case) {
    CLASSES.into_iter().for_each(|numerics| check(Case { numerics, ..case.clone() }));
}

fn check(case: Case) {
    check_batch(&Batch::new(case));
}

fn check_batch(batch: &Batch) {
    let case = &batch.case;
    let reference = common::reference(case.numerics);
    let want = batch.run(|step, q, scores, out| reference.attend(step, q, scores, out));
    let levels: &[_] = if case.numerics == Numerics::Bf16x32 { &OF_BF16X32 } else { &OF_TENSOR_CORES };
    for &(level, threads) in levels {
        let Some(cpu) = cpu(threads, level, case.numerics) else { continue };
        let attend =
            |step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]| cpu.attend(step, q, scores, out);
        equal(case, &want, &batch.run(attend), &format!("{level:?}, {threads} threads"));
        if level != SimdLevel::Portable {
            equal(case, &want, &batch.one_by_one(attend), &format!("{level:?}, {threads} threads, one by one"));
        }
    }
}

fn equal(case: &Case, want: &[u32], got: &[u32], what: &str) {
    let cols = case.kv_heads * case.group * case.value_dim();
    let bad: Vec<String> = want
        .iter()
        .zip(got)
        .enumerate()
        .filter(|(_, (a, b))| a != b)
        .map(|(i, (a, b))| {
            format!("row {} col {}: {:e} is not {:e}", i / cols, i % cols, f32::from_bits(*b), f32::from_bits(*a))
        })
        .collect();
    assert!(
        bad.is_empty(),
        "{what}, {case:?}: {} of {} differ: {:#?}",
        bad.len(),
        want.len(),
        &bad[..bad.len().min(5)]
    );
}

const PLAIN: Case = Case {
    numerics: Numerics::Bf16x32,
    kv_heads: 2,
    group: 3,
    dim: 64,
    latent: None,
    block: 16,
    scores: Scores { scale: 0.125, window: None, soft_cap: None, sinks: None },
    segments: Vec::new(),
    values: Values::Plain,
    seed: 1,
};

#[test]
fn rows_around_the_ends_of_blocks_and_splits() {
    for window in [None, Some(1), Some(64), Some(100), Some(449), Some(513)] {
        for values in [Values::Plain, Values::Negative, Values::Special] {
            let segments = vec![(60, 9), (505, 12), (1020, 1), (0, 3)];
            check_all(&Case { scores: Scores { window, ..PLAIN.scores }, segments, values, ..PLAIN });
        }
    }
}

/// Far below and above the scores, and among them; the first is of no effect.
const SINKS: [f32; 27] = {
    let some = [f32::NEG_INFINITY, -60.0, -1.0, 0.5, 3.0, 70.0, 0.0];
    let (mut all, mut head) = ([0.0; 27], 0);
    while head < all.len() {
        all[head] = some[head % some.len()];
        head += 1;
    }
    all
};

#[test]
fn sinks_join_behind_all_splits() {
    let sinks = Some(&SINKS[..]);
    for window in [None, Some(1), Some(100), Some(513)] {
        for values in [Values::Plain, Values::Negative, Values::Sharp, Values::Special] {
            let segments = vec![(60, 9), (505, 12), (1020, 1), (0, 3), (2100, 1)];
            check_all(&Case { scores: Scores { window, sinks, ..PLAIN.scores }, segments, values, ..PLAIN });
        }
    }
    // Divided between threads, in heads of another size.
    let scores = Scores { sinks, ..PLAIN.scores };
    check_all(&Case { scores, segments: vec![(9_000, 1), (40, 2)], kv_heads: 1, dim: 10, ..PLAIN });
}

#[test]
fn heads_of_one_size_leave_nothing_to_those_of_another() {
    for dim in [64, 10, 80, 6, 96, 128, 12, 32, 34, 256] {
        check_all(&Case { dim, group: 1 + dim % 5, segments: vec![(70, 2), (0, 5)], ..PLAIN });
    }
}

#[test]
fn a_chunk_of_a_long_prompt() {
    check_all(&Case { segments: vec![(900, 150)], kv_heads: 1, group: 2, ..PLAIN });
}

#[test]
fn heads_of_many_short_sequences_are_together() {
    for (group, window, values) in
        [(3, None, Values::Plain), (4, Some(70), Values::Sharp), (1, None, Values::Special), (17, None, Values::Tiny)]
    {
        let segments = (0..13).map(|i| (i * 37, 1 + i % 2)).chain([(600, 1)]).collect();
        check_all(&Case { kv_heads: 3, group, scores: Scores { window, ..PLAIN.scores }, segments, values, ..PLAIN });
    }
}

#[test]
fn a_value_that_is_not_finite_in_one_of_many_heads() {
    let segments: Vec<_> = (0..15).map(|i| (i * 37, 2)).collect();
    for (head, numerics) in (0..3).flat_map(|head| CLASSES.map(|numerics| (head, numerics))) {
        let batch = Batch::new(Case { numerics, kv_heads: 3, segments: segments.clone(), ..PLAIN });
        for segment in &batch.segments {
            // The first of both rows does not attend to it.
            let (last, block) = (segment.position + 1, batch.case.block);
            let at = batch.kv_at(segment.table.blocks[last / block], 1, last % block) + head * batch.case.dim * 2;
            batch.memory.copy_in(at, &batch.case.half().from_f32(f32::INFINITY).to_le_bytes());
        }
        check_batch(&batch);
    }
}

#[test]
fn a_long_sequence_among_short_ones_is_divided() {
    let segments = std::iter::once((12_000, 1)).chain((0..13).map(|i| (10 + i, 1))).collect();
    check_all(&Case { segments, kv_heads: 1, dim: 6, ..PLAIN });
}

/// Queries of all heads share a key, whose first elements are the value: the shapes of DeepSeek, and others that fill no vector.
#[test]
fn values_are_the_beginning_of_keys() {
    for (group, dim, rank) in [(16, 576, 512), (128, 576, 512), (5, 40, 32), (3, 26, 20), (7, 96, 33), (1, 10, 10)] {
        let case = Case { kv_heads: 1, group, dim, latent: Some(rank), ..PLAIN };
        if group == 128 {
            check(Case { segments: vec![(515, 1), (30, 2)], ..case });
            continue;
        }
        let segments = if dim > 128 { vec![(62, 3), (510, 4)] } else { vec![(60, 9), (505, 12), (1020, 1), (0, 3)] };
        for (values, window) in [(Values::Plain, None), (Values::Special, Some(100)), (Values::Tiny, None)] {
            check_all(&Case { scores: Scores { window, ..PLAIN.scores }, segments: segments.clone(), values, ..case });
        }
    }
    // Divided between threads.
    check_all(&Case { segments: vec![(9_000, 1), (40, 2)], kv_heads: 1, dim: 24, latent: Some(18), ..PLAIN });
}

/// Softmax attention over the rounded q, k and v, in f64: `[row][query head][element]`, and the same over magnitudes of values.
fn truth(batch: &Batch) -> Vec<[f64; 2]> {
    let Case { kv_heads, group, dim, scores, latent, .. } = batch.case;
    let (value_dim, of_values) = (batch.case.value_dim(), usize::from(latent.is_none()));
    let half = batch.case.half();
    let block = batch.case.block;
    let mut out = Vec::new();
    for (segment, q) in batch.segments.iter().zip(&batch.q) {
        let element = |plane: usize, token: usize, head: usize, d: usize| -> f64 {
            let at = batch.kv_at(segment.table.blocks[token / block], plane, token % block) + (head * dim + d) * 2;
            let mut bytes = [0; 2];
            batch.memory.copy_out(at, &mut bytes);
            f64::from(half.to_f32(u16::from_le_bytes(bytes)))
        };
        for (i, q) in q.chunks_exact(dim).enumerate() {
            let (row, head) = (i / (kv_heads * group), i % (kv_heads * group) / group);
            let position = segment.position + row;
            let first = scores.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let q: Vec<f64> = q.iter().map(|x| f64::from(half.round(*x))).collect();
            let score =
                |token| (0..dim).map(|d| q[d] * element(0, token, head, d)).sum::<f64>() * f64::from(scores.scale);
            let weights: Vec<f64> = (first..=position).map(|token| score(token).exp()).collect();
            let sink = scores.sinks.map_or(0.0, |sinks| f64::from(sinks[i % (kv_heads * group)]).exp());
            let sum = weights.iter().sum::<f64>() + sink;
            out.extend((0..value_dim).map(|d| {
                let of = |f: fn(f64) -> f64| {
                    weights.iter().zip(first..).map(|(w, t)| w * f(element(of_values, t, head, d))).sum::<f64>() / sum
                };
                [of(|x| x), of(f64::abs)]
            }));
        }
    }
    out
}

#[test]
fn the_reference_computes_softmax_attention() {
    let windows = [None, Some(1), Some(20), Some(64), Some(100), Some(530)];
    for (window, numerics) in windows.into_iter().flat_map(|window| CLASSES.map(|numerics| (window, numerics))) {
        let sinks = (window != Some(64)).then_some(&SINKS[1..]);
        let scores = Scores { scale: 0.3, window, soft_cap: None, sinks };
        let segments = vec![(0, 70), (590, 3), (1100, 2)];
        let case = Case { numerics, dim: 10, segments, scores, ..PLAIN };
        let batch = match window {
            Some(100) => Batch::new(Case { kv_heads: 1, latent: Some(8), ..case }),
            _ => Batch::new(case),
        };
        let reference = common::reference(numerics);
        let got = batch.run(|step, q, scores, out| reference.attend(step, q, scores, out));
        let want = truth(&batch);
        assert_eq!(got.len(), want.len());
        let mut squares = 0.0;
        for (i, (got, [want, magnitude])) in got.iter().zip(&want).enumerate() {
            // Each weight is rounded to 8 bits, by at most 2^-9, and so is their sum by no more.
            let error = (f64::from(f32::from_bits(*got)) - want).abs();
            assert!(
                error <= 2f64.powi(-8) * magnitude,
                "{numerics}, window {window:?}, {i}: {error} beside {magnitude}"
            );
            squares += (error / magnitude).powi(2);
        }
        // Roundings are independent: on average the error is far below the bound.
        assert!((squares / want.len() as f64).sqrt() < 2f64.powi(-10), "{numerics}, window {window:?}");
    }
}

/// Mostly `bf16x32`, which has the most kernels.
fn classes() -> impl Strategy<Value = Numerics> {
    prop_oneof![3 => Just(CLASSES[0]), 1 => prop::sample::select(CLASSES[1..].to_vec())]
}

fn cases() -> impl Strategy<Value = Case> {
    let segment =
        (prop_oneof![0usize..140, 440usize..600, 1000usize..1100], prop_oneof![Just(1usize), 1usize..12, 30usize..80]);
    let heads = (1usize..=3, 1usize..=9, prop::sample::select(vec![2usize, 6, 10, 32, 64, 80, 96, 128]));
    let values =
        prop::sample::select(vec![Values::Plain, Values::Negative, Values::Sharp, Values::Tiny, Values::Special]);
    let windows = prop::sample::select(vec![None, None, Some(1), Some(30), Some(64), Some(100), Some(600)]);
    let block = prop::sample::select(vec![16usize, 32, 64, 128]);
    let scale = prop::sample::select(vec![0.125f32, 1.0, 0.3]);
    let windows = (windows, any::<bool>().prop_map(|some| some.then_some(&SINKS[..])));
    (heads, prop::collection::vec(segment, 1..4), values, windows, block, scale, any::<u64>(), classes()).prop_map(
        |((kv_heads, group, dim), segments, values, (window, sinks), block, scale, seed, numerics)| Case {
            numerics,
            kv_heads,
            group,
            dim,
            latent: None,
            block,
            scores: Scores { scale, window, soft_cap: None, sinks },
            segments,
            values,
            seed,
        },
    )
}

/// A step of decode: one row of each sequence, of any length.
fn decodes() -> impl Strategy<Value = Case> {
    let dims = prop::sample::select(vec![64usize, 80, 96, 128]);
    let heads = (1usize..=3, prop::sample::select(vec![1usize, 3, 4, 8]), dims);
    let positions = prop::collection::vec(0usize..1100, 1..7);
    let values = prop::sample::select(vec![Values::Plain, Values::Sharp, Values::Tiny, Values::Special]);
    let window = prop_oneof![Just(None), (1usize..700).prop_map(Some)];
    let window = (window, any::<bool>().prop_map(|some| some.then_some(&SINKS[..])));
    let block = prop::sample::select(vec![16usize, 32, 64]);
    (heads, positions, values, window, block, any::<u64>(), classes()).prop_map(
        |((kv_heads, group, dim), positions, values, (window, sinks), block, seed, numerics)| Case {
            numerics,
            kv_heads,
            group,
            dim,
            latent: None,
            block,
            scores: Scores { window, sinks, ..PLAIN.scores },
            segments: positions.into_iter().map(|position| (position, 1)).collect(),
            values,
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn decode_equals_the_reference(case in decodes()) {
        check(case);
    }

    #[test]
    fn levels_equal_the_reference(case in cases(), rank in prop::option::of(1usize..=128)) {
        check(match rank {
            Some(rank) => Case { kv_heads: 1, latent: Some(rank.min(case.dim)), ..case },
            None => case,
        });
    }
}
