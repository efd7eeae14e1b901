//! A compiled program: its slots, its steps, and their graphs.

use super::arguments::pool::{CopyRows, RowsCopy, StridedRows};
use super::arguments::sampling::{NO_MASK, SampleRecord, Scatter};
use super::arguments::{Argument, In, Out, bytes_of};
use super::batch::{self, Batch};
use super::bound_pool::BoundPool;
use super::buffers::{Activations, StepLayout, WORD};
use super::driver::{Buffer, Command, Driver, Event, GraphId, Pinned, Purpose, Stream, end_of};
use super::launch::{Launcher, tile_rows};
use super::ops::{Op, products};
use super::plan::{Next, Plan, Shape};
use super::products::Pins;
use super::samplers::{self, Samplers, Segment};
use super::staging::Staging;
use super::weights::Weights;
use crate::adapter::PackedAdapter;
use crate::device::{Bounds, DeviceError, Executable, LayerObserver, STEPS_MAX};
use crate::kv::PoolLayout;
use crate::numerics::ATTENTION_SPLIT;
use crate::program::Program;
use crate::program::check::{self, Sizes};
use crate::step::{AdapterSlot, Delta, LateMask, Launched, Logits, SlotTable, StepInput, StepOutput};
use baton_memory::{PoolMemory, Rows};
use baton_types::{BlockId, Fence, FencePoll, FenceStatus, KvPoolMap};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// A compiled program.
pub(super) struct CudaExecutable {
    driver: Arc<dyn Driver>,
    /// Operations have their addresses.
    _weights: Arc<Weights>,
    program: Program,
    ops: Vec<Op>,
    sizes: Sizes,
    bounds: Bounds,
    launcher: Launcher,
    pins: Pins,
    stream: Stream,
    activations: Activations,
    layout: StepLayout,
    /// The step's array on the device, and its tables' new entries.
    step: Buffer,
    samplers: Samplers,
    /// Most rows of a tile, in whichever layer.
    tile_rows: usize,
    pool: Option<BoundPool>,
    slots: SlotTable,
    launched: Launched,
    batch: Batch,
    /// By slot: whether its sequence reports log-probabilities.
    logprobs: Vec<bool>,
    graphs: HashMap<Shape, GraphId>,
    /// What describes the copy of a fork.
    fork_staging: Staging,
    /// What the steps in flight upload, and download.
    transfers: Vec<Transfer>,
    running: VecDeque<Running>,
    steps: u64,
    /// A step failed behind the check of its slots: what is enqueued, and what the host holds for it, is unknown.
    is_broken: bool,
}

/// Host memory of one step in flight.
struct Transfer {
    staging: Staging,
    records: Arc<dyn Pinned>,
    logits: Option<Arc<dyn Pinned>>,
}

/// A step that is launched.
struct Running {
    transfer: usize,
    /// After its last download; `None` while its sampling waits for masks.
    end: Option<Event>,
    segments: Vec<Segment>,
    /// Rows that sample.
    sampling: usize,
    /// Masks of these; empty if none has one.
    masks: Vec<Option<LateMask>>,
    depths: usize,
    /// Where each requested row of logits is among the selected rows.
    logits: Vec<usize>,
}

/// The end of the stores of a layer.
struct StoredFence {
    driver: Arc<dyn Driver>,
    event: Event,
}

impl FencePoll for StoredFence {
    fn poll(&self) -> FenceStatus {
        self.driver.poll(self.event)
    }
}

impl Drop for StoredFence {
    fn drop(&mut self) {
        self.driver.forget(self.event);
    }
}

/// Buckets of decoded rows for which there is a graph.
fn bucket(rows: usize, rows_max: usize) -> Option<usize> {
    let rows = match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        65..=256 => rows.next_multiple_of(32),
        _ => return None,
    };
    (rows <= rows_max).then_some(rows)
}

impl CudaExecutable {
    pub(super) fn try_new(
        weights: Arc<Weights>,
        program: Program,
        ops: Vec<Op>,
        sizes: Sizes,
        bounds: Bounds,
    ) -> Result<Self, DeviceError> {
        let driver = weights.driver.clone();
        let launcher = Launcher { half: weights.half, processors: driver.gpu().processors };
        let pins = Pins::choose(&driver, launcher, products(&ops), bounds.rows_max)?;
        let rows_of = |op: &Op| match op {
            Op::Qkv(op) => Some(tile_rows(op.heads / op.kv_heads, op.head_dim)),
            _ => None,
        };
        let tile_rows = ops.iter().filter_map(rows_of).min().unwrap_or(1);
        let layout = StepLayout::new(&bounds, bounds.rows_max.div_ceil(tile_rows) + bounds.slots_max);
        let logit_rows = bounds.logit_rows_max.min(bounds.rows_max);
        let divided = bounds.slots_max.min(bounds.rows_max).max(logit_rows);
        let states =
            ops.iter().filter_map(|op| if let Op::Qkv(op) = op { Some(op.heads * (op.head_dim + 2)) } else { None });
        let partials = divided * bounds.positions_max.div_ceil(ATTENTION_SPLIT) * states.max().unwrap_or(0);
        let transfer = || {
            let records = driver.pinned(logit_rows * SampleRecord::BYTES)?;
            Ok::<_, DeviceError>(Transfer { staging: Staging::new(&driver)?, records, logits: None })
        };
        Ok(Self {
            stream: driver.stream(Purpose::Steps)?,
            activations: Activations::alloc(&driver, &sizes, &bounds, partials)?,
            step: Buffer::new(&driver, layout.bytes(), "rows of a step")?,
            samplers: Samplers::alloc(&driver, sizes.vocab, &bounds)?,
            transfers: (0..STEPS_MAX).map(|_| transfer()).collect::<Result<_, _>>()?,
            fork_staging: Staging::new(&driver)?,
            slots: SlotTable::with_adapters(bounds.slots_max, bounds.adapters.slots_max),
            logprobs: vec![false; bounds.slots_max],
            pool: None,
            launched: Launched::default(),
            batch: Batch::default(),
            graphs: HashMap::new(),
            running: VecDeque::new(),
            steps: 0,
            is_broken: false,
            tile_rows,
            layout,
            launcher,
            pins,
            bounds,
            sizes,
            ops,
            program,
            driver,
            _weights: weights,
        })
    }

    /// Uploads what the step changes in slots and tables.
    fn change_slots(&mut self, deltas: &[Delta], transfer: usize) -> Result<(), DeviceError> {
        let (driver, stream) = (self.driver.clone(), self.stream);
        let staging = &mut self.transfers[transfer].staging;
        for delta in deltas {
            if let Delta::Join(join) = delta {
                self.logprobs[join.slot] = join.sampling.logprobs.is_some();
                self.samplers.join(join, &driver, stream, staging)?;
            }
        }
        let pool = self.pool.as_mut().ok_or(DeviceError::Unbound)?;
        let mut pairs = Vec::new();
        for (index, value) in pool.tables.changes(deltas) {
            pairs.extend([index as i32, value]);
        }
        if pairs.is_empty() {
            return Ok(());
        }
        staging.upload(stream, &bytes_of(&pairs), pool.changes.at())?;
        let (array, pairs, count) = (Out::at(pool.table.at()), In::at(pool.changes.at()), (pairs.len() / 2) as i32);
        let scatter = Launcher::scatter(Scatter { array, pairs, count, reserved: 0 });
        driver.enqueue(stream, &Command::Launch(scatter))
    }

    /// Uploads the rows, as yet without masks. Returns the step's shape, and whether it fills a bucket, if it may be a graph.
    fn upload_rows(&mut self, step: &StepInput, transfer: usize, graph: bool) -> Result<(Shape, bool), DeviceError> {
        let (batch, layout) = (&mut self.batch, &self.layout);
        batch.fill(step, &self.launched.selected);
        let padded = bucket(step.ids.len(), self.bounds.rows_max.min(self.bounds.logit_rows_max)).filter(|_| graph);
        if let Some(rows) = padded {
            batch.pad(rows);
        }
        let tiles: Vec<i32> = batch.tiles(self.tile_rows).flatten().collect();
        let (mut depths, mut drafts) = (Vec::new(), Vec::new());
        samplers::sampling_rows(step, &mut depths, &mut drafts);
        let mut array = vec![0u8; layout.bytes()];
        for (part, values) in [
            (&layout.ids, &batch.ids),
            (&layout.slots, &batch.slots),
            (&layout.positions, &batch.positions),
            (&layout.chosen, &batch.chosen),
            (&layout.chosen_slots, &batch.chosen_slots),
            (&layout.chosen_positions, &batch.chosen_positions),
            (&layout.depths, &depths),
            (&layout.drafts, &drafts),
            (&layout.masks, &vec![NO_MASK; depths.len()]),
            (&layout.tiles, &tiles),
        ] {
            assert!(values.len() <= part.len(), "{} values for {part:?}", values.len());
            let to = array[part.start * WORD..].chunks_exact_mut(WORD);
            to.zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_ne_bytes()));
        }
        let shape = Shape {
            rows: batch.ids.len(),
            decoded: batch.decoded,
            splits: batch::splits(&batch.positions[..batch.decoded]),
            chosen_splits: batch::splits(&batch.chosen_positions),
            tiles: tiles.len() / 4,
            chosen: batch.chosen.len(),
        };
        self.transfers[transfer].staging.upload(self.stream, &array, self.step.at())?;
        Ok((shape, padded.is_some()))
    }

    fn plan<'a>(&'a self, pool: &'a BoundPool) -> Plan<'a> {
        Plan {
            ops: &self.ops,
            launcher: self.launcher,
            pins: &self.pins,
            activations: &self.activations,
            layout: &self.layout,
            step: self.step.at(),
            last: self.samplers.last(),
            kv: &pool.kv,
        }
    }

    /// Enqueues the kernels up to the logits, one by one.
    fn enqueue(&self, shape: Shape, step: &StepInput, observer: LayerObserver<'_>) -> Result<(), DeviceError> {
        let pool = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
        let (driver, mut outcome) = (&self.driver, Ok(()));
        self.plan(pool).each(shape, |next| {
            if outcome.is_err() {
                return;
            }
            match next {
                Next::Command(command) => outcome = driver.enqueue(self.stream, &command),
                Next::Stored(layer) if step.observed.contains(&layer) => match driver.record(self.stream) {
                    Ok(event) => {
                        let fence: Fence = Arc::new(StoredFence { driver: driver.clone(), event });
                        observer(layer, &fence);
                    }
                    Err(error) => outcome = Err(error),
                },
                Next::Stored(_) => {}
            }
        });
        outcome
    }

    /// Makes the graphs of all decode steps, sampling included: one for each bucket of rows and number of splits.
    fn make_graphs(&mut self) -> Result<(), DeviceError> {
        self.graphs.clear();
        let rows_max = self.bounds.rows_max.min(self.bounds.logit_rows_max);
        let most = bucket(self.bounds.slots_max, rows_max).unwrap_or(rows_max);
        let buckets: BTreeSet<usize> = (1..=most).filter_map(|rows| bucket(rows, rows_max)).collect();
        let splits: BTreeSet<usize> = (1..=self.splits_max()).map(|splits| self.splits_of_graph(splits)).collect();
        for rows in buckets {
            for splits in splits.iter().copied() {
                let shape = Shape { rows, decoded: rows, splits, chosen_splits: splits, tiles: 0, chosen: rows };
                let pool = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
                let mut commands = Vec::new();
                self.plan(pool).each(shape, |next| {
                    if let Next::Command(command) = next {
                        commands.push(command);
                    }
                });
                commands.push(self.samplers.sample(&self.activations, &self.layout, self.step.at(), rows, 0));
                self.graphs.insert(shape, self.driver.graph(&commands)?);
            }
        }
        Ok(())
    }

    /// Most splits of a row.
    fn splits_max(&self) -> usize {
        self.bounds.positions_max.div_ceil(ATTENTION_SPLIT)
    }

    /// Splits of the graph for steps whose rows have up to so many.
    fn splits_of_graph(&self, splits: usize) -> usize {
        splits.next_power_of_two().min(self.splits_max())
    }

    /// Enqueues the sampling of a step whose masks are there, unless its graph has done it, and the way back of what it yields.
    fn end(&mut self, running: &mut Running, sampled: bool) -> Result<(), DeviceError> {
        let (driver, stream) = (self.driver.clone(), self.stream);
        if !running.masks.is_empty() {
            let staging = &mut self.transfers[running.transfer].staging;
            let masks = self.samplers.masks(&running.masks, stream, staging)?;
            staging.upload(stream, &bytes_of(&masks), StepLayout::at(self.step.at(), &self.layout.masks))?;
        }
        for depth in (0..running.depths).filter(|_| !sampled) {
            let rows = running.sampling;
            let sample = self.samplers.sample(&self.activations, &self.layout, self.step.at(), rows, depth);
            driver.enqueue(stream, &sample)?;
        }
        let transfer = &mut self.transfers[running.transfer];
        if running.sampling > 0 {
            let (from, to) = (self.samplers.records(), transfer.records.clone());
            let bytes = running.sampling * SampleRecord::BYTES;
            driver.enqueue(stream, &Command::Download { from, to, offset: 0, bytes })?;
        }
        if !running.logits.is_empty() {
            let row = self.sizes.vocab * WORD;
            let to = driver.pinned(running.logits.len() * row)?;
            for (i, at) in running.logits.iter().enumerate() {
                let (from, to) = (self.activations.logits.at().plus(at * row), to.clone());
                driver.enqueue(stream, &Command::Download { from, to, offset: i * row, bytes: row })?;
            }
            transfer.logits = Some(to);
        }
        running.end = Some(driver.record(stream)?);
        Ok(())
    }

    /// Enqueues a step that fits its slots.
    fn submit(&mut self, step: &StepInput, observer: LayerObserver<'_>) -> Result<(), DeviceError> {
        self.end_waiting()?;
        let transfer = (self.steps % STEPS_MAX as u64) as usize;
        self.steps += 1;
        self.transfers[transfer].staging.reset();
        self.change_slots(&step.deltas, transfer)?;
        let has_masks = step.segments.iter().any(|segment| !segment.masks.is_empty());
        let graph = batch::is_decode(step) && !has_masks;
        let (shape, in_bucket) = self.upload_rows(step, transfer, graph)?;
        let mut first = 0;
        let mut segments = Vec::new();
        for rows in &step.segments {
            let ids = &step.ids[first..first + rows.rows];
            first += rows.rows;
            if rows.samples > 0 {
                segments.push(Segment::new(rows, ids, self.logprobs[rows.slot]));
            }
        }
        let selected = &self.launched.selected;
        let place = |row: &usize| selected.iter().position(|other| other == row);
        let mut running = Running {
            transfer,
            end: None,
            segments,
            sampling: step.sampling_rows().count(),
            masks: if has_masks { samplers::late_masks(step) } else { Vec::new() },
            depths: step.segments.iter().map(|segment| segment.samples).max().unwrap_or(0),
            logits: step.logit_rows.iter().filter_map(place).collect(),
        };
        // A graph computes whole buckets, splits included.
        if in_bucket {
            let [splits, chosen_splits] =
                [shape.splits, shape.chosen_splits].map(|splits| self.splits_of_graph(splits));
            let shape = Shape { splits, chosen_splits, ..shape };
            let graph = *self.graphs.get(&shape).ok_or_else(|| DeviceError::Step(format!("no graph of {shape:?}")))?;
            self.driver.enqueue(self.stream, &Command::Graph(graph))?;
        } else {
            self.enqueue(shape, step, observer)?;
        }
        if !has_masks {
            self.end(&mut running, in_bucket)?;
        }
        self.running.push_back(running);
        Ok(())
    }

    /// Ends the sampling of launched steps that wait for masks: what comes behind needs their tokens.
    fn end_waiting(&mut self) -> Result<(), DeviceError> {
        for at in 0..self.running.len() {
            if self.running[at].end.is_none() {
                let mut running = self.running.remove(at).unwrap_or_else(|| unreachable!("at is below the length"));
                let ended = self.end(&mut running, false);
                self.running.insert(at, running);
                ended?;
            }
        }
        Ok(())
    }
}

impl Executable for CudaExecutable {
    fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), DeviceError> {
        let layout = PoolLayout::try_new(map, &self.program, self.bounds, self.sizes.vocab)?;
        self.pool =
            Some(BoundPool::try_new(&self.driver, self.launcher.half, memory, map, layout, self.program.layers())?);
        self.make_graphs()
    }

    fn load_adapter(&mut self, slot: AdapterSlot, _: Arc<PackedAdapter>) -> Result<(), DeviceError> {
        Err(DeviceError::AdapterSlots { slot, slots_max: 0 })
    }

    fn unload_adapter(&mut self, slot: AdapterSlot) -> Result<(), DeviceError> {
        Err(DeviceError::AdapterSlots { slot, slots_max: 0 })
    }

    fn leave(&mut self, slots: &[usize]) -> Result<(), DeviceError> {
        self.slots.leave(slots)
    }

    fn launch(&mut self, step: &StepInput, observer: LayerObserver<'_>) -> Result<(), DeviceError> {
        if self.is_broken {
            return Err(DeviceError::Failed("an earlier step was enqueued in part".into()));
        }
        let pool = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
        let joins =
            step.deltas.iter().filter_map(|delta| if let Delta::Join(join) = delta { Some(join) } else { None });
        joins.into_iter().try_for_each(|join| Samplers::check(join))?;
        self.slots.launch(step, pool.layout.limits(), &mut self.launched)?;
        let submitted = self.submit(step, observer);
        self.is_broken |= submitted.is_err();
        submitted
    }

    fn finish(&mut self) -> Result<StepOutput, DeviceError> {
        if self.running.is_empty() {
            return Err(DeviceError::Step("finish without a launched step".into()));
        }
        self.end_waiting()?;
        let Some(Running { transfer, end: Some(end), segments, sampling, logits, .. }) = self.running.pop_front()
        else {
            return Err(DeviceError::Step("finish without a launched step".into()));
        };
        end_of(&*self.driver, end)?;
        let vocab = self.sizes.vocab;
        let mut records = vec![0; sampling * SampleRecord::BYTES];
        let transfer = &mut self.transfers[transfer];
        transfer.records.load(0, &mut records);
        let mut bytes = vec![0; logits.len() * vocab * WORD];
        if let Some(from) = transfer.logits.take() {
            from.load(0, &mut bytes);
        }
        let numbers = bytes.as_chunks::<WORD>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        let sampled = samplers::outputs(segments.iter(), &records, vocab);
        let output = StepOutput { sampled, logits: Logits::new(vocab, numbers) };
        self.slots.finish(&output);
        Ok(output)
    }

    fn copy_kv(&mut self, group: usize, from: BlockId, to: BlockId, tokens: usize) -> Result<(), DeviceError> {
        let BoundPool { memory, layout, copies, .. } = self.pool.as_ref().ok_or(DeviceError::Unbound)?;
        let kv = check::copy_kv(layout, group, from, to, tokens)?;
        let mut described = Vec::new();
        for layer in 0..kv.layers() {
            for plane in kv.planes() {
                let bytes = tokens * kv.token_stride(plane);
                let rows = |block| StridedRows::from(&Rows::run(kv.offset(layer, plane, block, 0), bytes));
                described.push(RowsCopy { from: rows(from), to: rows(to) });
            }
        }
        // The last one's upload has ended: it was waited for.
        self.fork_staging.reset();
        self.fork_staging.upload(self.stream, &bytes_of(&described), copies.at())?;
        // Not through the pool's queue: peers fill that.
        let (pool, copies, count) = (memory.at(), In::at(copies.at()), described.len() as i32);
        let copy = CopyRows { from: In::at(pool), to: Out::at(pool), copies, count, reserved: 0 };
        self.driver.enqueue(self.stream, &Command::Launch(Launcher::copy_rows(copy)))?;
        // Its blocks may be given to others from here on.
        end_of(&*self.driver, self.driver.record(self.stream)?)
    }
}
