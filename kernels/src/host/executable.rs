//! A program on the host: the canonical orders of its operations, one after another.

use super::{HostKernels, KvStep, Loaded, Scores, Shared, Store};
use crate::device::{Bounds, DeviceError, Executable, LayerObserver, RopeTable};
use crate::kv::KvBinding;
use crate::program::check::{self, Sizes};
use crate::program::{self, Op, Program};
use crate::step::{SlotSamplers, SlotTable, StepInput, StepOutput, StepSegment};
use baton_memory::PoolMemory;
use baton_types::fence::AlreadyDone;
use baton_types::{BlockId, Fence, KvPoolMap, MemoryKind};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

/// An operation with its weights.
enum Resolved<M> {
    Embed(Arc<Loaded<M>>),
    Qkv(Qkv<M>),
    Attend {
        layer: usize,
        scores: Scores,
    },
    Out(Projection<M>),
    /// With the columns of the gate.
    GateUp(Norm, Arc<Loaded<M>>, usize),
    Down(Projection<M>),
    Select,
    Head(Norm, Arc<Loaded<M>>),
    Sample,
}

/// A projection of `k` columns that is added to the residual stream.
struct Projection<M> {
    weight: Arc<Loaded<M>>,
    k: usize,
    partitions: usize,
}

struct Norm {
    gain: Vec<f32>,
    eps: f32,
}

struct Qkv<M> {
    layer: u32,
    norm: Norm,
    weight: Arc<Loaded<M>>,
    /// Of query, key and value.
    bias: Option<Vec<f32>>,
    /// Columns of query, and of key and value.
    query: usize,
    kv: usize,
    /// Of query and key.
    head_norms: Option<[Norm; 2]>,
    rope: Arc<RopeTable>,
}

/// The activations of one step, at their largest size; an operation uses the rows of the step.
struct Activations {
    residual: Vec<f32>,
    /// The residual stream after a norm.
    normed: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Heads after their norm, and rows that are being selected.
    scratch: Vec<f32>,
    logits: Vec<f32>,
}

/// A compiled program.
pub(super) struct HostExecutable<K: HostKernels> {
    shared: Arc<Shared<K>>,
    program: Program,
    ops: Vec<Resolved<K::Matrix>>,
    sizes: Sizes,
    bounds: Bounds,
    activations: Activations,
    input: K::Input,
    pool: Option<KvBinding>,
    slots: SlotTable,
    samplers: SlotSamplers,
    /// Output of the steps that were launched and not finished.
    launched: VecDeque<StepOutput>,
}

/// Zeroed memory, or a typed error if the allocation fails.
fn zeros(rows: usize, cols: usize, what: &str) -> Result<Vec<f32>, DeviceError> {
    let len = rows.saturating_mul(cols);
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| DeviceError::OutOfMemory {
        kind: MemoryKind::Host,
        bytes: len.saturating_mul(4),
        what: what.into(),
    })?;
    data.resize(len, 0.0);
    Ok(data)
}

impl Activations {
    fn alloc(sizes: &Sizes, bounds: &Bounds) -> Result<Self, DeviceError> {
        let rows = |cols, what| zeros(bounds.rows_max, cols, what);
        Ok(Self {
            residual: rows(sizes.hidden, "the residual stream")?,
            normed: rows(sizes.hidden, "normed rows")?,
            query: rows(sizes.query, "queries")?,
            key: rows(sizes.kv, "keys")?,
            value: rows(sizes.kv, "values")?,
            attended: rows(sizes.query, "attention")?,
            gate: rows(sizes.ffn, "gates")?,
            up: rows(sizes.ffn, "up projections")?,
            scratch: rows(sizes.hidden.max(sizes.query), "selected rows")?,
            // A step never selects more rows than it has.
            logits: zeros(bounds.logit_rows_max.min(bounds.rows_max), sizes.vocab, "logits")?,
        })
    }
}

impl<K: HostKernels> HostExecutable<K> {
    pub(super) fn try_new(shared: Arc<Shared<K>>, program: Program, bounds: Bounds) -> Result<Self, DeviceError> {
        let sizes = program.check(&bounds)?;
        let ops = program.ops.iter().map(|op| shared.resolve(op)).collect::<Result<_, _>>()?;
        let activations = Activations::alloc(&sizes, &bounds)?;
        Ok(Self {
            shared,
            program,
            ops,
            sizes,
            bounds,
            activations,
            input: K::Input::default(),
            pool: None,
            slots: SlotTable::new(bounds.slots_max),
            samplers: SlotSamplers::new(bounds.slots_max, sizes.vocab),
            launched: VecDeque::new(),
        })
    }
}

impl<K: HostKernels> Shared<K> {
    fn norm(&self, norm: &program::Norm) -> Result<Norm, DeviceError> {
        Ok(Norm { gain: self.vector(norm.gain)?, eps: norm.eps })
    }

    fn projection(&self, op: &program::Project) -> Result<Projection<K::Matrix>, DeviceError> {
        Ok(Projection { weight: self.matrix(op.weight, 1)?, k: op.weight.k, partitions: op.partitions })
    }

    fn resolve(&self, op: &Op) -> Result<Resolved<K::Matrix>, DeviceError> {
        Ok(match op {
            Op::Embed(table) => Resolved::Embed(self.matrix(*table, 1)?),
            Op::Qkv(op) => Resolved::Qkv(Qkv {
                layer: op.layer,
                norm: self.norm(&op.norm)?,
                weight: self.matrix(op.weight, 3)?,
                bias: op.bias.map(|bias| self.vector(bias)).transpose()?,
                query: op.heads * op.head_dim,
                kv: op.kv_heads * op.head_dim,
                head_norms: match &op.head_norms {
                    Some(norms) => Some([self.norm(&norms.query)?, self.norm(&norms.key)?]),
                    None => None,
                },
                rope: self.rope(op.rope)?,
            }),
            Op::Attend(op) => Resolved::Attend {
                layer: op.layer as usize,
                scores: Scores { scale: op.scale, window: op.window.map(|tokens| tokens as usize) },
            },
            Op::Out(op) => Resolved::Out(self.projection(op)?),
            Op::GateUp(op) => Resolved::GateUp(self.norm(&op.norm)?, self.matrix(op.weight, 2)?, op.weight.n / 2),
            Op::Down(op) => Resolved::Down(self.projection(op)?),
            Op::Select => Resolved::Select,
            Op::Head(op) => Resolved::Head(self.norm(&op.norm)?, self.matrix(op.weight, 1)?),
            Op::Sample => Resolved::Sample,
        })
    }
}

impl<K: HostKernels> Executable for HostExecutable<K> {
    fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), DeviceError> {
        let pool = KvBinding::try_new(memory, map)?;
        self.program.check_pool(&pool)?;
        let numerics = self.shared.kernels.numerics();
        if let Some(dtype) = pool.planes().map(|plane| pool.dtype(plane)).into_iter().find(|d| !numerics.takes_kv(*d)) {
            let message = format!("class {numerics} attends to KV in bf16, the pool has {dtype}");
            return Err(DeviceError::Shape { op: "bind", message });
        }
        self.pool = Some(pool);
        Ok(())
    }

    fn launch(&mut self, step: &StepInput, observer: LayerObserver<'_>) -> Result<(), DeviceError> {
        let kv = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
        let tables = self.slots.launch(step, &kv.limits(&self.program, self.bounds, self.sizes.vocab))?;
        let (ids, selected) = (self.samplers.begin(step), step.selected_rows());
        let fence: Fence = Arc::new(AlreadyDone);
        let mut run = Run {
            kernels: &self.shared.kernels,
            kv,
            a: &mut self.activations,
            input: &mut self.input,
            hidden: self.sizes.hidden,
        };
        let (mut rows, mut segments) = (ids.len(), Cow::Borrowed(tables.as_slice()));
        let (mut query, mut output) = (0, StepOutput::default());
        for op in &self.ops {
            match op {
                Resolved::Embed(table) => run.embed(table, &ids),
                Resolved::Qkv(op) => {
                    query = op.query;
                    run.qkv(op, &segments, rows);
                    if step.observed.contains(&op.layer) {
                        observer(op.layer, &fence);
                    }
                }
                Resolved::Attend { layer, scores } => run.attend(*layer, *scores, &segments, rows * query),
                Resolved::Out(op) => run.out(op, rows),
                Resolved::GateUp(norm, weight, ffn) => run.gate_up(norm, weight, *ffn, rows),
                Resolved::Down(op) => run.down(op, rows),
                Resolved::Select => {
                    if selected.is_empty() {
                        break;
                    }
                    run.select(&selected, query);
                    rows = selected.len();
                    segments = Cow::Owned(select_segments(&tables, &selected));
                }
                Resolved::Head(norm, weight) => run.head(norm, weight, rows * self.sizes.vocab, rows),
                Resolved::Sample => output = self.samplers.sample(step, &run.a.logits[..rows * self.sizes.vocab]),
            }
        }
        self.launched.push_back(output);
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, DeviceError> {
        let output = self.launched.pop_front();
        let output = output.ok_or_else(|| DeviceError::Step("finish without a launched step".into()))?;
        self.slots.finish(&output);
        Ok(output)
    }

    fn copy_kv(&mut self, from: BlockId, to: BlockId, tokens: usize) -> Result<(), DeviceError> {
        let kv = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
        check::copy_kv(kv, from, to, tokens)?;
        kv.copy(from, to, tokens);
        Ok(())
    }
}

/// Each selected row as a segment of its own.
fn select_segments(segments: &[StepSegment], rows: &[usize]) -> Vec<StepSegment> {
    let mut firsts = Vec::with_capacity(segments.len());
    let mut first = 0;
    for segment in segments {
        firsts.push(first);
        first += segment.rows;
    }
    let one = |row: &usize| {
        let index = firsts.partition_point(|first| first <= row) - 1;
        let position = segments[index].position + row - firsts[index];
        StepSegment { position, rows: 1, blocks: segments[index].blocks.clone() }
    };
    rows.iter().map(one).collect()
}

/// The operations over the activations of one step.
struct Run<'a, K: HostKernels> {
    kernels: &'a K,
    kv: &'a KvBinding,
    a: &'a mut Activations,
    input: &'a mut K::Input,
    hidden: usize,
}

/// `out = x * w^T` for each part of a weight.
fn project<K: HostKernels>(
    kernels: &K,
    x: &[f32],
    rows: usize,
    weight: &K::Matrix,
    input: &mut K::Input,
    outs: &mut [&mut [f32]],
) {
    kernels.input(x, rows, weight, input);
    kernels.linear(input, weight, 1, Store::Set, outs);
}

impl<K: HostKernels> Run<'_, K> {
    fn embed(&mut self, table: &Loaded<K::Matrix>, ids: &[u32]) {
        for (row, &id) in self.a.residual.chunks_exact_mut(self.hidden).zip(ids) {
            self.kernels.row(table.matrix(), id as usize, row);
        }
    }

    fn norm(&mut self, norm: &Norm, rows: usize) {
        let len = rows * self.hidden;
        self.kernels.rms_norm(&self.a.residual[..len], &norm.gain, norm.eps, &mut self.a.normed[..len]);
    }

    fn qkv(&mut self, op: &Qkv<K::Matrix>, segments: &[StepSegment], rows: usize) {
        self.norm(&op.norm, rows);
        let a = &mut *self.a;
        let normed = &a.normed[..rows * self.hidden];
        let (q, k, v) = (&mut a.query[..rows * op.query], &mut a.key[..rows * op.kv], &mut a.value[..rows * op.kv]);
        project(self.kernels, normed, rows, op.weight.matrix(), self.input, &mut [&mut *q, &mut *k, &mut *v]);
        if let Some(bias) = &op.bias {
            let (of_query, rest) = bias.split_at(op.query);
            let (of_key, of_value) = rest.split_at(op.kv);
            for (x, bias) in [(&mut *q, of_query), (&mut *k, of_key), (&mut *v, of_value)] {
                x.chunks_exact_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
            }
        }
        if let Some([query, key]) = &op.head_norms {
            for (x, norm) in [(&mut *q, query), (&mut *k, key)] {
                let heads = &mut a.scratch[..x.len()];
                self.kernels.rms_norm(x, &norm.gain, norm.eps, heads);
                x.copy_from_slice(heads);
            }
        }
        let step = KvStep { kv: self.kv, layer: op.layer as usize, segments };
        self.kernels.rope_store(step, &op.rope, q, k, v);
    }

    fn attend(&mut self, layer: usize, scores: Scores, segments: &[StepSegment], len: usize) {
        let step = KvStep { kv: self.kv, layer, segments };
        self.kernels.attend(step, &self.a.query[..len], scores, &mut self.a.attended[..len]);
    }

    fn out(&mut self, op: &Projection<K::Matrix>, rows: usize) {
        let residual = &mut self.a.residual[..rows * self.hidden];
        let attended = &self.a.attended[..rows * op.k];
        let weight = op.weight.matrix();
        self.kernels.input(attended, rows, weight, self.input);
        self.kernels.linear(self.input, weight, op.partitions, Store::Add, &mut [residual]);
    }

    fn gate_up(&mut self, norm: &Norm, weight: &Loaded<K::Matrix>, ffn: usize, rows: usize) {
        self.norm(norm, rows);
        let a = &mut *self.a;
        let (normed, len) = (&a.normed[..rows * self.hidden], rows * ffn);
        project(self.kernels, normed, rows, weight.matrix(), self.input, &mut [&mut a.gate[..len], &mut a.up[..len]]);
        self.kernels.silu_mul(&mut a.gate[..len], &a.up[..len]);
    }

    fn down(&mut self, op: &Projection<K::Matrix>, rows: usize) {
        let residual = &mut self.a.residual[..rows * self.hidden];
        let inner = &self.a.gate[..rows * op.k];
        let weight = op.weight.matrix();
        self.kernels.input(inner, rows, weight, self.input);
        self.kernels.linear(self.input, weight, op.partitions, Store::Add, &mut [residual]);
    }

    /// Moves the selected rows of residual stream and query to the front.
    fn select(&mut self, rows: &[usize], query: usize) {
        let a = &mut *self.a;
        for (x, cols) in [(&mut a.residual, self.hidden), (&mut a.query, query)] {
            for (to, &row) in a.scratch.chunks_exact_mut(cols).zip(rows) {
                to.copy_from_slice(&x[row * cols..(row + 1) * cols]);
            }
            x[..rows.len() * cols].copy_from_slice(&a.scratch[..rows.len() * cols]);
        }
    }

    fn head(&mut self, norm: &Norm, weight: &Loaded<K::Matrix>, len: usize, rows: usize) {
        self.norm(norm, rows);
        let normed = &self.a.normed[..rows * self.hidden];
        project(self.kernels, normed, rows, weight.matrix(), self.input, &mut [&mut self.a.logits[..len]]);
    }
}
