//! A program whose steps run late.

use super::LagConfig;
use super::poison::{PendingRead, poison, still_read};
use super::stream::{Job, LateFence, Stream, Work};
use crate::adapter::PackedAdapter;
use crate::device::{Bounds, DeviceError, Executable, LayerObserver};
use crate::kv::PoolBinding;
use crate::program::{Program, check};
use crate::step::{AdapterSlot, Delta, Launched, SlotTable, StepInput, StepOutput, StepSegment};
use baton_memory::{PoolMemory, RemotePool};
use baton_types::{BlockId, BlockTable, Fence, KvPoolMap, seeded};
use std::sync::Arc;
use std::thread::JoinHandle;

pub(super) struct LateExecutable {
    program: Program,
    bounds: Bounds,
    vocab: usize,
    config: LagConfig,
    stream: Arc<Stream>,
    pool: Option<PoolBinding>,
    slots: SlotTable,
    /// Steps that may still read.
    reads: Vec<PendingRead>,
    thread: Option<JoinHandle<()>>,
}

impl LateExecutable {
    pub(super) fn start(
        mut inner: Box<dyn Executable>,
        program: Program,
        bounds: Bounds,
        config: LagConfig,
    ) -> Result<Self, DeviceError> {
        let vocab = program.check(&bounds)?.vocab;
        let stream = Arc::new(Stream::default());
        let served = stream.clone();
        let thread = std::thread::Builder::new()
            .name("lagging".into())
            .spawn(move || served.serve(inner.as_mut(), &config))
            .map_err(|e| DeviceError::Failed(format!("cannot start a thread: {e}")))?;
        Ok(Self {
            program,
            bounds,
            vocab,
            config,
            stream,
            pool: None,
            slots: SlotTable::with_adapters(bounds.slots_max, bounds.adapters.slots_max),
            reads: Vec::new(),
            thread: Some(thread),
        })
    }

    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    fn pool(&self) -> Result<&PoolBinding, DeviceError> {
        self.pool.as_ref().ok_or(DeviceError::Unbound)
    }

    /// The block tables that the step before used for its segments, as far as they reach.
    fn stale_tables(&self, step: &StepInput, segments: &[Vec<StepSegment>]) -> Vec<Delta> {
        let before = self.reads.last().map_or(&[][..], |read| &read.segments);
        let mut stale = Vec::new();
        for (group, (now, before)) in segments.iter().zip(before).enumerate() {
            for ((rows, now), before) in step.segments.iter().zip(now).zip(before) {
                let first = now.table.first;
                let block = |index| before.table.get(index).or(now.table.get(index));
                let blocks = now.table.indices().filter_map(block).collect();
                stale.push(Delta::Blocks { slot: rows.slot, group, first, keep: first, blocks });
            }
        }
        stale
    }

    /// Enqueues work that stores no KV.
    fn enqueue(&self, work: Work) -> Result<(), DeviceError> {
        self.stream.enqueue(Job { poison: Box::new(|| ()), work }, &self.config).map(|_| ())
    }

    /// Poisons what will be stored to these rows of each group, unless an earlier step still reads them, and enqueues the work.
    fn push(&mut self, stores: Vec<Vec<StepSegment>>, work: Work) -> Result<u64, DeviceError> {
        let pool = self.pool()?.clone();
        let finished = self.stream.finished();
        self.reads.retain(|read| read.job > finished);
        if !still_read(&pool, &stores, &self.reads) {
            poison(&pool, &stores);
        }
        let late: Box<dyn FnOnce() + Send> = Box::new(move || poison(&pool, &stores));
        self.stream.enqueue(Job { poison: late, work }, &self.config)
    }
}

impl Executable for LateExecutable {
    fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), DeviceError> {
        let Some(remote) = RemotePool::of(&memory) else { return Err(DeviceError::PoolOutOfReach(memory.kind())) };
        let memory: Arc<dyn PoolMemory> = remote.device_side().clone();
        let pool = PoolBinding::try_new(memory.clone(), map, &self.program, self.bounds, self.vocab)?;
        self.enqueue(Work::Bind(memory, Box::new(map.clone())))?;
        self.stream.drain(&self.config)?;
        self.pool = Some(pool);
        Ok(())
    }

    fn load_adapter(&mut self, slot: AdapterSlot, adapter: Arc<PackedAdapter>) -> Result<(), DeviceError> {
        adapter.check(slot, &self.program, self.bounds.adapters)?;
        self.slots.set_adapter(slot, true)?;
        self.enqueue(Work::LoadAdapter(slot, adapter))
    }

    fn unload_adapter(&mut self, slot: AdapterSlot) -> Result<(), DeviceError> {
        self.slots.set_adapter(slot, false)?;
        self.enqueue(Work::UnloadAdapter(slot))
    }

    fn leave(&mut self, slots: &[usize]) -> Result<(), DeviceError> {
        self.slots.leave(slots)?;
        self.enqueue(Work::Leave(slots.to_vec()))
    }

    fn launch(&mut self, step: &StepInput, observer: LayerObserver<'_>) -> Result<(), DeviceError> {
        let limits = self.pool.as_ref().ok_or(DeviceError::Unbound)?.limits();
        // Slots change only with a step that is enqueued.
        drop(self.stream.wait_for_room(&self.config)?);
        let mut launched = Launched::default();
        self.slots.launch(step, limits, &mut launched)?;
        let segments: Vec<_> = launched.segments.iter().map(|group| group.as_slice().to_vec()).collect();
        let mut sent = step.clone();
        // The stream waits at every layer, whether or not somebody observes it.
        sent.observed = 0..limits.layers;
        if seeded!(StaleTable) {
            sent.deltas.extend(self.stale_tables(step, &segments));
        }
        let job = self.push(segments.clone(), Work::Step(sent))?;
        self.reads.push(PendingRead { job, segments });
        for op in &self.program.ops {
            if let Some(layer) = op.stores()
                && step.observed.contains(&layer)
            {
                let fence: Fence = Arc::new(LateFence { stream: self.stream.clone(), job, layers: layer + 1 });
                observer(layer, &fence);
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, DeviceError> {
        let output = self.stream.output(&self.config)?;
        self.slots.finish(&output);
        Ok(output)
    }

    fn copy_kv(&mut self, group: usize, from: BlockId, to: BlockId, tokens: usize) -> Result<(), DeviceError> {
        check::copy_kv(self.pool()?, group, from, to, tokens)?;
        let store = StepSegment { position: 0, rows: tokens, table: BlockTable::from_start(vec![to]) };
        let stores = (0..=group).map(|at| if at == group { vec![store.clone()] } else { Vec::new() }).collect();
        self.push(stores, Work::Copy { group, from, to, tokens })?;
        self.stream.drain(&self.config)
    }
}

impl Drop for LateExecutable {
    fn drop(&mut self) {
        self.stream.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // Its panics were turned into failed fences.
        }
    }
}
