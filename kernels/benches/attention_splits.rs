//! Times attention of class `bf16x32` beside that of `f32fma` at the shape of SmolLM2-135M, or with `Latent` of DeepSeek-V2-Lite, after a comparison
//! with the reference: a kernel that is wrong is not timed.
//! `cargo bench --bench attention_splits -- [threads] [decode|prefill|chunk] [Avx2Fma] [Latent]`

use baton_kernels::KvBinding;
use baton_kernels::cpu::{CpuConfig, CpuKernels, SimdLevel};
use baton_kernels::device::RopeTable;
use baton_kernels::host::{HostKernels, KvStep, Scores};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::step::StepSegment;
use baton_memory::HostPool;
use baton_types::{Attention, BlockId, BlockTable, Dtype, KvPoolMap, LayerKv};
use std::time::{Duration, Instant};

/// Heads, and elements of their keys and values.
#[derive(Clone, Copy)]
struct Heads {
    kv_heads: usize,
    heads: usize,
    dim: usize,
    /// Of a latent, fewer than of a key.
    value_dim: usize,
}

impl Heads {
    const SMOLLM2: Self = Self { kv_heads: 3, heads: 9, dim: 64, value_dim: 64 };
    const V2_LITE: Self = Self { kv_heads: 1, heads: 16, dim: 576, value_dim: 512 };

    fn is_latent(self) -> bool {
        self.value_dim < self.dim
    }

    fn out(self, batch: &Batch) -> Vec<f32> {
        vec![0.0; batch.q.len() / self.dim * self.value_dim]
    }
}

const BLOCK: usize = 16;
const SCORES: Scores<'_> = Scores { scale: 0.125, window: None, soft_cap: None, sinks: None };

/// Time for the calls of one shape. The fastest call of each is printed, since other processes disturb.
const MEASURE: Duration = Duration::from_millis(1500);
const CALLS_MIN: usize = 5;

/// Any fixed values without structure, in -1 .. 1.
fn data(len: usize, salt: u32) -> Vec<f32> {
    let mix = |i: u32| i.wrapping_add(salt).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77);
    (0..len as u32).map(|i| (mix(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Sequences of `tokens` tokens of which the last `rows` are attended from.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    sequences: usize,
    tokens: usize,
    rows: usize,
}

struct Batch {
    kv: KvBinding,
    segments: Vec<StepSegment>,
    q: Vec<f32>,
}

impl Batch {
    fn new(kernels: &CpuKernels, of: Heads, Shape { sequences, tokens, rows, .. }: Shape) -> Self {
        let (kv_heads, head_dim) = (of.kv_heads as u32, of.dim as u32);
        let kv = match of.is_latent() {
            true => LayerKv::Latent { dim: head_dim },
            false => LayerKv::Heads { kv_heads, head_dim },
        };
        let layout = Attention::alike(1, kv, None).layout(BLOCK as u32, Dtype::Bf16).expect("layout");
        let each = tokens.div_ceil(BLOCK);
        let map = KvPoolMap::try_new(layout, (each * sequences) as u32).expect("map");
        let kv = KvBinding::try_new(HostPool::filled(map.bytes(), 0).unwrap(), &map, 0).expect("bind");
        let (dim, angles) = (of.dim, tokens * of.dim / 2);
        let rope = RopeTable { cos: vec![1.0; angles], sin: vec![0.0; angles], dim };
        let segments = |position: usize, rows: usize| -> Vec<StepSegment> {
            // Scattered: 641 is prime and divides no pool of these shapes.
            let blocks =
                |s| (0..each).map(|b| BlockId(((b * sequences + s) * 641 % (each * sequences)) as u32)).collect();
            (0..sequences).map(|s| StepSegment { position, rows, table: BlockTable::from_start(blocks(s)) }).collect()
        };
        let (cols, all, q_cols) = (of.kv_heads * of.dim, sequences * tokens, of.heads * of.dim);
        let (mut k, mut q) = (data(all * cols, 3), data(all * q_cols, 5));
        let v = if of.is_latent() { k.clone() } else { data(all * cols, 4) };
        let stored = segments(0, tokens);
        kernels.rope_store(KvStep { kv: &kv, layer: 0, segments: &stored }, &rope, &mut q, &mut k, &v);
        q.truncate(sequences * rows * q_cols);
        Self { kv, segments: segments(tokens - rows, rows), q }
    }

    fn step(&self) -> KvStep<'_> {
        KvStep { kv: &self.kv, layer: 0, segments: &self.segments }
    }
}

/// Seconds of the fastest call of each, in turns.
fn race(mut calls: [&mut dyn FnMut(); 2]) -> [f64; 2] {
    let mut best = [f64::INFINITY; 2];
    let (start, mut turns) = (Instant::now(), 0);
    while start.elapsed() < MEASURE || turns < CALLS_MIN {
        for (call, best) in calls.iter_mut().zip(&mut best) {
            // The second call finds its own data in the caches, as layers do not; the pool is larger than they are, or was just stored.
            call();
            let start = Instant::now();
            call();
            *best = best.min(start.elapsed().as_secs_f64());
        }
        turns += 1;
    }
    best
}

fn main() {
    let given = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    let threads: usize = given.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let named = std::env::args().skip(1).find(|arg| arg.starts_with(char::is_lowercase));
    let avx2 = std::env::args().any(|arg| arg == "Avx2Fma");
    let older = CpuKernels::new(CpuConfig { threads, ..CpuConfig::default() }).expect("threads start");
    let simd = avx2.then_some(SimdLevel::Avx2Fma);
    let new = CpuKernels::new(CpuConfig { threads, simd, numerics: Numerics::Bf16x32 }).expect("threads start");
    let of = if std::env::args().any(|arg| arg == "Latent") { Heads::V2_LITE } else { Heads::SMOLLM2 };
    let Heads { kv_heads, heads, dim, value_dim } = of;
    println!("{}; heads {heads}, KV heads {kv_heads}, dim {dim} and {value_dim}, blocks of {BLOCK}", new.name());

    let shape = |name, sequences, tokens, rows| Shape { name, sequences, tokens, rows };
    for shape in [
        shape("prefill", 1, 512, 512),
        shape("prefill", 1, 2048, 2048),
        shape("chunk", 1, 2048, 256),
        shape("small", 1, 512, 1),
        shape("decode", 1, 2048, 1),
        shape("decode", 8, 2048, 1),
        shape("decode", 32, 128, 1),
        shape("decode", 32, 2048, 1),
    ] {
        if named.as_ref().is_some_and(|named| named != shape.name) {
            continue;
        }
        let few = Batch::new(&older, of, Shape { tokens: shape.tokens.min(700), rows: shape.rows.min(70), ..shape });
        let [mut want, mut got] = [0, 1].map(|_| of.out(&few));
        ReferenceKernels::new(Numerics::Bf16x32).attend(few.step(), &few.q, SCORES, &mut want);
        new.attend(few.step(), &few.q, SCORES, &mut got);
        assert!(want == got, "attention differs from the reference: not timed");

        let batch = Batch::new(&older, of, shape);
        let [mut old_out, mut new_out] = [0, 1].map(|_| of.out(&batch));
        let [old_time, new_time] =
            race([&mut || older.attend(batch.step(), &batch.q, SCORES, &mut old_out), &mut || {
                new.attend(batch.step(), &batch.q, SCORES, &mut new_out)
            }]);
        let Shape { name, sequences, tokens, rows } = shape;
        let pairs = (tokens - rows + 1..=tokens).sum::<usize>() * sequences;
        let (work, unit) = match rows {
            1 if of.is_latent() => (sequences * tokens * dim * 2, "GB/s"),
            1 => (sequences * tokens * kv_heads * dim * 2 * 2, "GB/s"),
            _ => (pairs * heads * (dim + value_dim) * 2, "GFLOP/s"),
        };
        let rate = |time: f64| work as f64 / time / 1e9;
        println!(
            "{name:8} {sequences:2} x {tokens:4} tokens, {rows:4} rows: f32fma {:9.1} us {:6.1} {unit}, bf16x32 {:9.1} us {:6.1} {unit}, {:.2} times as fast",
            old_time * 1e6,
            rate(old_time),
            new_time * 1e6,
            rate(new_time),
            old_time / new_time,
        );
    }
}
