//! The gated delta rule: every instruction set has the bits of the scalar reference, in every class; the bits do not depend on how a sequence is cut
//! into steps, nor on where its state is; and the result is that of the formula.

mod common;

use baton_kernels::KvBinding;
use baton_kernels::cpu::{CpuConfig, CpuKernels, SimdLevel, TensorCoreKernels};
use baton_kernels::device::{Role, StoredRows};
use baton_kernels::host::{DeltaHeads, DeltaOf, HostKernels, KvStep, NormOf, Scratch};
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::step::StepSegment;
use baton_kernels::storage::StorageFormat;
use baton_memory::HostPool;
use baton_types::{Attention, BlockId, BlockTable, Dtype, KvPoolMap, LayerKv};
use common::{Random, levels, pool};
use std::ops::Range;
use std::sync::Arc;

const BLOCK: usize = 16;
const BLOCKS: usize = 9;
/// Layers of the pool, of which the last one is used.
const LAYERS: u32 = 2;

#[derive(Clone, Copy, Debug)]
struct Shape {
    hidden: usize,
    heads: DeltaHeads,
    taps: usize,
}

const fn shape(
    hidden: usize,
    key_heads: usize,
    value_heads: usize,
    [key_dim, value_dim]: [usize; 2],
    taps: usize,
) -> Shape {
    Shape { hidden, heads: DeltaHeads { key_heads, value_heads, key_dim, value_dim }, taps }
}

const SHAPES: [Shape; 4] = [
    shape(64, 2, 4, [16, 16], 4),
    shape(50, 3, 3, [19, 70], 2),
    shape(33, 1, 3, [7, 129], 8),
    shape(32, 1, 1, [1, 1], 3),
];

const F32: Numerics = Numerics::F32Fma { weights: Dtype::F32 };

const CLASSES: [Numerics; 5] = [
    F32,
    Numerics::Bf16x32,
    Numerics::I8x32,
    Numerics::TensorCore { cores: TensorCore::Tc16F25, half: Half::Bf16 },
    Numerics::TensorCore { cores: TensorCore::Tc8F24, half: Half::F16 },
];

impl Shape {
    /// Columns of the products.
    fn parts(&self) -> [usize; 6] {
        let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = self.heads;
        let (key, value) = (key_heads * key_dim, value_heads * value_dim);
        [key, key, value, value, value_heads, value_heads]
    }

    fn channels(&self) -> usize {
        self.parts()[..3].iter().sum()
    }
}

/// All of a layer but the kernels.
struct Weights {
    shape: Shape,
    parts: Vec<Vec<f32>>,
    /// `[taps, channels]`
    conv: Vec<f32>,
    rates: Vec<f32>,
    bias: Vec<f32>,
    gains: [Vec<f32>; 2],
    lengths: [Vec<f32>; 2],
}

impl Weights {
    fn new(shape: Shape) -> Self {
        let mut random = Random(shape.hidden as u64);
        let key_dim = shape.heads.key_dim as f32;
        Self {
            shape,
            parts: shape.parts().iter().map(|rows| random.floats(rows * shape.hidden, 0.3)).collect(),
            conv: random.floats(shape.taps * shape.channels(), 0.6),
            rates: random.floats(shape.heads.value_heads, 1.0).into_iter().map(f32::abs).collect(),
            bias: random.floats(shape.heads.value_heads, 1.0),
            gains: [shape.hidden, shape.heads.value_dim].map(|cols| random.floats(cols, 1.0)),
            lengths: [1.0 / key_dim, 1.0 / key_dim.sqrt()].map(|gain| vec![gain; shape.heads.key_dim]),
        }
    }

    fn of(&self) -> DeltaOf<'_> {
        let eps = 1e-6 / self.shape.heads.key_dim as f32;
        let [norm, output_norm] = self.gains.each_ref().map(|gain| NormOf { gain, eps: 1e-6 });
        DeltaOf {
            norm: Some(norm),
            heads: self.shape.heads,
            conv: &self.conv,
            rates: &self.rates,
            decay_bias: &self.bias,
            lengths: self.lengths.each_ref().map(|gain| NormOf { gain, eps }),
            output_norm,
        }
    }

    /// The residual stream of a sequence.
    fn rows(&self, sequence: usize, positions: Range<usize>) -> Vec<f32> {
        let row = |position: usize| Random((sequence * 1000 + position) as u64).floats(self.shape.hidden, 1.0);
        positions.flat_map(row).collect()
    }
}

/// Rows of a sequence, and the blocks of its state: that before them, unless they are the first, and that behind them, which may be the same.
type Chunk = (usize, Range<usize>, &'static [u32]);

/// A layer on some kernels, with a pool of its own, of NaN.
struct Layer<'a, K: HostKernels> {
    kernels: K,
    weights: &'a Weights,
    matrix: K::Matrix,
    memory: Arc<HostPool>,
    map: KvPoolMap,
    kv: KvBinding,
}

impl<'a, K: HostKernels> Layer<'a, K> {
    fn new(kernels: K, weights: &'a Weights) -> Self {
        let of = |part: &Vec<f32>| part.iter().flat_map(|x| x.to_le_bytes()).collect();
        let bytes: Vec<Vec<u8>> = weights.parts.iter().map(of).collect();
        let parts: Vec<_> = (bytes.iter().zip(weights.shape.parts()))
            .map(|(bytes, rows)| StoredRows { rows, format: StorageFormat::F32, bytes })
            .collect();
        let matrix = kernels.pack(Role::Qkv, weights.shape.hidden, &parts).unwrap();
        let Shape { heads, taps, .. } = weights.shape;
        let state = LayerKv::State {
            heads: heads.value_heads as u32,
            key_dim: heads.key_dim as u32,
            value_dim: heads.value_dim as u32,
            inputs: taps as u32 - 1,
            channels: weights.shape.channels() as u32,
        };
        let layout = Attention::alike(LAYERS, state, None).layout(BLOCK as u32, Dtype::Bf16).unwrap();
        let (memory, map, kv) = pool(layout, BLOCKS);
        Self { kernels, weights, matrix, memory, map, kv }
    }

    /// Bits of what the rows attended, one behind another.
    fn step(&self, chunks: &[Chunk]) -> Vec<u32> {
        let segment = |(_, positions, blocks): &Chunk| StepSegment {
            position: positions.start,
            rows: positions.len(),
            table: BlockTable {
                first: positions.start.saturating_sub(1) / BLOCK,
                blocks: blocks.iter().map(|block| BlockId(*block)).collect(),
            },
        };
        let segments: Vec<_> = chunks.iter().map(segment).collect();
        let residual: Vec<f32> = chunks
            .iter()
            .flat_map(|(sequence, positions, _)| self.weights.rows(*sequence, positions.clone()))
            .collect();
        let rows = residual.len() / self.weights.shape.hidden;
        let mut attended = vec![f32::NAN; rows * self.weights.shape.parts()[2]];
        let step = KvStep { kv: &self.kv, layer: LAYERS as usize - 1, segments: &segments };
        let mut scratch = Scratch::default();
        self.kernels.gated_delta(&self.matrix, &self.weights.of(), step, &residual, &mut attended, &mut scratch);
        attended.into_iter().map(f32::to_bits).collect()
    }

    /// Bytes of the pool.
    fn pool(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.bytes()];
        self.memory.copy_out(0, &mut bytes);
        bytes
    }

    /// Bytes of the state in a block.
    fn state(&self, block: u32) -> Vec<u8> {
        let planes = (0..2).flat_map(|plane| {
            let range = self.map.token_range(0, LAYERS as usize - 1, BlockId(block), plane, 0..1);
            let mut bytes = vec![0; range.len()];
            self.memory.copy_out(range.start, &mut bytes);
            bytes
        });
        planes.collect()
    }
}

/// Several segments: in place, to another block, from nothing; those of many rows with the others.
const STEPS: [&[Chunk]; 4] = [
    &[(0, 0..1, &[4]), (1, 0..7, &[2]), (2, 0..1, &[8])],
    &[(1, 7..8, &[2])],
    &[(0, 1..34, &[4, 1]), (1, 8..9, &[2]), (3, 0..40, &[6]), (2, 1..3, &[8, 3])],
    &[(2, 3..4, &[3]), (0, 34..35, &[1, 4]), (3, 40..41, &[6]), (1, 9..10, &[2])],
];

/// What all steps attended, and the pool.
fn bits<K: HostKernels>(kernels: K, weights: &Weights) -> (Vec<Vec<u32>>, Vec<u8>) {
    let layer = Layer::new(kernels, weights);
    (STEPS.iter().map(|step| layer.step(step)).collect(), layer.pool())
}

#[test]
fn all_instruction_sets_have_the_bits_of_the_reference() {
    for (numerics, shape) in CLASSES.into_iter().flat_map(|class| SHAPES.map(|shape| (class, shape))) {
        let weights = Weights::new(shape);
        let want = bits(ReferenceKernels::new(numerics), &weights);
        assert!(want.0.iter().flatten().all(|x| f32::from_bits(*x).is_finite()), "{numerics}, {shape:?}");
        for (&simd, threads) in levels().iter().flat_map(|level| [1, 3].map(|threads| (level, threads))) {
            let config = CpuConfig { threads, simd: Some(simd), numerics };
            let got = match numerics {
                Numerics::TensorCore { .. } if simd > SimdLevel::Avx512 => continue,
                Numerics::TensorCore { .. } => bits(TensorCoreKernels::new(config).unwrap(), &weights),
                _ => bits(CpuKernels::new(config).unwrap(), &weights),
            };
            let what = format!("{numerics}, {simd:?}, {threads} threads, {shape:?}");
            assert!(got.0 == want.0, "{what}: attended");
            assert!(got.1 == want.1, "{what}: pool");
        }
    }
}

/// The whole of a sequence in one step, and cut in other ways.
fn check_cuts<K: HostKernels>(kernels: impl Fn() -> K, shape: Shape) {
    const ROWS: usize = 50;
    let weights = Weights::new(shape);
    let layer = Layer::new(kernels(), &weights);
    let (want, name) = (layer.step(&[(0, 0..ROWS, &[5])]), layer.kernels.name());
    let state = layer.state(5);
    // Of a first row, the input and the state before are zeros: the next step reads what it left.
    let pieces: [&[usize]; 5] = [&[1; ROWS], &[16, 16, 16, 2], &[1, 2, 3, 44], &[49, 1], &[7, 1, 1, 9, 32]];
    for (cut, in_place) in pieces.into_iter().flat_map(|cut| [true, false].map(|in_place| (cut, in_place))) {
        let layer = Layer::new(kernels(), &weights);
        let (mut at, mut got, mut block) = (0, Vec::new(), 0u32);
        for rows in cut {
            // Another sequence in the same steps, which must change nothing.
            let other: Chunk = (1, at..at + rows, &[6]);
            let next = (block + 1) % 4;
            let blocks: &[u32] = match (at, in_place) {
                (0, _) | (_, true) => &[block],
                (_, false) => &[block, next],
            };
            let blocks: &'static [u32] = Vec::leak(blocks.to_vec());
            let attended = layer.step(&[(0, at..at + rows, blocks), other]);
            got.extend_from_slice(&attended[..rows * shape.parts()[2]]);
            (at, block) = (at + rows, blocks[blocks.len() - 1]);
        }
        assert!(got == want, "{name}: {cut:?}, in place: {in_place}: attended");
        assert!(layer.state(block) == state, "{name}: {cut:?}, in place: {in_place}: state");
    }
}

#[test]
fn no_cut_of_a_sequence_changes_a_bit() {
    for (numerics, shape) in CLASSES.into_iter().zip(SHAPES.into_iter().cycle()) {
        check_cuts(|| ReferenceKernels::new(numerics), shape);
        let config = CpuConfig { threads: 3, simd: None, numerics };
        match numerics {
            Numerics::TensorCore { .. } => check_cuts(|| TensorCoreKernels::new(config).unwrap(), shape),
            _ => check_cuts(|| CpuKernels::new(config).unwrap(), shape),
        }
    }
}

/// A state that a step reads and does not write stays as it is: a checkpoint.
#[test]
fn a_state_that_is_read_alone_does_not_change() {
    let weights = Weights::new(SHAPES[0]);
    let layer = Layer::new(CpuKernels::new(CpuConfig::default()).unwrap(), &weights);
    layer.step(&[(0, 0..16, &[3])]);
    let before = layer.state(3);
    let first = layer.step(&[(0, 16..20, &[3, 7])]);
    assert!(layer.state(3) == before && layer.state(7) != before);
    // So the same rows can be computed again.
    assert!(layer.step(&[(0, 16..20, &[3, 1])]) == first && layer.state(1) == layer.state(7));
}

/// The formula of the operation in f64, written row by row and head by head.
fn formula(weights: &Weights, rows: usize) -> Vec<f64> {
    let Weights { shape, parts, conv, rates, bias, gains, .. } = weights;
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = shape.heads;
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let norm = |x: &[f64], gain: &[f32]| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(gain).map(|(x, gain)| x / (mean + 1e-6).sqrt() * f64::from(*gain)).collect::<Vec<_>>()
    };
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let length = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    let channels = shape.channels();
    let mut inputs = vec![vec![0.0; channels]; shape.taps - 1];
    let mut states = vec![vec![vec![0.0; value_dim]; key_dim]; value_heads];
    let mut out = Vec::new();
    for row in 0..rows {
        let x = norm(&wide(&weights.rows(0, row..row + 1)), &gains[0]);
        let product = |part: usize| {
            let rows = parts[part].chunks_exact(shape.hidden);
            rows.map(|w| w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>()).collect::<Vec<_>>()
        };
        let [query, key, value, z, b, a] = std::array::from_fn(product);
        inputs.push([query, key, value].concat());
        let tail = &inputs[inputs.len() - shape.taps..];
        let of_channel = |c: usize| (0..shape.taps).map(|tap| tail[tap][c] * f64::from(conv[tap * channels + c])).sum();
        let mixed: Vec<f64> = (0..channels).map(of_channel).map(silu).collect();
        let (query, rest) = mixed.split_at(key_heads * key_dim);
        let (key, value) = rest.split_at(key_heads * key_dim);
        for (head, state) in states.iter_mut().enumerate() {
            let of_key = head / (value_heads / key_heads) * key_dim;
            let (q, k) = (&query[of_key..of_key + key_dim], &key[of_key..of_key + key_dim]);
            let (lq, lk) = (length(q) * (key_dim as f64).sqrt(), length(k));
            let v = &value[head * value_dim..(head + 1) * value_dim];
            let softplus = (a[head] + f64::from(bias[head])).exp().ln_1p();
            let (decay, beta) = ((-f64::from(rates[head]) * softplus).exp(), 1.0 / (1.0 + (-b[head]).exp()));
            let mut o = vec![0.0; value_dim];
            for j in 0..value_dim {
                let m: f64 = (0..key_dim).map(|i| k[i] / lk * state[i][j] * decay).sum();
                for i in 0..key_dim {
                    state[i][j] = state[i][j] * decay + k[i] / lk * beta * (v[j] - m);
                    o[j] += q[i] / lq * state[i][j];
                }
            }
            let z = &z[head * value_dim..(head + 1) * value_dim];
            out.extend(norm(&o, &gains[1]).iter().zip(z).map(|(o, z)| o * silu(*z)));
        }
    }
    out
}

#[test]
fn the_result_is_that_of_the_formula() {
    for shape in &SHAPES[..3] {
        let weights = Weights::new(*shape);
        let got = Layer::new(ReferenceKernels::new(F32), &weights).step(&[(0, 0..60, &[0])]);
        let want = formula(&weights, 60);
        let largest = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let errors = got.iter().zip(&want).map(|(got, want)| (f64::from(f32::from_bits(*got)) - want).abs());
        let worst = errors.fold(0.0, f64::max) / largest;
        assert!(worst < 2e-5, "{shape:?}: {worst:e}");
        assert!(largest > 0.1 && want.iter().all(|x| x.is_finite()), "{shape:?}: {largest}");
    }
}
