//! The gated delta rule of Qwen3.5: its convolution, its recurrence, and the whole operation in `bf16x32`.

use baton_kernels::KvBinding;
use baton_kernels::cpu::{CpuConfig, CpuKernels};
use baton_kernels::device::{Role, StoredRows};
use baton_kernels::host::{DeltaHeads, DeltaOf, DeltaRows, HostKernels, KvStep, NormOf, Scratch};
use baton_kernels::numerics::Numerics;
use baton_kernels::random::Random;
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::step::StepSegment;
use baton_kernels::storage::StorageFormat;
use baton_memory::HostPool;
use baton_types::{Attention, BlockId, BlockTable, Dtype, KvPoolMap, LayerKv};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const HEADS: DeltaHeads = DeltaHeads { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
const HIDDEN: usize = 2048;
const TAPS: usize = 4;
const KEY: usize = HEADS.key_heads * HEADS.key_dim;
const VALUE: usize = HEADS.value_heads * HEADS.value_dim;
const CHANNELS: usize = 2 * KEY + VALUE;
/// Elements of the states of a layer.
const STATES: usize = VALUE * HEADS.key_dim;

/// Sequences with a state, and rows of each.
struct Batch {
    kv: KvBinding,
    segments: Vec<StepSegment>,
    rows: usize,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
    taps: Vec<f32>,
}

impl Batch {
    fn new(sequences: usize, each: usize) -> Self {
        let DeltaHeads { value_heads, key_dim, value_dim, .. } = HEADS;
        let state = LayerKv::State {
            heads: value_heads as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            inputs: TAPS as u32 - 1,
            channels: CHANNELS as u32,
        };
        let layout = Attention::alike(1, state, None).layout(16, Dtype::Bf16).expect("layout");
        let map = KvPoolMap::try_new(layout, sequences as u32).expect("map");
        let memory = HostPool::filled(map.bytes(), 0).expect("memory");
        let kv = KvBinding::try_new(memory, &map, 0).expect("bind");
        let segment = |block| StepSegment {
            position: 16,
            rows: each,
            table: BlockTable { first: 0, blocks: vec![BlockId(block)] },
        };
        let (rows, mut random) = (sequences * each, Random(1));
        let mut floats = |len, scale| random.floats(len, scale);
        Self {
            kv,
            segments: (0..sequences as u32).map(segment).collect(),
            rows,
            query: floats(rows * KEY, 0.01),
            key: floats(rows * KEY, 0.15),
            value: floats(rows * VALUE, 1.0),
            decay: floats(rows * HEADS.value_heads, 0.1).into_iter().map(|x| 0.9 + x).collect(),
            beta: floats(rows * HEADS.value_heads, 0.5).into_iter().map(|x| 0.5 + x).collect(),
            taps: floats(TAPS * CHANNELS, 0.5),
        }
    }

    fn step(&self) -> KvStep<'_> {
        KvStep { kv: &self.kv, layer: 0, segments: &self.segments }
    }

    fn rule<K: HostKernels>(&self, kernels: &K, out: &mut [f32]) {
        let Self { query, key, value, decay, beta, .. } = self;
        kernels.delta_rule(self.step(), HEADS, DeltaRows { query, key, value, decay, beta }, out);
    }
}

fn fast() -> CpuKernels {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    CpuKernels::new(CpuConfig { threads, numerics: Numerics::Bf16x32, simd: None }).expect("threads start")
}

/// Refuses to time what differs from the reference.
fn check() {
    let bits = |run: &dyn Fn(&Batch, &mut [f32])| {
        let batch = Batch::new(2, 3);
        let mut out = vec![0.0; batch.rows * VALUE];
        run(&batch, &mut out);
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let want = bits(&|batch, out| batch.rule(&ReferenceKernels::new(Numerics::Bf16x32), out));
    assert!(bits(&|batch, out| batch.rule(&fast(), out)) == want, "the rule differs from the reference: not timed");
}

const BATCHES: [(&str, usize, usize); 4] =
    [("prefill 512", 1, 512), ("decode", 1, 1), ("decode of 8", 8, 1), ("decode of 64", 64, 1)];

fn rule(c: &mut Criterion) {
    check();
    let mut group = c.benchmark_group("delta_rule");
    for (name, sequences, each) in BATCHES {
        let (kernels, batch) = (fast(), Batch::new(sequences, each));
        let mut out = vec![0.0; batch.rows * VALUE];
        // Prefill is bound by arithmetic: decay, two sums and an update of each element. Decode reads and writes states.
        group.throughput(match each {
            1 => Throughput::Bytes((batch.rows * STATES * 8) as u64),
            _ => Throughput::Elements((batch.rows * STATES * 7) as u64),
        });
        group.bench_function(name, |b| b.iter(|| batch.rule(&kernels, &mut out)));
    }
    group.finish();
}

fn convolution(c: &mut Criterion) {
    let mut group = c.benchmark_group("delta_convolution");
    for (name, sequences, each) in BATCHES {
        let (kernels, batch) = (fast(), Batch::new(sequences, each));
        let (mut query, mut key, mut value) = (batch.query.clone(), batch.key.clone(), batch.value.clone());
        group.throughput(Throughput::Elements((batch.rows * CHANNELS) as u64));
        group.bench_function(name, |b| {
            b.iter(|| kernels.convolve(batch.step(), &batch.taps, [&mut query, &mut key, &mut value]));
        });
    }
    group.finish();
}

fn operation(c: &mut Criterion) {
    let mut group = c.benchmark_group("gated_delta");
    let mut random = Random(2);
    let heights = [KEY, KEY, VALUE, VALUE, HEADS.value_heads, HEADS.value_heads];
    let of = |rows: &usize| random.floats(rows * HIDDEN, 0.05).into_iter().flat_map(f32::to_le_bytes).collect();
    let bytes: Vec<Vec<u8>> = heights.iter().map(of).collect();
    let stored = |(rows, bytes)| StoredRows { rows, format: StorageFormat::F32, bytes };
    let parts: Vec<_> = heights.into_iter().zip(bytes.iter().map(Vec::as_slice)).map(stored).collect();
    let (ones, lengths) = (vec![1.0; HIDDEN], [1.0 / 128.0, 1.0 / 128f32.sqrt()].map(|gain| vec![gain; HEADS.key_dim]));
    for (name, sequences, each) in BATCHES {
        let (kernels, batch) = (fast(), Batch::new(sequences, each));
        let w = kernels.pack(Role::Qkv, HIDDEN, &parts).expect("packed");
        let op = DeltaOf {
            norm: Some(NormOf { gain: &ones, eps: 1e-6 }),
            heads: HEADS,
            conv: &batch.taps,
            rates: &ones[..HEADS.value_heads],
            decay_bias: &ones[..HEADS.value_heads],
            lengths: lengths.each_ref().map(|gain| NormOf { gain, eps: 1e-6 / 128.0 }),
            output_norm: NormOf { gain: &ones[..HEADS.value_dim], eps: 1e-6 },
        };
        let residual = Random(3).floats(batch.rows * HIDDEN, 1.0);
        let (mut attended, mut scratch) = (vec![0.0; batch.rows * VALUE], Scratch::default());
        group.bench_function(name, |b| {
            b.iter(|| kernels.gated_delta(&w, &op, batch.step(), &residual, &mut attended, &mut scratch));
        });
    }
    group.finish();
}

criterion_group!(benches, rule, convolution, operation);
criterion_main!(benches);
