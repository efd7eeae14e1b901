//! Kernels behind one object-safe trait, and a small decoder layer over them whose every intermediate result can be compared as bits.
#![allow(dead_code, unreachable_pub)] // Each test binary uses its part.

pub mod recurrent;
pub mod tiny;

use baton_kernels::KvBinding;
use baton_kernels::cpu::{CpuConfig, CpuKernels, SimdLevel, TensorCoreKernels};
use baton_kernels::cuda;
use baton_kernels::device::{Device, Role, RopeTable, StoredRows};
use baton_kernels::host::{HostKernels, KvStep, Scores, Store};
use baton_kernels::numerics::{Half, Numerics, PARTITIONS_MAX, TensorCore};
use baton_kernels::program::Activation;
use baton_kernels::quantize::quantize;
pub use baton_kernels::random::Random;
use baton_kernels::reference::{ReferenceDevice, ReferenceKernels};
use baton_kernels::step::StepSegment;
use baton_kernels::storage::StorageFormat;
use baton_memory::HostPool;
use baton_skips::{Need, skipped};
use baton_types::{BlockId, BlockTable, Dtype, KvLayout, KvPoolMap};
use std::sync::{Arc, LazyLock};

/// A recorded GPU of each class and format.
pub fn recorded() -> Vec<Arc<dyn Device>> {
    let classes = [(TensorCore::Tc16F25, Half::Bf16), (TensorCore::Tc8F24, Half::F16)];
    classes.into_iter().map(|(cores, half)| cuda::recorded(cores, half) as Arc<dyn Device>).collect()
}

/// The scalar device of the class that another one computes.
pub fn reference_of(device: &dyn Device) -> Arc<dyn Device> {
    ReferenceDevice::new(device.info().numerics)
}

/// A matrix that kernels have packed.
pub struct Packed {
    pub n: usize,
    pub k: usize,
    matrix: Box<dyn std::any::Any>,
}

/// [`HostKernels`] of any kind.
pub trait Kernels {
    fn pack_stored(&self, n: usize, k: usize, format: StorageFormat, bytes: &[u8]) -> Packed;
    fn pack(&self, n: usize, k: usize, data: &[f32]) -> Packed {
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.pack_stored(n, k, StorageFormat::F32, &bytes)
    }
    fn row(&self, matrix: &Packed, row: usize, out: &mut [f32]);
    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]);
    /// All rows of `x`, into as many of `out`.
    fn linear(&self, x: &[f32], w: &Packed, partitions: usize, store: Store, out: &mut [f32]);
    fn rope_store(&self, step: KvStep<'_>, rope: &RopeTable, q: &mut [f32], k: &mut [f32], v: &[f32]);
    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]);
    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]);
}

impl<K: HostKernels> Kernels for K {
    fn pack_stored(&self, n: usize, k: usize, format: StorageFormat, bytes: &[u8]) -> Packed {
        let stored = StoredRows { rows: n, format, bytes };
        Packed { n, k, matrix: Box::new(HostKernels::pack(self, Role::Out, k, &[stored]).unwrap()) }
    }
    fn row(&self, matrix: &Packed, row: usize, out: &mut [f32]) {
        HostKernels::row(self, matrix.of::<K>(), row, out);
    }
    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        HostKernels::rms_norm(self, x, gain, eps, out);
    }
    fn linear(&self, x: &[f32], w: &Packed, partitions: usize, store: Store, out: &mut [f32]) {
        let mut input = K::Input::default();
        HostKernels::input(self, x, x.len() / w.k, w.of::<K>(), &mut input);
        HostKernels::linear(self, &input, w.of::<K>(), 0, partitions, store, &mut [out]);
    }
    fn rope_store(&self, step: KvStep<'_>, rope: &RopeTable, q: &mut [f32], k: &mut [f32], v: &[f32]) {
        HostKernels::rope_store(self, step, rope, q, k, v);
    }
    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]) {
        HostKernels::attend(self, step, q, scores, out);
    }
    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        HostKernels::activate(self, activation, gate, up);
    }
}

impl Packed {
    fn of<K: HostKernels>(&self) -> &K::Matrix {
        self.matrix.downcast_ref().expect("packed by other kernels")
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
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
    pub activation: Activation,
    pub numerics: Numerics,
    /// Of the matrices, in turn. Where rows are no whole blocks of it, the matrix is stored in F32.
    pub formats: [StorageFormat; 2],
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

fn partitions(numerics: Numerics, k: usize) -> usize {
    if !matches!(numerics, Numerics::F32Fma { .. }) {
        return 1;
    }
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

/// A pool of NaN, so that a read of what was never stored shows, bound as kernels take it.
pub fn pool(layout: KvLayout, blocks: usize) -> (Arc<HostPool>, KvPoolMap, KvBinding) {
    let map = KvPoolMap::try_new(layout, blocks as u32).unwrap();
    let pool = HostPool::filled(map.bytes(), 0xff).unwrap();
    let binding = KvBinding::try_new(pool.clone(), &map, 0).unwrap();
    (pool, map, binding)
}

/// One layer on one kind of kernels, with a pool of its own.
pub struct Layer {
    kernels: Box<dyn Kernels>,
    pub pool: Arc<HostPool>,
    pub map: KvPoolMap,
    kv: KvBinding,
    shape: Shape,
    rope: RopeTable,
    table: Packed,
    gain: Vec<f32>,
    weights: [Packed; 7],
    blocks_each: usize,
}

impl Layer {
    /// Room for `sequences` of [`POSITIONS`] tokens; block tables are scattered over the pool.
    pub fn new(kernels: Box<dyn Kernels>, shape: Shape, block_tokens: usize, sequences: usize) -> Self {
        let mut random = Random(shape.seed);
        let Shape { hidden, ffn, vocab, .. } = shape;
        let layout =
            KvLayout::llama(block_tokens as u32, LAYERS as u32, shape.kv_heads as u32, shape.head_dim as u32, shape.kv)
                .unwrap();
        let blocks_each = POSITIONS.div_ceil(block_tokens);
        let (pool, map, kv) = pool(layout, blocks_each * sequences);
        let half = shape.rope_dim / 2;
        let angles: Vec<f32> =
            (0..POSITIONS * half).map(|i| (i / half) as f32 * 0.7f32.powi((i % half) as i32)).collect();
        let rope = RopeTable {
            cos: angles.iter().map(|a| a.cos()).collect(),
            sin: angles.iter().map(|a| a.sin()).collect(),
            dim: shape.rope_dim,
        };
        let gain = {
            let packed = kernels.pack(1, hidden, &random.floats(hidden, 1.0));
            let mut gain = vec![0.0; hidden];
            kernels.row(&packed, 0, &mut gain);
            gain
        };
        let mut formats = shape.formats.into_iter().cycle();
        let mut weight = |n: usize, k: usize, scale| {
            let data = random.floats(n * k, scale);
            match formats.next() {
                Some(format) if format.is_quantized() && format.row_bytes(k).is_some() => {
                    kernels.pack_stored(n, k, format, &quantize(format, &data))
                }
                _ => kernels.pack(n, k, &data),
            }
        };
        let (q, kv_cols) = (shape.q_cols(), shape.kv_cols());
        let table = weight(vocab, hidden, 1.0);
        let weights = [
            (q, hidden),
            (kv_cols, hidden),
            (kv_cols, hidden),
            (hidden, q),
            (ffn, hidden),
            (ffn, hidden),
            (hidden, ffn),
        ]
        .map(|(n, k)| weight(n, k, 0.2));
        Self { kernels, pool, map, kv, shape, rope, table, gain, weights, blocks_each }
    }

    fn blocks(&self, sequence: usize) -> Vec<BlockId> {
        // Interleaved and backwards: neighbours in the sequence are never neighbours in memory.
        let total = self.map.blocks(0);
        let stride = total / self.blocks_each as u32;
        (0..self.blocks_each as u32).map(|i| BlockId(total - 1 - (i * stride + sequence as u32))).collect()
    }

    pub fn segments(&self, chunks: &[Chunk]) -> Vec<StepSegment> {
        let segment = |c: &Chunk| StepSegment {
            position: c.position,
            rows: c.rows,
            table: BlockTable::from_start(self.blocks(c.sequence)),
        };
        chunks.iter().map(segment).collect()
    }

    fn id(&self, sequence: usize, position: usize) -> usize {
        (Random(self.shape.seed ^ ((sequence as u64) << 32) ^ position as u64).next() % self.shape.vocab as u64)
            as usize
    }

    /// Runs the chunks as one batch. Returns the bits of every intermediate result, row by row: `[row][everything of that row]`.
    pub fn step(&self, chunks: &[Chunk]) -> Vec<Vec<u32>> {
        let (kernels, s) = (&self.kernels, self.shape);
        let segments = self.segments(chunks);
        let rows: usize = chunks.iter().map(|c| c.rows).sum();
        let ids = chunks.iter().flat_map(|c| (c.position..c.position + c.rows).map(|p| self.id(c.sequence, p)));
        let zeros = |cols: usize| vec![0.0; rows * cols];
        let (mut x, mut h, mut q, mut a) = (zeros(s.hidden), zeros(s.hidden), zeros(s.q_cols()), zeros(s.q_cols()));
        let (mut k, mut v, mut gate, mut up) = (zeros(s.kv_cols()), zeros(s.kv_cols()), zeros(s.ffn), zeros(s.ffn));
        let [wq, wk, wv, wo, wg, wu, wd] = &self.weights;
        let scores =
            Scores { scale: (s.head_dim as f32).powf(-0.5), window: s.window, soft_cap: s.soft_cap, sinks: None };

        x.chunks_exact_mut(s.hidden).zip(ids).for_each(|(row, id)| kernels.row(&self.table, id, row));
        for layer in 0..LAYERS {
            let step = KvStep { kv: &self.kv, layer, segments: &segments };
            kernels.rms_norm(&x, &self.gain, 1e-5, &mut h);
            kernels.linear(&h, wq, 1, Store::Set, &mut q);
            kernels.linear(&h, wk, 1, Store::Set, &mut k);
            kernels.linear(&h, wv, 1, Store::Set, &mut v);
            kernels.rope_store(step, &self.rope, &mut q, &mut k, &v);
            kernels.attend(step, &q, scores, &mut a);
            kernels.linear(&a, wo, partitions(s.numerics, s.q_cols()), Store::Add, &mut x);
            kernels.rms_norm(&x, &self.gain, 1e-5, &mut h);
            kernels.linear(&h, wg, 1, Store::Set, &mut gate);
            kernels.linear(&h, wu, 1, Store::Set, &mut up);
            kernels.activate(s.activation, &mut gate, &up);
            kernels.linear(&gate, wd, partitions(s.numerics, s.ffn), Store::Add, &mut x);
        }
        let mut bits = vec![Vec::new(); rows];
        for data in [&x, &h, &q, &k, &v, &a, &gate, &up] {
            for (bits, row) in bits.iter_mut().zip(data.chunks_exact(data.len() / rows)) {
                bits.extend(row.iter().map(|x| x.to_bits()));
            }
        }
        bits
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
                    self.pool.copy_out(range.start, &mut out[start..]);
                }
            }
        }
        out
    }
}

pub fn reference(numerics: Numerics) -> Box<dyn Kernels> {
    Box::new(ReferenceKernels::new(numerics))
}

/// The SIMD kernels, or `None` (said aloud) where the machine lacks the level.
pub fn cpu(threads: usize, simd: SimdLevel, numerics: Numerics) -> Option<Box<dyn Kernels>> {
    let config = CpuConfig { threads, simd: Some(simd), numerics };
    has(simd).then(|| match numerics {
        Numerics::TensorCore { .. } => Box::new(TensorCoreKernels::new(config).unwrap()) as Box<dyn Kernels>,
        _ => Box::new(CpuKernels::new(config).unwrap()),
    })
}

/// Every level that the machine has. Those that it lacks are said aloud, once.
pub fn levels() -> &'static [SimdLevel] {
    static LEVELS: LazyLock<Vec<SimdLevel>> =
        LazyLock::new(|| SimdLevel::ALL.into_iter().filter(|level| has(*level)).collect());
    &LEVELS
}

fn has(simd: SimdLevel) -> bool {
    if !simd.available() {
        let need = match simd {
            SimdLevel::Amx => Need::Amx,
            _ if simd <= SimdLevel::Avx2Fma => Need::Avx2,
            _ => Need::Avx512,
        };
        skipped(need, &format!("the kernels of {simd:?}"), "the processor does not say that it has the instructions");
    }
    simd.available()
}
