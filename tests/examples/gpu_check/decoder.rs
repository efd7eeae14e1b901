//! A decoder with random weights as a program on a device: small ones that are compared, and one of the shape of Llama 3 8B that is measured.

use anyhow::{Context, bail};
use baton_kernels::device::{Bounds, Device, Executable, Role, RopeTable, StoredRows, Weight, WeightSpec};
use baton_kernels::numerics::{Half, Numerics};
use baton_kernels::program::{Activation, Attend, Embed, GateUp, Head, Norm, Op, Program, Project, Qkv, QueryKeyNorms};
use baton_kernels::storage::StorageFormat;
use baton_memory::PoolMemory;
use baton_types::{KvLayout, KvPoolMap};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;

/// Random numbers of a weight, which are repeated where it has more.
const PERIOD: usize = (1 << 22) + 8;

/// Sizes of a decoder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ffn: usize,
    pub(crate) vocab: usize,
    pub(crate) layers: u32,
    /// Of the last layer's attention.
    pub(crate) window: Option<u32>,
    /// Biases, and norms of heads.
    pub(crate) rich: bool,
    /// Whether all layers have the same weights: one layer alone is larger than any cache, so the time is that of different ones.
    pub(crate) shared: bool,
}

impl Shape {
    /// Compared within a minute on a GPU.
    pub(crate) const SMALL: Self = Self {
        hidden: 512,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        ffn: 1024,
        vocab: 1000,
        layers: 3,
        window: Some(300),
        rich: true,
        shared: false,
    };
    /// Compared within seconds by host twins. No size is a multiple of a tile.
    pub(crate) const TINY: Self = Self {
        hidden: 72,
        heads: 3,
        kv_heads: 1,
        head_dim: 40,
        ffn: 136,
        vocab: 101,
        layers: 2,
        window: Some(40),
        ..Self::SMALL
    };
    /// <https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json>
    pub(crate) const LLAMA_3_8B: Self = Self {
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn: 14_336,
        vocab: 128_256,
        layers: 32,
        window: None,
        rich: false,
        shared: true,
    };

    /// Multiplications and additions of the matrices of all layers for one row; the head's are beside them.
    pub(crate) fn flops_of_row(&self) -> f64 {
        let qkv = (self.heads + 2 * self.kv_heads) * self.head_dim;
        let layer = self.hidden * (qkv + self.heads * self.head_dim + 3 * self.ffn);
        2.0 * layer as f64 * f64::from(self.layers)
    }

    /// The same of attention, for a row that attends to so many tokens.
    pub(crate) fn flops_of_attention(&self, tokens: f64) -> f64 {
        4.0 * (self.heads * self.head_dim) as f64 * tokens * f64::from(self.layers)
    }

    /// Bytes that a step of decoded rows reads: all matrices once, and the KV of all rows.
    pub(crate) fn bytes_of_step(&self, rows: usize, context: usize) -> f64 {
        let weights = self.flops_of_row() + 2.0 * (self.vocab * self.hidden) as f64;
        weights + (rows * context) as f64 * self.kv_bytes_of_token() as f64
    }

    /// Bytes of KV of a token.
    pub(crate) fn kv_bytes_of_token(&self) -> usize {
        2 * self.layers as usize * self.kv_heads * self.head_dim * 2
    }
}

/// A compiled decoder with its pool.
pub(crate) struct Decoder {
    pub(crate) executable: Box<dyn Executable>,
    pub(crate) pool: Arc<dyn PoolMemory>,
    pub(crate) map: KvPoolMap,
    pub(crate) shape: Shape,
    pub(crate) bounds: Bounds,
    /// Slots that nobody uses, and that the next step frees.
    pub(crate) held: Vec<usize>,
}

impl Decoder {
    pub(crate) fn new(
        device: &dyn Device,
        shape: Shape,
        block_tokens: u32,
        blocks: u32,
        bounds: Bounds,
    ) -> anyhow::Result<Self> {
        let Numerics::TensorCore { half, .. } = device.info().numerics else {
            bail!("{} computes no class of tensor cores", device.info().name)
        };
        let program =
            Loader { device, half, random: StdRng::seed_from_u64(11) }.program(shape, bounds.positions_max)?;
        let mut executable = device.compile(program, bounds)?;
        let (kv_heads, dim) = (shape.kv_heads as u32, shape.head_dim as u32);
        let layout = KvLayout::llama(block_tokens, shape.layers, kv_heads, dim, half.dtype())?;
        let map = KvPoolMap::try_new(layout, blocks)?;
        let pool = device.alloc_pool(&map).context("the KV pool")?;
        executable.bind(pool.clone(), &map)?;
        Ok(Self { executable, pool, map, shape, bounds, held: Vec::new() })
    }
}

struct Loader<'a> {
    device: &'a dyn Device,
    half: Half,
    random: StdRng,
}

impl Loader<'_> {
    fn matrix(&mut self, role: Role, k: usize, parts: &[usize]) -> anyhow::Result<Weight> {
        let (rows, scale) = (parts.iter().sum::<usize>(), 1.7 / (k as f32).sqrt());
        let scale = if role == Role::Embedding { 1.0 } else { scale };
        let half = self.half;
        let period: Vec<u8> = (0..PERIOD.min(rows * k))
            .flat_map(|_| half.from_f32(self.random.random_range(-scale..scale)).to_le_bytes())
            .collect();
        let mut bytes = Vec::with_capacity(rows * k * 2);
        while bytes.len() < rows * k * 2 {
            let left = rows * k * 2 - bytes.len();
            bytes.extend_from_slice(&period[..period.len().min(left)]);
        }
        let format = if half == Half::Bf16 { StorageFormat::Bf16 } else { StorageFormat::F16 };
        let mut rest = &bytes[..];
        let mut stored = Vec::new();
        for &rows in parts {
            let (part, behind) = rest.split_at(rows * k * 2);
            stored.push(StoredRows { rows, format, bytes: part });
            rest = behind;
        }
        Ok(self.device.load(&WeightSpec { name: "a random matrix", role, k, parts: &stored })?)
    }

    fn vector(&mut self, k: usize, around: f32) -> anyhow::Result<Weight> {
        let bytes: Vec<u8> =
            (0..k).flat_map(|_| (around + self.random.random_range(-0.3f32..0.3)).to_le_bytes()).collect();
        let stored = [StoredRows { rows: 1, format: StorageFormat::F32, bytes: &bytes }];
        Ok(self.device.load(&WeightSpec { name: "a random vector", role: Role::Vector, k, parts: &stored })?)
    }

    fn norm(&mut self, k: usize) -> anyhow::Result<Norm> {
        Ok(Norm { gain: self.vector(k, 1.0)?, eps: 1e-5 })
    }

    fn program(mut self, shape: Shape, positions: usize) -> anyhow::Result<Program> {
        let Shape { hidden, heads, kv_heads, head_dim, ffn, vocab, layers, .. } = shape;
        let angle = |i: usize| {
            let (position, pair) = (i / (head_dim / 2), i % (head_dim / 2));
            position as f32 * 500_000f32.powf(-2.0 * pair as f32 / head_dim as f32)
        };
        let angles: Vec<f32> = (0..positions * head_dim / 2).map(angle).collect();
        let (cos, sin) = (angles.iter().map(|a| a.cos()).collect(), angles.iter().map(|a| a.sin()).collect());
        let rope = self.device.load_rope(RopeTable { cos, sin, dim: head_dim })?;
        let mut ops = vec![Op::Embed(Embed::plain(self.matrix(Role::Embedding, hidden, &[vocab])?))];
        let (query, kv) = (heads * head_dim, kv_heads * head_dim);
        let mut of_layer: Option<[Op; 4]> = None;
        for layer in 0..layers {
            let [qkv, out, gate_up, down] = match of_layer {
                Some(ops) if shape.shared => ops,
                _ => [
                    Op::Qkv(Qkv {
                        layer,
                        norm: Some(self.norm(hidden)?),
                        weight: self.matrix(Role::Qkv, hidden, &[query, kv, kv])?,
                        bias: if shape.rich { Some(self.vector(query + 2 * kv, 0.0)?) } else { None },
                        heads,
                        kv_heads,
                        head_dim,
                        norms: if shape.rich {
                            Some(QueryKeyNorms { query: self.norm(head_dim)?, key: self.norm(head_dim)? })
                        } else {
                            None
                        },
                        rope,
                        gate: false,
                    }),
                    Op::Out(Project::plain(self.matrix(Role::Out, query, &[hidden])?)),
                    Op::GateUp(GateUp {
                        norm: Some(self.norm(hidden)?),
                        weight: self.matrix(Role::GateUp, hidden, &[ffn, ffn])?,
                        activation: Activation::Silu,
                    }),
                    Op::Down(Project::plain(self.matrix(Role::Down, ffn, &[hidden])?)),
                ],
            };
            of_layer = Some([qkv, out, gate_up, down]);
            let Op::Qkv(qkv) = qkv else { bail!("a layer begins with its projections") };
            ops.push(Op::Qkv(Qkv { layer, ..qkv }));
            let last = layer + 1 == layers;
            if last {
                ops.push(Op::Select);
            }
            let window = shape.window.filter(|_| last);
            ops.push(Op::Attend(Attend {
                layer,
                scale: (head_dim as f32).powf(-0.5),
                window,
                soft_cap: None,
                sinks: None,
            }));
            ops.extend([out, gate_up, down]);
        }
        ops.push(Op::Head(Head::plain(self.norm(hidden)?, self.matrix(Role::Head, hidden, &[vocab])?)));
        ops.push(Op::Sample);
        Ok(Program { ops })
    }
}
