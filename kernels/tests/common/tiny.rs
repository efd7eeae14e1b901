//! A small decoder as a program, on any device.

use super::Random;
use baton_kernels::adapter::{AdapterBounds, Linear};
use baton_kernels::device::{Bounds, Device, DeviceError, Executable, Role, RopeTable, StoredRows, Weight, WeightSpec};
use baton_kernels::numerics::Numerics;
use baton_kernels::program::{Activation, Attend, Embed, GateUp, Head, Norm, Op, Program, Project, Qkv, QueryKeyNorms};
use baton_kernels::step::{StepInput, StepSegment, TableSteps};
use baton_kernels::storage::StorageFormat;
use baton_memory::PoolMemory;
use baton_types::{BlockId, BlockTable, Dtype, Fence, KvLayout, KvPoolMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const LAYERS: u32 = 2;
pub const VOCAB: usize = 11;
pub const BLOCK: usize = 16;
pub const BLOCKS: u32 = 8;
pub const ADAPTERS: AdapterBounds = AdapterBounds { slots_max: 3, rank_max: 20 };
pub const BOUNDS: Bounds =
    Bounds { rows_max: 24, logit_rows_max: 20, slots_max: 3, positions_max: 40, adapters: ADAPTERS };
const HIDDEN: usize = 20;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;
const FFN: usize = 9;

/// What depends on the class: GPU kernels take whole vectors, one partition of K, and no adapters.
struct Dims {
    hidden: usize,
    ffn: usize,
    partitions: usize,
    adapters: AdapterBounds,
    kv: Dtype,
}

fn dims(device: &dyn Device) -> Dims {
    match device.info().numerics {
        Numerics::TensorCore { half, .. } => {
            Dims { hidden: 24, ffn: 16, partitions: 1, adapters: AdapterBounds::default(), kv: half.dtype() }
        }
        _ => Dims { hidden: HIDDEN, ffn: FFN, partitions: 2, adapters: ADAPTERS, kv: Dtype::Bf16 },
    }
}

/// [`BOUNDS`], with the adapters that a device has.
pub fn bounds(device: &dyn Device) -> Bounds {
    Bounds { adapters: dims(device).adapters, ..BOUNDS }
}

/// Loads f32 rows of `parts` heights.
pub fn load(device: &dyn Device, role: Role, k: usize, parts: &[usize], random: &mut Random) -> Weight {
    load_edited(device, role, k, parts, random, &|_, _| ())
}

/// As [`load`]; `edit` changes the rows of each part.
fn load_edited(
    device: &dyn Device,
    role: Role,
    k: usize,
    parts: &[usize],
    random: &mut Random,
    edit: &dyn Fn(usize, &mut [f32]),
) -> Weight {
    let scale = if role == Role::Vector { 1.0 } else { 0.4 };
    let part = |(part, rows): (usize, &usize)| {
        let mut floats = random.floats(rows * k, scale);
        edit(part, &mut floats);
        floats.into_iter().flat_map(f32::to_le_bytes).collect()
    };
    let bytes: Vec<Vec<u8>> = parts.iter().enumerate().map(part).collect();
    let stored: Vec<StoredRows<'_>> =
        parts.iter().zip(&bytes).map(|(&rows, bytes)| StoredRows { rows, format: StorageFormat::F32, bytes }).collect();
    device.load(&WeightSpec { name: "w", role, k, parts: &stored }).unwrap()
}

/// The program, with biases, head norms and a window in its last layer if `rich`.
pub fn program(device: &dyn Device, rich: bool) -> Program {
    edited(device, rich, &|_, _, _| ())
}

/// As [`program`]; `edit` changes the rows of the linears of each layer.
pub fn edited(device: &dyn Device, rich: bool, edit: &dyn Fn(u32, Linear, &mut [f32])) -> Program {
    let linear = |layer: u32, role: Role, k: usize, parts: &[usize], linears: &[Linear], random: &mut Random| {
        load_edited(device, role, k, parts, random, &|part, rows| edit(layer, linears[part], rows))
    };
    let Dims { hidden, ffn, partitions, .. } = dims(device);
    let mut random = Random(3);
    let random = &mut random;
    let norm = |k: usize, random: &mut Random| Norm { gain: load(device, Role::Vector, k, &[1], random), eps: 1e-5 };
    let angles: Vec<f32> = (0..BOUNDS.positions_max * DIM / 2).map(|i| i as f32 * 0.3).collect();
    let table = RopeTable {
        cos: angles.iter().map(|a| a.cos()).collect(),
        sin: angles.iter().map(|a| a.sin()).collect(),
        dim: DIM,
    };
    let rope = device.load_rope(table).unwrap();
    let embedding = load(device, Role::Embedding, hidden, &[VOCAB], random);
    let mut ops = vec![Op::Embed(Embed::plain(embedding))];
    let (query, kv) = (HEADS * DIM, KV_HEADS * DIM);
    for layer in 0..LAYERS {
        ops.push(Op::Qkv(Qkv {
            layer,
            norm: Some(norm(hidden, random)),
            weight: linear(
                layer,
                Role::Qkv,
                hidden,
                &[query, kv, kv],
                &[Linear::Query, Linear::Key, Linear::Value],
                random,
            ),
            bias: rich.then(|| load(device, Role::Vector, query + 2 * kv, &[1], random)),
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: DIM,
            norms: rich.then(|| QueryKeyNorms { query: norm(DIM, random), key: norm(DIM, random) }),
            rope,
            gate: false,
        }));
        if layer + 1 == LAYERS {
            ops.push(Op::Select);
        }
        let window = (rich && layer + 1 == LAYERS).then_some(9);
        ops.push(Op::Attend(Attend { layer, scale: 0.35, window, soft_cap: None, sinks: None }));
        let weight = linear(layer, Role::Out, query, &[hidden], &[Linear::Out], random);
        ops.push(Op::Out(Project { partitions, ..Project::plain(weight) }));
        let weight = linear(layer, Role::GateUp, hidden, &[ffn, ffn], &[Linear::Gate, Linear::Up], random);
        let before = Some(norm(hidden, random));
        ops.push(Op::GateUp(GateUp { norm: before, weight, activation: Activation::Silu }));
        let weight = linear(layer, Role::Down, ffn, &[hidden], &[Linear::Down], random);
        ops.push(Op::Down(Project::plain(weight)));
    }
    let weight = load(device, Role::Head, hidden, &[VOCAB], random);
    ops.push(Op::Head(Head::plain(norm(hidden, random), weight)));
    ops.push(Op::Sample);
    Program { ops }
}

/// A step on whole block tables.
#[derive(Clone, Default)]
pub struct Rows {
    pub ids: Vec<u32>,
    pub segments: Vec<StepSegment>,
    pub logit_rows: Vec<usize>,
}

impl Rows {
    /// As the next step after those that `steps` made; all layers are observed.
    pub fn input(&self, steps: &mut TableSteps) -> StepInput {
        steps.step(self.ids.clone(), self.segments.clone(), self.logit_rows.clone(), LAYERS)
    }
}

/// By when an operation on a pool must have ended.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// A compiled program with its pool.
pub struct Tiny {
    pub executable: Box<dyn Executable>,
    pub pool: Arc<dyn PoolMemory>,
    pub map: KvPoolMap,
    steps: TableSteps,
}

impl Tiny {
    pub fn new(device: &dyn Device, rich: bool) -> Self {
        Self::of(device, program(device, rich))
    }

    /// The rich program on a pool of this layout.
    pub fn on(device: &dyn Device, map: KvPoolMap) -> Self {
        Self::over(device, true, map)
    }

    /// Another program of the same shapes.
    pub fn of(device: &dyn Device, program: Program) -> Self {
        let layout = KvLayout::llama(BLOCK as u32, LAYERS, KV_HEADS as u32, DIM as u32, dims(device).kv).unwrap();
        Self::compiled(device, program, KvPoolMap::try_new(layout, BLOCKS).unwrap())
    }

    fn over(device: &dyn Device, rich: bool, map: KvPoolMap) -> Self {
        Self::compiled(device, program(device, rich), map)
    }

    fn compiled(device: &dyn Device, program: Program, map: KvPoolMap) -> Self {
        let mut executable = device.compile(program, bounds(device)).unwrap();
        let pool = device.alloc_pool(&map).unwrap();
        pool.write_by(soon(), 0, &vec![0xff; map.bytes()]).unwrap();
        executable.bind(pool.clone(), &map).unwrap();
        Self { executable, pool, map, steps: TableSteps::default() }
    }

    /// Launches a step on whole block tables.
    pub fn launch(&mut self, rows: &Rows, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), DeviceError> {
        let mut steps = self.steps;
        self.executable.launch(&rows.input(&mut steps), observer)?;
        self.steps = steps;
        Ok(())
    }

    /// Waits for the oldest step, and returns its logits.
    pub fn finish(&mut self) -> Result<Vec<f32>, DeviceError> {
        Ok(self.executable.finish()?.logits.data().to_vec())
    }

    /// Launches and finishes; returns the bits of the logits.
    pub fn step(&mut self, rows: &Rows) -> Result<Vec<u32>, DeviceError> {
        self.launch(rows, &mut |_, _| ())?;
        Ok(self.finish()?.into_iter().map(f32::to_bits).collect())
    }

    /// KV bytes of the first tokens of a block, in all layers and planes.
    pub fn kv(&self, block: u32, tokens: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for layer in 0..LAYERS as usize {
            for plane in 0..2 {
                let range = self.map.token_range(0, layer, BlockId(block), plane, 0..tokens as u32);
                let start = out.len();
                out.resize(start + range.len(), 0);
                self.pool.read_by(soon(), range.start, &mut out[start..]).unwrap();
            }
        }
        out
    }
}

/// Shape `[n, k]` of a linear.
pub fn shape(linear: Linear) -> [usize; 2] {
    match linear {
        Linear::Query => [HEADS * DIM, HIDDEN],
        Linear::Key | Linear::Value => [KV_HEADS * DIM, HIDDEN],
        Linear::Out => [HIDDEN, HEADS * DIM],
        Linear::Gate | Linear::Up => [FFN, HIDDEN],
        Linear::Down => [HIDDEN, FFN],
    }
}

/// Rows at `position ..` of one sequence on these blocks; their logits are all returned.
pub fn rows(position: usize, rows: usize, blocks: &[u32]) -> Rows {
    let ids = (position..position + rows).map(|p| (p * 7 % VOCAB) as u32).collect();
    let blocks = blocks.iter().copied().map(BlockId).collect();
    Rows {
        ids,
        segments: vec![StepSegment { position, rows, table: BlockTable::from_start(blocks) }],
        logit_rows: (0..rows).collect(),
    }
}
