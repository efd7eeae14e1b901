//! A small decoder layer over the ops trait, whose every intermediate result can be compared as bits.
#![allow(dead_code, unreachable_pub)] // Each test binary uses its part.

use baton_kernels::cpu::{CpuBackend, CpuConfig, HeapPool, SimdLevel};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::PARTITIONS_MAX;
use baton_kernels::ops::{KvHandle, Ops, Plan, PlanSegment, RopeHandle, RopeTable, Store, Tensor, Weight};
use baton_kernels::reference::ReferenceBackend;
use baton_skips::{Need, skipped};
use baton_types::{BlockId, Dtype, KvLayout, KvPoolMap, PoolMemory};
use std::sync::Arc;
use std::time::Duration;

/// Splitmix64: any fixed sequence would do.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// In -1 .. 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    pub fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.float() * scale).collect()
    }
}

/// Shape of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub hidden: usize,
    pub kv_heads: usize,
    pub group: usize,
    /// Even.
    pub head_dim: usize,
    pub rope_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub weights: Dtype,
    pub kv: Dtype,
    pub seed: u64,
}

impl Shape {
    pub fn q_cols(&self) -> usize {
        self.kv_heads * self.group * self.head_dim
    }
    pub fn kv_cols(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

fn partitions(k: usize) -> usize {
    (1 << k.trailing_zeros()).min(PARTITIONS_MAX)
}

pub const POSITIONS: usize = 512;
pub const LAYERS: usize = 2;

/// Rows of one sequence that go into one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub sequence: usize,
    pub position: usize,
    pub rows: usize,
}

/// One layer on one backend, with a pool of its own.
pub struct Layer {
    pub ops: Arc<dyn Ops>,
    pub pool: Arc<HeapPool>,
    pub map: KvPoolMap,
    shape: Shape,
    kv: KvHandle,
    rope: RopeHandle,
    table: Weight,
    gain: Weight,
    weights: [Weight; 7],
    blocks_each: usize,
}

impl Layer {
    /// Room for `sequences` of [`POSITIONS`] tokens; block tables are scattered over the pool.
    pub fn new(ops: Arc<dyn Ops>, shape: Shape, block_tokens: usize, sequences: usize) -> Self {
        let mut random = Random(shape.seed);
        let Shape { hidden, ffn, vocab, .. } = shape;
        let layout =
            KvLayout::llama(block_tokens as u32, LAYERS as u32, shape.kv_heads as u32, shape.head_dim as u32, shape.kv)
                .unwrap();
        let blocks_each = POSITIONS.div_ceil(block_tokens);
        let map = KvPoolMap::try_new(layout, (blocks_each * sequences) as u32).unwrap();
        // All ones: NaN in every format, so that a read of what was never stored shows.
        let pool = Arc::new(HeapPool::new(map.bytes(), 0xff));
        let kv = ops.bind_kv(pool.clone(), &map).unwrap();
        let half = shape.rope_dim / 2;
        let angles: Vec<f32> =
            (0..POSITIONS * half).map(|i| (i / half) as f32 * 0.7f32.powi((i % half) as i32)).collect();
        let table = RopeTable {
            cos: angles.iter().map(|a| a.cos()).collect(),
            sin: angles.iter().map(|a| a.sin()).collect(),
            dim: shape.rope_dim,
        };
        let rope = ops.upload_rope(&table).unwrap();
        let mut weight =
            |n: usize, k: usize, dtype, scale| ops.prepare("w", n, k, dtype, &random.floats(n * k, scale)).unwrap();
        let (q, kv_cols, w) = (shape.q_cols(), shape.kv_cols(), shape.weights);
        let table = weight(vocab, hidden, w, 1.0);
        let gain = weight(1, hidden, Dtype::F32, 1.0);
        let weights = [
            (q, hidden),
            (kv_cols, hidden),
            (kv_cols, hidden),
            (hidden, q),
            (ffn, hidden),
            (ffn, hidden),
            (hidden, ffn),
        ]
        .map(|(n, k)| weight(n, k, w, 0.2));
        Self { ops, pool, map, shape, kv, rope, table, gain, weights, blocks_each }
    }

    fn blocks(&self, sequence: usize) -> Vec<BlockId> {
        // Interleaved and backwards: neighbours in the sequence are never neighbours in memory.
        let total = self.map.blocks();
        let stride = total / self.blocks_each as u32;
        (0..self.blocks_each as u32).map(|i| BlockId(total - 1 - (i * stride + sequence as u32))).collect()
    }

    pub fn plan(&self, chunks: &[Chunk]) -> Plan {
        let segment = |c: &Chunk| PlanSegment { position: c.position, rows: c.rows, blocks: self.blocks(c.sequence) };
        Plan { segments: chunks.iter().map(segment).collect() }
    }

    fn id(&self, sequence: usize, position: usize) -> u32 {
        (Random(self.shape.seed ^ ((sequence as u64) << 32) ^ position as u64).next() % self.shape.vocab as u64) as u32
    }

    /// Runs the chunks as one batch. Returns the bits of every intermediate tensor, row by row: `[row][everything of that row]`.
    pub fn step(&self, chunks: &[Chunk]) -> Vec<Vec<u32>> {
        let (ops, s) = (&self.ops, self.shape);
        let plan = self.plan(chunks);
        let rows = plan.rows();
        let ids: Vec<u32> =
            chunks.iter().flat_map(|c| (c.position..c.position + c.rows).map(|p| self.id(c.sequence, p))).collect();
        let alloc = |cols| ops.alloc(rows, cols).unwrap();
        let [x, h, out] = [alloc(s.hidden), alloc(s.hidden), alloc(s.hidden)];
        let [q, a] = [alloc(s.q_cols()), alloc(s.q_cols())];
        let [k, v] = [alloc(s.kv_cols()), alloc(s.kv_cols())];
        let [gate, up] = [alloc(s.ffn), alloc(s.ffn)];
        let [wq, wk, wv, wo, wg, wu, wd] = self.weights;

        let ids = ops.upload_ids(&ids).unwrap();
        let handle = ops.plan(&plan).unwrap();
        let linear = |x, w: Weight, parts, store, out| ops.linear(x, w, parts, store, out, rows).unwrap();
        ops.embed(self.table, ids, x, rows).unwrap();
        for layer in 0..LAYERS {
            ops.rms_norm(x, self.gain, 1e-5, h, rows).unwrap();
            linear(h, wq, 1, Store::Set, q);
            linear(h, wk, 1, Store::Set, k);
            linear(h, wv, 1, Store::Set, v);
            ops.rope_store(self.kv, layer, handle, self.rope, q, k, v).unwrap();
            ops.attend(self.kv, layer, handle, q, (s.head_dim as f32).powf(-0.5), a).unwrap();
            linear(a, wo, partitions(s.q_cols()), Store::Add, x);
            ops.rms_norm(x, self.gain, 1e-5, h, rows).unwrap();
            linear(h, wg, 1, Store::Set, gate);
            linear(h, wu, 1, Store::Set, up);
            ops.silu_mul(gate, up, rows).unwrap();
            linear(gate, wd, partitions(s.ffn), Store::Add, x);
        }
        let backwards: Vec<usize> = (0..rows).rev().collect();
        ops.gather_rows(x, &backwards, out).unwrap();

        let mut bits = vec![Vec::new(); rows];
        for tensor in [x, h, q, k, v, a, gate, up] {
            self.append(tensor, rows, &mut bits);
        }
        bits.reverse();
        self.append(out, rows, &mut bits);
        bits.reverse();
        bits
    }

    fn append(&self, tensor: Tensor, rows: usize, bits: &mut [Vec<u32>]) {
        let mut data = vec![0.0; rows * tensor.cols];
        self.ops.download(tensor, rows, &mut data).unwrap();
        for (bits, row) in bits.iter_mut().zip(data.chunks_exact(tensor.cols)) {
            bits.extend(row.iter().map(|x| x.to_bits()));
        }
    }

    /// KV bytes of the first tokens of a sequence, all layers: `[layer][plane][token]`, whatever the block size.
    pub fn kv_bytes(&self, sequence: usize, tokens: usize) -> Vec<u8> {
        let size = self.map.layout().block_tokens() as usize;
        let blocks = self.blocks(sequence);
        let mut out = Vec::new();
        for layer in 0..LAYERS {
            for plane in 0..2 {
                for t in 0..tokens {
                    let at = (t % size) as u32;
                    let range = self.map.token_range(0, layer, blocks[t / size], plane, at..at + 1);
                    let start = out.len();
                    out.resize(start + range.len(), 0);
                    self.pool.read(range.start, &mut out[start..]);
                }
            }
        }
        out
    }
}

pub fn reference() -> Arc<dyn Ops> {
    ReferenceBackend::new()
}

/// The SIMD backend, or `None` (said aloud) where the machine lacks the level.
pub fn cpu(threads: usize, simd: SimdLevel) -> Option<Arc<dyn Ops>> {
    if simd == SimdLevel::Avx2Fma && SimdLevel::detect() != SimdLevel::Avx2Fma {
        skipped(Need::Avx2, "the kernels of AVX2", "the processor does not say that it has it");
        return None;
    }
    Some(CpuBackend::new(CpuConfig { threads, simd: Some(simd) }).unwrap())
}

pub fn lagging(inner: Arc<dyn Ops>) -> Arc<Lagging> {
    Lagging::new(inner, LagConfig { delay: Duration::from_micros(20), ..LagConfig::default() }).unwrap()
}
