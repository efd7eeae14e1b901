//! Fused operations have the bits of their parts: every operation of a program, on every instruction set and any number of threads, against
//! the scalar reference, which computes part after part.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuKernels};
use baton_kernels::device::{Role, RopeTable, StoredRows};
use baton_kernels::host::{
    ChoiceOf, ExpertMatrices, ExpertsOf, GateUpOf, HostKernels, KvStep, NormOf, ProjectOf, QkvOf, Scratch,
};
use baton_kernels::numerics::Numerics;
use baton_kernels::program::{Activation, Choice, Scoring};
use baton_kernels::quantize::halves;
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::step::StepSegment;
use baton_kernels::storage::StorageFormat;
use baton_types::{BlockId, BlockTable, Dtype, KvLayout};
use common::{Random, levels, pool};
use proptest::prelude::*;

const POSITIONS: usize = 320;
const BLOCK: usize = 16;
const EXPERTS: usize = 3;

/// An operation's shapes.
#[derive(Clone, Debug)]
struct Shape {
    numerics: Numerics,
    /// Of the parts of each matrix, in turn.
    formats: [StorageFormat; 2],
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    partitions: usize,
    /// Biases and norms of heads.
    rich: bool,
    more: More,
    seed: u64,
}

/// What only some families have.
#[derive(Clone, Copy, Debug, Default)]
struct More {
    /// Norms of all heads together.
    of_all_heads: bool,
    /// No norms before projections.
    bare: bool,
    /// Norms behind a layer's parts.
    behind: bool,
    /// Factors of embedding, layers and logits, a cap of logits, and GELU.
    scaled: bool,
    /// Biases of outputs and experts, and the clamped gated unit.
    biased: bool,
}

/// Position and rows of each sequence.
type Step = Vec<(usize, usize)>;

/// All quantized formats. The first ones are also those of matrices of one part.
const STORED: [[StorageFormat; 2]; 4] = {
    use StorageFormat::{Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0};
    [[Q4_1, Q8_0], [Q8_0, Q4_0], [Q6K, Q5K], [Q4K, Q6K]]
};

fn classes() -> impl Strategy<Value = (Numerics, [StorageFormat; 2])> {
    use StorageFormat::{F32, Q4_1, Q6K, Q8_0};
    let weights = prop::sample::select(vec![Dtype::Bf16, Dtype::F32, Dtype::F16]);
    let stored = || prop::sample::select(vec![[Q4_1; 2], [Q8_0, Q4_1], [Q4_1, F32], [Q6K, Q8_0]]);
    prop_oneof![
        weights.prop_map(|weights| (Numerics::F32Fma { weights }, [F32; 2])),
        Just((Numerics::Bf16x32, [F32; 2])),
        stored().prop_map(|formats| (Numerics::Bf16x32, formats)),
        stored().prop_map(|formats| (Numerics::I8x32, formats)),
    ]
}

fn shapes() -> impl Strategy<Value = Shape> {
    let heads = (1usize..=3, 1usize..=2, prop::sample::select(vec![8usize, 10, 32, 48, 64, 80]));
    let sizes = (1usize..=9, 1usize..=9, 3usize..200, 0usize..32);
    let more = any::<[bool; 5]>().prop_map(|[of_all_heads, bare, behind, scaled, biased]| More {
        of_all_heads,
        bare,
        behind,
        scaled,
        biased,
    });
    (classes(), heads, sizes, any::<bool>(), more, any::<u64>()).prop_map(
        |((numerics, formats), heads, sizes, rich, more, seed)| {
            let (kv_heads, group, head_dim) = heads;
            let (hidden, ffn, vocab, ragged) = sizes;
            // Rows of quantized matrices are whole blocks; those of others need not be.
            let block = formats.map(|format| format.block().0).into_iter().max().unwrap_or(1);
            let whole = |k: usize| if block == 1 { k * 32 + ragged } else { (k * 32).next_multiple_of(block) };
            let head_dim = head_dim.next_multiple_of((block >> (kv_heads * group).trailing_zeros()).max(1));
            let partitions = if matches!(numerics, Numerics::F32Fma { .. }) && head_dim % 4 == 0 { 2 } else { 1 };
            Shape {
                numerics,
                formats,
                hidden: whole(hidden),
                heads: kv_heads * group,
                kv_heads,
                head_dim,
                ffn: whole(ffn),
                vocab,
                partitions,
                rich,
                more,
                seed,
            }
        },
    )
}

/// One row, few rows, and as many as several blocks of rows.
fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        prop::collection::vec((0usize..100, Just(1)), 1..9),
        prop::collection::vec((0usize..100, 1usize..12), 1..4),
        (0usize..60, 60usize..250, 0usize..50).prop_map(|(position, rows, other)| vec![(other, 1), (position, rows)]),
    ]
}

/// Stored rows of a matrix.
fn stored(format: StorageFormat, rows: usize, k: usize, random: &mut Random) -> Vec<u8> {
    if format == StorageFormat::F32 {
        return random.floats(rows * k, 0.2).into_iter().flat_map(f32::to_le_bytes).collect();
    }
    let (elements, bytes) = format.block();
    let mut out: Vec<u8> = (0..rows * k / elements * bytes).map(|_| random.next() as u8).collect();
    for block in out.chunks_exact_mut(bytes) {
        for &at in halves(format) {
            // Small numbers, of both signs.
            let scale = (random.next() as u16 & 0x83ff) | 0x1400;
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    out
}

struct Weights<M> {
    table: M,
    qkv: M,
    out: M,
    gate_up: M,
    down: M,
    router: M,
    experts_gate_up: M,
    experts_down: M,
}

/// All bits that the operations leave, of a step; each operation begins with fresh values, so that it is compared alone.
fn bits<K: HostKernels>(kernels: &K, shape: &Shape, step: &Step) -> Vec<Vec<u32>> {
    let mut random = Random(shape.seed);
    let s = shape.clone();
    let (query, kv_cols) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
    let mut matrix = |role, heights: &[usize], k: usize| {
        let format = |part: usize| s.formats[part % 2];
        let bytes: Vec<_> =
            heights.iter().enumerate().map(|(part, n)| stored(format(part), *n, k, &mut random)).collect();
        let parts: Vec<_> = heights
            .iter()
            .zip(&bytes)
            .enumerate()
            .map(|(part, (rows, bytes))| StoredRows { rows: *rows, format: format(part), bytes })
            .collect();
        kernels.pack(role, k, &parts).unwrap()
    };
    let w = Weights {
        table: matrix(Role::Embedding, &[s.vocab], s.hidden),
        qkv: matrix(Role::Qkv, &[query, kv_cols, kv_cols, query][..if s.rich { 4 } else { 3 }], s.hidden),
        out: matrix(Role::Out, &[s.hidden], query),
        gate_up: matrix(Role::GateUp, &[s.ffn, s.ffn], s.hidden),
        down: matrix(Role::Down, &[s.hidden], s.ffn),
        router: matrix(Role::Router, &[EXPERTS], s.hidden),
        experts_gate_up: matrix(Role::GateUp, &[s.ffn; 2 * EXPERTS], s.hidden),
        experts_down: matrix(Role::Down, &[s.hidden; EXPERTS], s.ffn),
    };
    let layout = KvLayout::llama(BLOCK as u32, 2, s.kv_heads as u32, s.head_dim as u32, Dtype::Bf16).unwrap();
    let each = POSITIONS / BLOCK;
    let (memory, map, kv) = pool(layout, each * step.len());
    let segments: Vec<_> = step
        .iter()
        .enumerate()
        .map(|(i, &(position, rows))| {
            let blocks = (0..each).rev().map(|block| BlockId((block * step.len() + i) as u32)).collect();
            StepSegment { position, rows, table: BlockTable::from_start(blocks) }
        })
        .collect();
    let rows: usize = step.iter().map(|(_, rows)| rows).sum();
    let half = (s.head_dim / 2).max(1);
    let angles: Vec<f32> = (0..POSITIONS * half).map(|i| i as f32 * 0.37).collect();
    let rope = RopeTable {
        cos: angles.iter().map(|a| a.cos()).collect(),
        sin: angles.iter().map(|a| a.sin()).collect(),
        dim: 2 * half,
    };
    let (gain, bias) = (random.floats(s.hidden, 1.0), random.floats(2 * query + 2 * kv_cols, 1.0));
    let normed = if s.more.of_all_heads { [query, kv_cols] } else { [s.head_dim; 2] };
    let gains = normed.map(|cols| random.floats(cols, 1.0));
    let norm = NormOf { gain: &gain, eps: 1e-5 };
    let before = (!s.more.bare).then_some(norm);
    let factor = if s.more.scaled { 0.22 } else { 1.0 };
    let activation = match s.more {
        More { biased: true, .. } => Activation::ClampedSwiglu { alpha: 1.702, limit: 1.5 },
        More { scaled: true, .. } => Activation::GeluTanh,
        _ => Activation::Silu,
    };
    let [out_bias, router_bias, gate_up_bias, down_bias] =
        [s.hidden, EXPERTS, 2 * EXPERTS * s.ffn, EXPERTS * s.hidden].map(|cols| random.floats(cols, 0.5));
    let op = QkvOf {
        norm: before,
        bias: s.rich.then_some(&bias[..]),
        query,
        kv: kv_cols,
        gate: s.rich,
        norms: s.rich.then(|| gains.each_ref().map(|gain| NormOf { gain, eps: 1e-6 })),
        rope: &rope,
    };
    let mut scratch = Scratch::default();
    let ids: Vec<u32> = (0..rows).map(|i| (i * 7 % s.vocab) as u32).collect();
    let mut embedded = vec![0.0; rows * s.hidden];
    kernels.embed(&w.table, factor, &ids, &mut embedded);

    let mut residual = random.floats(rows * s.hidden, 1.0);
    let mut q = vec![0.0; rows * query];
    let mut gate = vec![0.0; if s.rich { q.len() } else { 0 }];
    let at = KvStep { kv: &kv, layer: 1, segments: &segments };
    kernels.qkv(&w.qkv, &op, at, &residual, &mut q, &mut gate, &mut scratch);
    let mut gate_of = random.floats(gate.len(), 1.0);
    kernels.gate(&gate, &mut gate_of);
    let (attended, gated) = (random.floats(rows * query, 1.0), random.floats(rows * s.ffn, 1.0));
    let behind = s.more.behind.then_some(norm);
    let project = |role| ProjectOf {
        role,
        partitions: s.partitions,
        rows,
        bias: s.more.biased.then_some(&out_bias[..]),
        norm: behind,
        factor,
    };
    kernels.project(&w.out, &project(Role::Out), &attended, &mut residual, &mut scratch);
    let out = residual.clone();
    let mut inner = vec![0.0; rows * s.ffn];
    kernels.gate_up(&w.gate_up, &GateUpOf { norm: before, activation, rows }, &residual, &mut inner, &mut scratch);
    kernels.project(&w.down, &ProjectOf { partitions: 1, ..project(Role::Down) }, &gated, &mut residual, &mut scratch);
    let mut logits = vec![0.0; rows * s.vocab];
    kernels.head(&w.table, norm, &residual, &mut logits, &mut scratch);
    kernels.finish_logits(&mut logits, factor, s.more.scaled.then_some(3.0));

    let mut mixed = random.floats(rows * s.hidden, 1.0);
    let experts = ExpertsOf {
        norm: before,
        experts: EXPERTS,
        ffn: s.ffn,
        choice: ChoiceOf {
            of: match s.more.scaled {
                true => Choice { scoring: Scoring::Sigmoid, factor: 2.5, ..Choice::softmax(2, s.rich) },
                false => Choice::softmax(2, s.rich),
            },
            bias: s.more.scaled.then_some(&router_bias[..]),
        },
        shared: s.more.behind.then_some([s.ffn, 1]),
        activation,
        partitions: 1,
        biases: s.more.biased.then_some([&router_bias[..], &gate_up_bias, &down_bias]),
        factor,
        rows,
    };
    let matrices = ExpertMatrices {
        router: &w.router,
        gate_up: &w.experts_gate_up,
        down: &w.experts_down,
        shared: s.more.behind.then_some([&w.gate_up, &w.down]),
    };
    kernels.experts(&matrices, &experts, &mut mixed, &mut scratch);

    let mut stored = vec![0u8; map.bytes()];
    memory.copy_out(0, &mut stored);
    let stored = stored.into_iter().map(u32::from).collect();
    let floats = [embedded, q, gate, gate_of, out, inner, residual, logits, mixed];
    floats.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).chain([stored]).collect()
}

const NAMES: [&str; 10] =
    ["embed", "query", "gate", "gated attention", "out", "gate_up", "down", "head", "experts", "pool"];

fn check(shape: &Shape, step: &Step, threads: usize) {
    let want = bits(&ReferenceKernels::new(shape.numerics), shape, step);
    for &level in levels() {
        let config = CpuConfig { threads, simd: Some(level), numerics: shape.numerics };
        let kernels = CpuKernels::new(config).unwrap();
        // Twice: threads keep packed rows from operation to operation.
        for _ in 0..2 {
            let got = bits(&kernels, shape, step);
            for ((got, want), name) in got.iter().zip(&want).zip(NAMES) {
                let class = shape.numerics;
                assert!(got == want, "{class} {:?}: {name} on {level:?} with {threads} threads", shape.formats);
            }
        }
    }
}

/// One row, a few, and more than those for which a panel is expanded once.
#[test]
fn weights_as_the_file_stores_them_have_the_bits_of_the_reference() {
    for formats in STORED {
        for step in [vec![(5, 1)], vec![(3, 7), (0, 1)], vec![(10, 65)]] {
            let shape = Shape {
                numerics: Numerics::Bf16x32,
                formats,
                hidden: 256,
                heads: 4,
                kv_heads: 1,
                head_dim: 64,
                ffn: 256,
                vocab: 33,
                partitions: 1,
                rich: true,
                more: More::default(),
                seed: 3,
            };
            check(&shape, &step, 2);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn operations_have_the_bits_of_their_parts(shape in shapes(), step in steps(), threads in 1usize..=4) {
        check(&shape, &step, threads);
    }
}
