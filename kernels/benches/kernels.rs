//! Times the SIMD kernels at the shapes of SmolLM2-135M, after checking them against the reference: a kernel that is wrong is not timed.
//! Compare with the printed roofline of the same run.

use baton_kernels::KvBinding;
use baton_kernels::cpu::{CpuConfig, CpuKernels};
use baton_kernels::device::{Role, RopeTable, StoredRows};
use baton_kernels::host::{HostKernels, KvStep, Scores, Store};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::roofline;
use baton_kernels::step::StepSegment;
use baton_kernels::storage::StorageFormat;
use baton_memory::HostPool;
use baton_types::{BlockId, BlockTable, Dtype, KvLayout, KvPoolMap};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::time::Duration;

const KV_HEADS: usize = 3;
const HEADS: usize = 9;
const DIM: usize = 64;
const BLOCK: usize = 16;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn fast() -> CpuKernels {
    CpuKernels::new(CpuConfig { threads: threads(), ..CpuConfig::default() }).expect("threads start")
}

fn slow() -> ReferenceKernels {
    ReferenceKernels::new(Numerics::default())
}

fn pack<K: HostKernels>(kernels: &K, n: usize, k: usize, weights: &[f32]) -> K::Matrix {
    let bytes: Vec<u8> = weights.iter().flat_map(|x| x.to_le_bytes()).collect();
    let stored = StoredRows { rows: n, format: StorageFormat::F32, bytes: &bytes };
    kernels.pack(Role::Out, k, &[stored]).expect("packed")
}

/// Any fixed values without structure, in -1 .. 1.
fn data(len: usize, salt: u32) -> Vec<f32> {
    let mix = |i: u32| i.wrapping_add(salt).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77);
    (0..len as u32).map(|i| (mix(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn linear(c: &mut Criterion) {
    // (name, n, k): the fused sizes of the four GEMMs of a layer, and the head.
    let gemms = [("q", 576, 576), ("kv", 192, 576), ("gate", 1536, 576), ("down", 576, 1536), ("head", 49_152, 576)];
    let mut group = c.benchmark_group("linear");
    for (name, n, k) in gemms {
        let weights = data(n * k, 1);
        let kernels = fast();
        let w = pack(&kernels, n, k, &weights);
        for rows in [1, 8, 32, 256, 1024] {
            if name == "head" && rows > 32 {
                continue;
            }
            let input = data(rows * k, 2);
            let mut out = vec![0.0; rows * n];
            let mut x = Default::default();
            kernels.input(&input, rows, &w, &mut x);
            kernels.linear(&x, &w, 0, 1, Store::Set, &mut [&mut out]);
            check_last_row(&weights, n, k, &input, &out);

            // Decode is bound by reading weights, prefill by arithmetic.
            group.throughput(match rows {
                1 => Throughput::Bytes((n * k * 2) as u64),
                _ => Throughput::Elements((2 * n * k * rows) as u64),
            });
            group.bench_function(format!("{name} {n}x{k} rows {rows}"), |b| {
                b.iter(|| kernels.linear(&x, &w, 0, 1, Store::Set, &mut [&mut out]));
            });
        }
    }
    group.finish();
}

/// Rows do not depend on one another, so that one row of the slow reference checks the tile that computes the ragged end.
fn check_last_row(weights: &[f32], n: usize, k: usize, input: &[f32], got: &[f32]) {
    let mut want = vec![0.0; n];
    let (slow, mut x) = (slow(), Default::default());
    let w = pack(&slow, n, k, weights);
    slow.input(&input[input.len() - k..], 1, &w, &mut x);
    slow.linear(&x, &w, 0, 1, Store::Set, &mut [&mut want]);
    assert!(want == got[got.len() - n..], "linear differs from the reference: not timed");
}

/// A pool with `sequences` of `tokens` tokens, and their last `rows` rows.
struct Batch<K> {
    kernels: K,
    kv: KvBinding,
    segments: Vec<StepSegment>,
    q: Vec<f32>,
    out: Vec<f32>,
}

impl<K: HostKernels> Batch<K> {
    fn new(kernels: K, sequences: usize, tokens: usize, rows: usize) -> Self {
        let layout = KvLayout::llama(BLOCK as u32, 1, KV_HEADS as u32, DIM as u32, Dtype::Bf16).expect("layout");
        let each = tokens.div_ceil(BLOCK);
        let map = KvPoolMap::try_new(layout, (each * sequences) as u32).expect("map");
        let kv = KvBinding::try_new(HostPool::filled(map.bytes(), 0).unwrap(), &map, 0).expect("bind");
        let rope = RopeTable { cos: vec![1.0; tokens * DIM / 2], sin: vec![0.0; tokens * DIM / 2], dim: DIM };
        let segments = |position: usize, rows: usize| -> Vec<StepSegment> {
            let blocks = |s| (0..each).map(|b| BlockId((b * sequences + s) as u32)).collect();
            (0..sequences).map(|s| StepSegment { position, rows, table: BlockTable::from_start(blocks(s)) }).collect()
        };
        let (cols, all) = (KV_HEADS * DIM, sequences * tokens);
        let (mut k, v, mut q) = (data(all * cols, 3), data(all * cols, 4), data(all * HEADS * DIM, 5));
        let stored = segments(0, tokens);
        kernels.rope_store(KvStep { kv: &kv, layer: 0, segments: &stored }, &rope, &mut q, &mut k, &v);
        q.truncate(sequences * rows * HEADS * DIM);
        let out = vec![0.0; q.len()];
        Self { kernels, kv, segments: segments(tokens - rows, rows), q, out }
    }

    fn attend(&mut self) -> &[f32] {
        let step = KvStep { kv: &self.kv, layer: 0, segments: &self.segments };
        self.kernels.attend(
            step,
            &self.q,
            Scores { scale: 0.125, window: None, soft_cap: None, sinks: None },
            &mut self.out,
        );
        &self.out
    }
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    // (name, sequences, tokens, rows of each)
    for (name, sequences, tokens, rows) in
        [("prefill", 1, 1024, 1024), ("decode", 1, 8192, 1), ("decode", 32, 512, 1), ("chunk", 1, 2048, 256)]
    {
        let (fewer, some) = (tokens.min(600), rows.min(70));
        let equal =
            Batch::new(fast(), sequences, fewer, some).attend() == Batch::new(slow(), sequences, fewer, some).attend();
        assert!(equal, "attention differs from the reference: not timed");

        let mut batch = Batch::new(fast(), sequences, tokens, rows);
        let pairs: usize = (tokens - rows + 1..=tokens).sum::<usize>() * sequences;
        group.throughput(match rows {
            1 => Throughput::Bytes((sequences * tokens * KV_HEADS * DIM * 2 * 2) as u64),
            _ => Throughput::Elements((pairs * HEADS * DIM * 4) as u64),
        });
        group.bench_function(format!("{name} {sequences} x {tokens} tokens, {rows} rows"), |b| {
            b.iter(|| batch.attend().len())
        });
    }
    group.finish();
}

fn yardsticks(_: &mut Criterion) {
    let n = threads();
    println!(
        "roofline of {n} threads: fma {:.0} GFLOP/s, read {:.1} GB/s",
        roofline::fma_peak(n),
        roofline::read_bandwidth(n)
    );
}

criterion_group! {
    name = kernels;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    targets = yardsticks, linear, attention
}
criterion_main!(kernels);
