//! Times the SIMD kernels at the shapes of SmolLM2-135M, after checking them against the reference: a kernel that is wrong is not timed.
//! Compare with the printed roofline of the same run.

use baton_kernels::cpu::{CpuBackend, CpuConfig, HeapPool};
use baton_kernels::ops::{KvHandle, Ops, Plan, PlanHandle, PlanSegment, RopeTable, Store, Tensor};
use baton_kernels::{reference::ReferenceBackend, roofline};
use baton_types::{BlockId, Dtype, KvLayout, KvPoolMap};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::sync::Arc;
use std::time::Duration;

const KV_HEADS: usize = 3;
const HEADS: usize = 9;
const DIM: usize = 64;
const BLOCK: usize = 16;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn fast() -> Arc<dyn Ops> {
    CpuBackend::new(CpuConfig { threads: threads(), simd: None }).expect("threads start")
}

/// Any fixed values without structure, in -1 .. 1.
fn data(len: usize, salt: u32) -> Vec<f32> {
    let mix = |i: u32| i.wrapping_add(salt).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77);
    (0..len as u32).map(|i| (mix(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn download(ops: &dyn Ops, tensor: Tensor, rows: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * tensor.cols];
    ops.download(tensor, rows, &mut out).expect("download");
    out
}

fn linear(c: &mut Criterion) {
    // (name, n, k): the fused sizes of the four GEMMs of a layer, and the head.
    let gemms = [("q", 576, 576), ("kv", 192, 576), ("gate", 1536, 576), ("down", 576, 1536), ("head", 49_152, 576)];
    let mut group = c.benchmark_group("linear");
    for (name, n, k) in gemms {
        let weights = data(n * k, 1);
        let ops = fast();
        let w = ops.prepare(name, n, k, Dtype::Bf16, &weights).expect("prepare");
        for rows in [1, 8, 32, 256, 1024] {
            if name == "head" && rows > 32 {
                continue;
            }
            let input = data(rows * k, 2);
            let [x, out] = [k, n].map(|cols| ops.alloc(rows, cols).expect("alloc"));
            ops.upload(x, &input).expect("upload");
            ops.linear(x, w, 1, Store::Set, out, rows).expect("linear");
            let got = download(ops.as_ref(), out, rows);
            check_last_row(&weights, n, k, &input, &got);

            // Decode is bound by reading weights, prefill by arithmetic.
            group.throughput(match rows {
                1 => Throughput::Bytes((n * k * 2) as u64),
                _ => Throughput::Elements((2 * n * k * rows) as u64),
            });
            group.bench_function(format!("{name} {n}x{k} rows {rows}"), |b| {
                b.iter(|| ops.linear(x, w, 1, Store::Set, out, rows));
            });
        }
    }
    group.finish();
}

/// Rows do not depend on one another, so that one row of the slow reference checks the tile that computes the ragged end.
fn check_last_row(weights: &[f32], n: usize, k: usize, input: &[f32], got: &[f32]) {
    let slow = ReferenceBackend::new();
    let w = slow.prepare("w", n, k, Dtype::Bf16, weights).expect("prepare");
    let [x, out] = [k, n].map(|cols| slow.alloc(1, cols).expect("alloc"));
    slow.upload(x, &input[input.len() - k..]).expect("upload");
    slow.linear(x, w, 1, Store::Set, out, 1).expect("linear");
    assert!(download(slow.as_ref(), out, 1) == got[got.len() - n..], "linear differs from the reference: not timed");
}

/// A pool with `sequences` of `tokens` tokens, and the plan of their last `rows` rows.
struct Batch {
    ops: Arc<dyn Ops>,
    kv: KvHandle,
    plan: PlanHandle,
    q: Tensor,
    out: Tensor,
    rows: usize,
}

impl Batch {
    fn new(ops: Arc<dyn Ops>, sequences: usize, tokens: usize, rows: usize) -> Self {
        let layout = KvLayout::llama(BLOCK as u32, 1, KV_HEADS as u32, DIM as u32, Dtype::Bf16).expect("layout");
        let each = tokens.div_ceil(BLOCK);
        let map = KvPoolMap::try_new(layout, (each * sequences) as u32).expect("map");
        let kv = ops.bind_kv(Arc::new(HeapPool::new(map.bytes(), 0)), &map).expect("bind");
        let table = RopeTable { cos: vec![1.0; tokens * DIM / 2], sin: vec![0.0; tokens * DIM / 2], dim: DIM };
        let rope = ops.upload_rope(&table).expect("rope");
        let plan = |position: usize, rows: usize| Plan {
            segments: (0..sequences)
                .map(|s| PlanSegment {
                    position,
                    rows,
                    blocks: (0..each).map(|b| BlockId((b * sequences + s) as u32)).collect(),
                })
                .collect(),
        };
        let cols = KV_HEADS * DIM;
        let all = sequences * tokens;
        let [k, v] = [cols; 2].map(|cols| ops.alloc(all, cols).expect("alloc"));
        let q = ops.alloc(all, HEADS * DIM).expect("alloc");
        ops.upload(k, &data(all * cols, 3)).expect("upload");
        ops.upload(v, &data(all * cols, 4)).expect("upload");
        ops.upload(q, &data(all * HEADS * DIM, 5)).expect("upload");
        let stored = ops.plan(&plan(0, tokens)).expect("plan");
        ops.rope_store(kv, 0, stored, rope, q, k, v).expect("store");
        let total = sequences * rows;
        let out = ops.alloc(total, HEADS * DIM).expect("alloc");
        let plan = ops.plan(&plan(tokens - rows, rows)).expect("plan");
        Self { ops, kv, plan, q, out, rows: total }
    }

    fn attend(&self) {
        self.ops.attend(self.kv, 0, self.plan, self.q, 0.125, self.out).expect("attend");
    }
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    // (name, sequences, tokens, rows of each)
    for (name, sequences, tokens, rows) in
        [("prefill", 1, 1024, 1024), ("decode", 1, 8192, 1), ("decode", 32, 512, 1), ("chunk", 1, 2048, 256)]
    {
        let [got, want] = [fast(), ReferenceBackend::new() as Arc<dyn Ops>].map(|ops| {
            let batch = Batch::new(ops, sequences, tokens.min(600), rows.min(70));
            batch.attend();
            download(batch.ops.as_ref(), batch.out, batch.rows)
        });
        assert!(got == want, "attention differs from the reference: not timed");

        let batch = Batch::new(fast(), sequences, tokens, rows);
        let pairs: usize = (tokens - rows + 1..=tokens).sum::<usize>() * sequences;
        group.throughput(match rows {
            1 => Throughput::Bytes((sequences * tokens * KV_HEADS * DIM * 2 * 2) as u64),
            _ => Throughput::Elements((pairs * HEADS * DIM * 4) as u64),
        });
        group.bench_function(format!("{name} {sequences} x {tokens} tokens, {rows} rows"), |b| {
            b.iter(|| batch.attend())
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
