//! Tests of the forward pass on small random models.

mod delta;
mod exact;
mod families;
mod loading;
mod naive;
mod observer;
mod refusals;
mod rope;

use super::{Logits, Model, ModelConfig, ModelError, StepSegment};
use crate::formats::{ModelSource, RandomModel};
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::device::Device;
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::step::TableSteps;
use baton_memory::PoolMemory;
use baton_types::{BlockId, BlockTable, Dtype, Fence, GroupKind, KvPoolMap, TokenId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// No dimension is a multiple of a vector or a tile; K spans two GEMM slabs with a ragged end.
const RAGGED: &str = "random:hidden=274,layers=2,heads=6,kv_heads=2,head_dim=10,ffn=260,vocab=131,context=256,seed=3";

/// Fills a fresh pool: NaN in every format, so that a read of a value that was never stored is detected.
const NEVER_STORED: u8 = 0xff;

/// By when an operation on a pool must have ended.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn random(spec: &str) -> RandomModel {
    RandomModel::parse(spec).unwrap()
}

fn tokens(n: usize) -> Vec<TokenId> {
    (0..n as TokenId).map(|i| (i * 37 + i / 5) % 131).collect()
}

fn numerics(dtype: Dtype) -> Numerics {
    Numerics::F32Fma { weights: dtype }
}

fn reference(dtype: Dtype) -> Arc<dyn Device> {
    ReferenceDevice::new(numerics(dtype))
}

fn config(dtype: Dtype) -> ModelConfig {
    let adapters = AdapterBounds::default();
    ModelConfig { kv: dtype, rows_max: 256, logit_rows_max: 256, slots_max: 4, model_len_max: 256, adapters }
}

/// Pool memory shared by two sequences: one owns the even blocks in descending order, the other the odd ones. In every other group it is the
/// other way round.
#[derive(Clone)]
struct Pool {
    memory: Arc<dyn PoolMemory>,
    map: KvPoolMap,
}

impl Pool {
    fn blocks(&self, sequence: u32) -> Vec<BlockId> {
        (0..self.map.blocks(0)).rev().filter(|b| b % 2 == sequence).map(BlockId).collect()
    }

    /// KV bytes of the first `tokens` positions of a sequence in one layer, in an order that does not depend on the block size, or the state
    /// behind them.
    fn kv(&self, sequence: u32, layer: usize, tokens: usize) -> Vec<u8> {
        let block_tokens = self.map.layout().block_tokens() as usize;
        let mut groups = self.map.layout().groups().iter().map(|group| &group.layers);
        let group = groups.position(|layers| layers.contains(&(layer as u32))).unwrap();
        let layer = self.map.layout().groups()[group].layers.iter().position(|l| *l as usize == layer).unwrap();
        let blocks = in_group(group, &self.blocks(sequence));
        let is_state = self.map.layout().groups()[group].kind == GroupKind::State;
        let mut bytes = Vec::new();
        for plane in 0..self.map.layout().groups()[group].planes.len() {
            // A state is one row.
            for token in if is_state { tokens - 1..tokens } else { 0..tokens } {
                let at = if is_state { 0 } else { (token % block_tokens) as u32 };
                let range = self.map.token_range(group, layer, blocks[token / block_tokens], plane, at..at + 1);
                let mut out = vec![0; range.len()];
                self.memory.read_by(soon(), range.start, &mut out).unwrap();
                bytes.extend(out);
            }
        }
        bytes
    }
}

/// Blocks of another group, from those of the first.
fn in_group(group: usize, blocks: &[BlockId]) -> Vec<BlockId> {
    blocks.iter().map(|block| BlockId(block.0 ^ (group as u32 & 1))).collect()
}

/// The table of a step's states: the state behind `n` positions is in the block of the last of them.
fn states(segment: &StepSegment, blocks: &[BlockId], block_tokens: usize) -> BlockTable {
    let StepSegment { position: from, rows, .. } = *segment;
    let live = GroupKind::State.live(from..from + rows, block_tokens);
    let [read, write] = [from, from + rows].map(|end| blocks[end.saturating_sub(1) / block_tokens]);
    BlockTable { first: live.start, blocks: if live.len() == 2 { vec![read, write] } else { vec![write] } }
}

/// Rows on whole block tables.
#[derive(Clone, Default)]
struct Batch {
    ids: Vec<TokenId>,
    /// With the tables of the first group.
    segments: Vec<StepSegment>,
    logit_rows: Vec<usize>,
}

/// A model with its own pool.
struct Rig {
    model: Model,
    pool: Pool,
    steps: TableSteps,
}

/// Rows of one sequence: `tokens[from..to]`, computed on the blocks of `sequence`.
#[derive(Clone, Copy)]
struct Rows {
    sequence: u32,
    from: usize,
    to: usize,
}

impl Rig {
    fn new(source: &dyn ModelSource, device: &dyn Device, dtype: Dtype, block_tokens: u32) -> Self {
        let mut model = Model::load(source, device, config(dtype), &|_| ()).unwrap();
        let map = KvPoolMap::try_new(model.layout(block_tokens).unwrap(), 2 * 256 / block_tokens).unwrap();
        let memory = device.alloc_pool(&map).unwrap();
        memory.write_by(soon(), 0, &vec![NEVER_STORED; map.bytes()]).unwrap();
        model.bind(memory.clone(), &map).unwrap();
        Self { model, pool: Pool { memory, map }, steps: TableSteps::default() }
    }

    fn reference(spec: &str, dtype: Dtype, block_tokens: u32) -> Self {
        Self::new(&random(spec), &*reference(dtype), dtype, block_tokens)
    }

    /// Launches a batch, all of whose layers are observed, and waits for it.
    fn run(&mut self, batch: &Batch, observer: &mut dyn FnMut(u32, &Fence)) -> Result<Logits, ModelError> {
        let Batch { ids, segments, logit_rows } = batch.clone();
        let mut steps = self.steps;
        let layers = self.model.spec().layers.len() as u32;
        let segment = |group: usize, s: &StepSegment| {
            let (blocks, layout) = (in_group(group, &s.table.blocks), self.pool.map.layout());
            let table = match layout.groups()[group].kind {
                GroupKind::State => states(s, &blocks, layout.block_tokens() as usize),
                _ => BlockTable::from_start(blocks),
            };
            StepSegment { table, ..s.clone() }
        };
        let groups = 0..self.pool.map.layout().groups().len();
        let groups: Vec<_> = groups.map(|group| segments.iter().map(|s| segment(group, s)).collect()).collect();
        self.model.launch(&steps.step_of_groups(ids, &groups, logit_rows, layers), observer)?;
        self.steps = steps;
        Ok(self.model.finish()?.logits)
    }

    /// One step that returns the logits of every row.
    fn step(&mut self, rows: &[Rows], all: &[TokenId]) -> Logits {
        let batch = self.batch(rows, all);
        self.run(&batch, &mut |_, _| ()).unwrap()
    }

    fn batch(&self, rows: &[Rows], all: &[TokenId]) -> Batch {
        let ids: Vec<TokenId> = rows.iter().flat_map(|r| &all[r.from..r.to]).copied().collect();
        let table = |sequence| BlockTable::from_start(self.pool.blocks(sequence));
        let segment = |r: &Rows| StepSegment { position: r.from, rows: r.to - r.from, table: table(r.sequence) };
        Batch { logit_rows: (0..ids.len()).collect(), ids, segments: rows.iter().map(segment).collect() }
    }
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}
