//! A program on the host: the canonical orders of its operations, one after another.

use super::adapted::AdaptedRows;
use super::{ExpertsOf, GateUpOf, HostKernels, Loaded, NormOf, ProjectOf, QkvOf, Scores, Scratch, Shared, parts};
use crate::adapter::{Linear, PackedAdapter};
use crate::device::{Bounds, DeviceError, Executable, LayerObserver, Role, RopeTable, Weight};
use crate::kv::PoolBinding;
use crate::program::check::{self, Sizes};
use crate::program::{self, Activation, Op, Program};
use crate::step::{AdapterSlot, Launched, Segments, SlotSamplers, SlotTable, StepInput, StepOutput};
use baton_memory::PoolMemory;
use baton_types::fence::AlreadyDone;
use baton_types::{BlockId, Fence, KvPoolMap, MemoryKind, TokenId};
use std::collections::VecDeque;
use std::sync::Arc;

/// An operation with its weights.
enum Resolved<M> {
    /// With its factor.
    Embed(Arc<Loaded<M>>, f32),
    Qkv(Qkv<M>),
    Attend(Attend),
    Out(Projection<M>),
    GateUp(GateUp<M>),
    Down(Projection<M>),
    Experts(Experts<M>),
    Select,
    Head(Head<M>),
    Sample,
}

struct Attend {
    op: program::Attend,
    sinks: Option<Vec<f32>>,
}

/// A projection of `k` columns that is added to the residual stream.
struct Projection<M> {
    weight: Arc<Loaded<M>>,
    k: usize,
    partitions: usize,
    bias: Option<Vec<f32>>,
    norm: Option<Norm>,
    factor: f32,
}

struct GateUp<M> {
    norm: Option<Norm>,
    weight: Arc<Loaded<M>>,
    activation: Activation,
    /// Columns of the gate.
    ffn: usize,
}

struct Experts<M> {
    norm: Option<Norm>,
    /// Router, gate and up, and down.
    weights: [Arc<Loaded<M>>; 3],
    /// Of the same.
    biases: Option<[Vec<f32>; 3]>,
    op: program::Experts,
}

struct Head<M> {
    norm: Norm,
    weight: Arc<Loaded<M>>,
    factor: f32,
    soft_cap: Option<f32>,
}

struct Norm {
    gain: Vec<f32>,
    eps: f32,
}

struct Qkv<M> {
    layer: u32,
    norm: Option<Norm>,
    weight: Arc<Loaded<M>>,
    /// Of query, key and value.
    bias: Option<Vec<f32>>,
    /// Columns of query, and of key and value.
    query: usize,
    kv: usize,
    /// Of query and key.
    norms: Option<[Norm; 2]>,
    rope: Arc<RopeTable>,
}

/// The activations of one step, at their largest size; an operation uses the rows of the step.
struct Activations {
    residual: Vec<f32>,
    query: Vec<f32>,
    attended: Vec<f32>,
    inner: Vec<f32>,
    /// Rows that are being selected.
    selected: Vec<f32>,
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
    scratch: Scratch<K::Input>,
    pool: Option<PoolBinding>,
    slots: SlotTable,
    /// By adapter slot.
    adapters: Vec<Option<Arc<PackedAdapter>>>,
    samplers: SlotSamplers,
    /// What the running step needs of its slots.
    step: Launched,
    /// Its selected rows as segments of their own, for each group.
    selected: Vec<Segments>,
    /// The token of each of its rows.
    ids: Vec<TokenId>,
    /// Every layer's: a step is computed when it is launched.
    fence: Fence,
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
        help: "lower engine.chunk_tokens_max or engine.running_max".into(),
    })?;
    data.resize(len, 0.0);
    Ok(data)
}

impl Activations {
    fn alloc(sizes: &Sizes, bounds: &Bounds) -> Result<Self, DeviceError> {
        let rows = |cols, what| zeros(bounds.rows_max, cols, what);
        // A step never selects more rows than it has.
        let logit_rows = bounds.logit_rows_max.min(bounds.rows_max);
        Ok(Self {
            residual: rows(sizes.hidden, "the residual stream")?,
            query: rows(sizes.query, "queries")?,
            attended: rows(sizes.query, "attention")?,
            inner: rows(sizes.ffn, "gates")?,
            selected: zeros(logit_rows, sizes.hidden.max(sizes.query), "selected rows")?,
            logits: zeros(logit_rows, sizes.vocab, "logits")?,
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
            scratch: Scratch::default(),
            pool: None,
            slots: SlotTable::with_adapters(bounds.slots_max, bounds.adapters.slots_max),
            adapters: (0..bounds.adapters.slots_max).map(|_| None).collect(),
            samplers: SlotSamplers::new(bounds.slots_max, sizes.vocab),
            step: Launched::default(),
            selected: Vec::new(),
            ids: Vec::new(),
            fence: Arc::new(AlreadyDone),
            launched: VecDeque::new(),
        })
    }
}

impl<K: HostKernels> Shared<K> {
    fn norm(&self, norm: &program::Norm) -> Result<Norm, DeviceError> {
        Ok(Norm { gain: self.vector(norm.gain)?, eps: norm.eps })
    }

    fn norm_if(&self, norm: Option<program::Norm>) -> Result<Option<Norm>, DeviceError> {
        norm.map(|norm| self.norm(&norm)).transpose()
    }

    fn projection(&self, op: &program::Project) -> Result<Projection<K::Matrix>, DeviceError> {
        let norm = self.norm_if(op.norm)?;
        let (weight, k) = (self.matrix(op.weight, 1)?, op.weight.k);
        let bias = self.vector_if(op.bias)?;
        Ok(Projection { weight, k, partitions: op.partitions, bias, norm, factor: op.factor })
    }

    fn vector_if(&self, weight: Option<Weight>) -> Result<Option<Vec<f32>>, DeviceError> {
        weight.map(|weight| self.vector(weight)).transpose()
    }

    fn resolve(&self, op: &Op) -> Result<Resolved<K::Matrix>, DeviceError> {
        Ok(match op {
            Op::Embed(op) => Resolved::Embed(self.matrix(op.table, 1)?, op.factor),
            Op::Qkv(op) => Resolved::Qkv(Qkv {
                layer: op.layer,
                norm: self.norm_if(op.norm)?,
                weight: self.matrix(op.weight, 3)?,
                bias: self.vector_if(op.bias)?,
                query: op.heads * op.head_dim,
                kv: op.kv_heads * op.head_dim,
                norms: match &op.norms {
                    Some(norms) => Some([self.norm(&norms.query)?, self.norm(&norms.key)?]),
                    None => None,
                },
                rope: self.rope(op.rope)?,
            }),
            Op::Attend(op) => Resolved::Attend(Attend { op: *op, sinks: self.vector_if(op.sinks)? }),
            Op::Out(op) => Resolved::Out(self.projection(op)?),
            Op::GateUp(op) => Resolved::GateUp(GateUp {
                norm: self.norm_if(op.norm)?,
                weight: self.matrix(op.weight, 2)?,
                activation: op.activation,
                ffn: op.weight.n / 2,
            }),
            Op::Down(op) => Resolved::Down(self.projection(op)?),
            Op::Experts(op) => Resolved::Experts(Experts {
                norm: self.norm_if(op.norm)?,
                weights: [
                    self.matrix(op.router, 1)?,
                    self.matrix(op.gate_up, 2 * op.router.n)?,
                    self.matrix(op.down, op.router.n)?,
                ],
                biases: match op.biases {
                    Some(program::ExpertBiases { router, gate_up, down }) => {
                        Some([self.vector(router)?, self.vector(gate_up)?, self.vector(down)?])
                    }
                    None => None,
                },
                op: *op,
            }),
            Op::Select => Resolved::Select,
            Op::Head(op) => Resolved::Head(Head {
                norm: self.norm(&op.norm)?,
                weight: self.matrix(op.weight, 1)?,
                factor: op.factor,
                soft_cap: op.soft_cap,
            }),
            Op::Sample => Resolved::Sample,
        })
    }
}

impl<K: HostKernels> Executable for HostExecutable<K> {
    fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), DeviceError> {
        let pool = PoolBinding::try_new(memory, map, &self.program, self.bounds, self.sizes.vocab)?;
        let numerics = self.shared.kernels.numerics();
        let dtypes = pool.groups().iter().flat_map(|kv| kv.planes().map(|plane| kv.dtype(plane)));
        if let Some(takes) = numerics.kv()
            && let Some(dtype) = { dtypes }.find(|dtype| *dtype != takes)
        {
            let message = format!("class {numerics} attends to KV in {takes}, the pool has {dtype}");
            return Err(DeviceError::Shape { op: "bind", message });
        }
        self.pool = Some(pool);
        Ok(())
    }

    fn load_adapter(&mut self, slot: AdapterSlot, adapter: Arc<PackedAdapter>) -> Result<(), DeviceError> {
        adapter.check(slot, &self.program, self.bounds.adapters)?;
        self.slots.set_adapter(slot, true)?;
        self.adapters[slot.0 as usize] = Some(adapter);
        Ok(())
    }

    fn unload_adapter(&mut self, slot: AdapterSlot) -> Result<(), DeviceError> {
        self.slots.set_adapter(slot, false)?;
        self.adapters[slot.0 as usize] = None;
        Ok(())
    }

    fn leave(&mut self, slots: &[usize]) -> Result<(), DeviceError> {
        // A slot's sampler is replaced by that of the next sequence.
        self.slots.leave(slots)
    }

    fn launch(&mut self, step: &StepInput, observer: LayerObserver<'_>) -> Result<(), DeviceError> {
        let kv = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
        self.slots.launch(step, kv.limits(), &mut self.step)?;
        self.samplers.begin(step, &mut self.ids);
        let adapter = |slot: usize| self.adapters[self.slots.adapter(slot)?.0 as usize].as_deref();
        let mut adapted = AdaptedRows::new(step.segments.iter().map(|rows| (rows.rows, adapter(rows.slot))));
        let mut layer = 0;
        let Launched { segments: all, selected } = &self.step;
        let (kernels, a, scratch) = (&self.shared.kernels, &mut self.activations, &mut self.scratch);
        let hidden = self.sizes.hidden;
        let (mut rows, mut segments) = (self.ids.len(), all.as_slice());
        let (mut query, mut output) = (0, StepOutput::default());
        for op in &self.ops {
            let residual = &mut a.residual[..rows * hidden];
            match op {
                Resolved::Embed(table, factor) => kernels.embed(table.matrix(), *factor, &self.ids, residual),
                Resolved::Qkv(op) => {
                    query = op.query;
                    let step_of = kv.step(op.layer, segments);
                    layer = op.layer;
                    let (w, to) = (op.weight.matrix(), &mut a.query[..rows * query]);
                    match adapted.of(layer, &[Linear::Query, Linear::Key, Linear::Value]) {
                        None => kernels.qkv(w, &op.of(), step_of, residual, to, scratch),
                        Some(adapted) => {
                            parts::qkv(kernels, w, &op.of(), step_of, residual, to, scratch, Some(adapted))
                        }
                    }
                    if step.observed.contains(&op.layer) {
                        observer(op.layer, &self.fence);
                    }
                }
                Resolved::Attend(op) => {
                    let step_of = kv.step(op.op.layer, segments);
                    let len = rows * query;
                    kernels.attend(step_of, &a.query[..len], op.of(), &mut a.attended[..len]);
                }
                Resolved::Out(op) => {
                    let (w, of, x) = (op.weight.matrix(), op.of(Role::Out, rows), &a.attended[..rows * op.k]);
                    match adapted.of(layer, &[Linear::Out]) {
                        None => kernels.project(w, &of, x, residual, scratch),
                        Some(adapted) => {
                            parts::project(kernels, w, &of, x, residual, scratch, Some((adapted, Linear::Out)))
                        }
                    }
                }
                Resolved::GateUp(op) => {
                    let (w, of, to) = (op.weight.matrix(), op.of(rows), &mut a.inner[..rows * op.ffn]);
                    match adapted.of(layer, &[Linear::Gate, Linear::Up]) {
                        None => kernels.gate_up(w, &of, residual, to, scratch),
                        Some(adapted) => parts::gate_up(kernels, w, &of, residual, to, scratch, Some(adapted)),
                    }
                }
                Resolved::Down(op) => {
                    let (w, of, x) = (op.weight.matrix(), op.of(Role::Down, rows), &a.inner[..rows * op.k]);
                    match adapted.of(layer, &[Linear::Down]) {
                        None => kernels.project(w, &of, x, residual, scratch),
                        Some(adapted) => {
                            parts::project(kernels, w, &of, x, residual, scratch, Some((adapted, Linear::Down)))
                        }
                    }
                }
                Resolved::Experts(op) => {
                    let matrices = op.weights.each_ref().map(|weight| weight.matrix());
                    kernels.experts(matrices, &op.of(rows), residual, scratch);
                }
                Resolved::Select => {
                    if selected.is_empty() {
                        break;
                    }
                    select(selected, hidden, &mut a.residual, &mut a.selected);
                    select(selected, query, &mut a.query, &mut a.selected);
                    rows = selected.len();
                    adapted = adapted.select(selected);
                    self.selected.resize_with(all.len(), Segments::default);
                    for (to, group) in self.selected.iter_mut().zip(all) {
                        to.select(group.as_slice(), selected);
                    }
                    segments = self.selected.as_slice();
                }
                Resolved::Head(op) => {
                    let logits = &mut a.logits[..rows * self.sizes.vocab];
                    kernels.head(op.weight.matrix(), op.norm.of(), residual, logits, scratch);
                    if op.factor != 1.0 || op.soft_cap.is_some() {
                        kernels.finish_logits(logits, op.factor, op.soft_cap);
                    }
                }
                Resolved::Sample => {
                    output = kernels.sample(&mut self.samplers, step, &a.logits[..rows * self.sizes.vocab]);
                }
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

    fn copy_kv(&mut self, group: usize, from: BlockId, to: BlockId, tokens: usize) -> Result<(), DeviceError> {
        let pool = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
        check::copy_kv(pool, group, from, to, tokens)?;
        pool.bindings()[group].copy(from, to, tokens);
        Ok(())
    }
}

/// Moves the selected rows to the front, by way of `scratch`.
fn select(rows: &[usize], cols: usize, x: &mut [f32], scratch: &mut [f32]) {
    for (to, &row) in scratch.chunks_exact_mut(cols).zip(rows) {
        to.copy_from_slice(&x[row * cols..(row + 1) * cols]);
    }
    x[..rows.len() * cols].copy_from_slice(&scratch[..rows.len() * cols]);
}

impl Norm {
    fn of(&self) -> NormOf<'_> {
        NormOf { gain: &self.gain, eps: self.eps }
    }
}

impl Attend {
    fn of(&self) -> Scores<'_> {
        let program::Attend { scale, window, soft_cap, .. } = self.op;
        Scores { scale, window: window.map(|tokens| tokens as usize), soft_cap, sinks: self.sinks.as_deref() }
    }
}

impl<M> Projection<M> {
    fn of(&self, role: Role, rows: usize) -> ProjectOf<'_> {
        let norm = self.norm.as_ref().map(Norm::of);
        let bias = self.bias.as_deref();
        ProjectOf { role, partitions: self.partitions, rows, bias, norm, factor: self.factor }
    }
}

impl<M> GateUp<M> {
    fn of(&self, rows: usize) -> GateUpOf<'_> {
        GateUpOf { norm: self.norm.as_ref().map(Norm::of), activation: self.activation, rows }
    }
}

impl<M> Experts<M> {
    fn of(&self, rows: usize) -> ExpertsOf<'_> {
        let program::Experts { router, down, partitions, used, renormalize, activation, factor, .. } = self.op;
        let norm = self.norm.as_ref().map(Norm::of);
        let biases = self.biases.as_ref().map(|biases| biases.each_ref().map(Vec::as_slice));
        let (experts, ffn) = (router.n, down.k);
        ExpertsOf { norm, experts, ffn, used, renormalize, activation, partitions, biases, factor, rows }
    }
}

impl<M> Qkv<M> {
    fn of(&self) -> QkvOf<'_> {
        QkvOf {
            norm: self.norm.as_ref().map(Norm::of),
            bias: self.bias.as_deref(),
            query: self.query,
            kv: self.kv,
            norms: self.norms.as_ref().map(|norms| norms.each_ref().map(Norm::of)),
            rope: &self.rope,
        }
    }
}
