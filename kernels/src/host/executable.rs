//! A program on the host: the canonical orders of its operations, one after another.

use super::adapted::AdaptedRows;
use super::resolved::Resolved;
use super::{HeadProducts, HostKernels, Scratch, Shared, parts};
use crate::adapter::{Linear, PackedAdapter};
use crate::device::{Bounds, DeviceError, Executable, LayerObserver, Role};
use crate::kv::PoolBinding;
use crate::program::Program;
use crate::program::check::{self, Sizes};
use crate::step::{AdapterSlot, Launched, Segments, SlotSamplers, SlotTable, StepInput, StepOutput};
use baton_memory::PoolMemory;
use baton_types::fence::AlreadyDone;
use baton_types::{BlockId, Fence, KvPoolMap, MemoryKind, TokenId};
use std::collections::VecDeque;
use std::sync::Arc;

/// The activations of one step, at their largest size; an operation uses the rows of the step.
struct Activations {
    residual: Vec<f32>,
    query: Vec<f32>,
    attended: Vec<f32>,
    /// Of attention's output.
    gate: Vec<f32>,
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
            gate: rows(sizes.gate, "gates of attention")?,
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

impl<K: HostKernels> Executable for HostExecutable<K> {
    fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), DeviceError> {
        let pool = PoolBinding::try_new(memory, map, &self.program, self.bounds, self.sizes.vocab)?;
        let numerics = self.shared.kernels.numerics();
        // States are f32 in every class.
        let by_position = pool.groups().iter().filter(|kv| !kv.is_state());
        let dtypes = by_position.flat_map(|kv| kv.planes().map(|plane| kv.dtype(plane)));
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
        // Columns of what attention yields, and of its gate; whether it is there already.
        let (mut attended, mut gate, mut is_attended) = (0, 0, false);
        for op in &self.ops {
            let residual = &mut a.residual[..rows * hidden];
            match op {
                Resolved::Embed(table, factor) => kernels.embed(table.matrix(), *factor, &self.ids, residual),
                Resolved::Qkv(op) => {
                    (query, attended) = (op.query, op.query);
                    (gate, is_attended) = (if op.gate { query } else { 0 }, false);
                    let step_of = kv.step(op.layer, segments);
                    layer = op.layer;
                    let (w, to) = (op.weight.matrix(), &mut a.query[..rows * query]);
                    let to_gate = &mut a.gate[..rows * gate];
                    match adapted.of(layer, &[Linear::Query, Linear::Key, Linear::Value]) {
                        None => kernels.qkv(w, &op.of(), step_of, residual, to, to_gate, scratch),
                        Some(adapted) => {
                            parts::qkv(kernels, w, &op.of(), step_of, residual, to, to_gate, scratch, Some(adapted))
                        }
                    }
                    if step.observed.contains(&op.layer) {
                        observer(op.layer, &self.fence);
                    }
                }
                Resolved::Latent(op) => {
                    (query, attended) = (op.op.heads * op.op.dim(), op.op.heads * op.op.rank());
                    (gate, is_attended) = (0, false);
                    layer = op.op.layer;
                    let step_of = kv.step(layer, segments);
                    kernels.latent(&op.matrices(), &op.of(), step_of, residual, &mut a.query[..rows * query], scratch);
                    if step.observed.contains(&layer) {
                        observer(layer, &self.fence);
                    }
                }
                Resolved::GatedDelta(op) => {
                    (attended, is_attended, layer) = (op.op.value_heads * op.op.value_dim, true, op.op.layer);
                    let (step_of, to) = (kv.step(layer, segments), &mut a.attended[..rows * attended]);
                    kernels.gated_delta(op.weight.matrix(), &op.of(), step_of, residual, to, scratch);
                    if step.observed.contains(&layer) {
                        observer(layer, &self.fence);
                    }
                }
                Resolved::Gate => kernels.gate(&a.gate[..rows * gate], &mut a.attended[..rows * attended]),
                Resolved::Attend(op) => {
                    let step_of = kv.step(op.op.layer, segments);
                    let (q, to) = (&a.query[..rows * query], &mut a.attended[..rows * attended]);
                    kernels.attend(step_of, q, op.of(), to);
                }
                Resolved::Expand(op) => {
                    let of = HeadProducts { rows, heads: op.heads, k: op.rank, n: op.value, rest: 0 };
                    let values = &mut a.query[..rows * op.heads * op.value];
                    kernels.by_head(op.weight.matrix(), of, &a.attended[..rows * attended], values, scratch);
                    kernels.numerics().round_products(values);
                    std::mem::swap(&mut a.query, &mut a.attended);
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
                    kernels.experts(&op.matrices(), &op.of(rows), residual, scratch);
                }
                Resolved::Select => {
                    if selected.is_empty() {
                        break;
                    }
                    select(selected, hidden, &mut a.residual, &mut a.selected);
                    if is_attended {
                        select(selected, attended, &mut a.attended, &mut a.selected);
                    } else {
                        select(selected, query, &mut a.query, &mut a.selected);
                        if gate > 0 {
                            select(selected, gate, &mut a.gate, &mut a.selected);
                        }
                    }
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
