//! A backend that behaves like the worst device: it works on its own thread, with delays, and until an operation is really done its outputs
//! are NaN. Code that reads KV before its fence, or relies on any other order, gets visible garbage.
//!
//! Stored KV rows are already poisoned at enqueue (and again when the stream reaches them), unless an attention that was enqueued earlier
//! still reads them, which is legal on an in-order stream. Activations are visible only through [`Ops::download`], which is in order; those
//! that an operation replaces are poisoned when the stream reaches it.

mod poison;
mod stream;

use crate::kv::KvBinding;
use crate::ops::{
    BackendInfo, IdsHandle, KvHandle, Ops, OpsError, Plan, PlanHandle, PlanSegment, RopeHandle, RopeTable, Store,
    Tensor, Weight,
};
use crate::shape;
use baton_types::{BlockId, Dtype, Fence, KvPoolMap, PoolMemory};
use parking_lot::Mutex;
use poison::{PendingRead, poison, still_read};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use stream::{Job, LateFence, Stream, Work};

/// Delays and bounds of a [`Lagging`] backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LagConfig {
    /// Pause before each operation.
    pub delay: Duration,
    /// Most pending operations; enqueueing more blocks.
    pub queue_max: usize,
    /// Longest wait for room in the queue, or for earlier operations in `download`.
    pub deadline: Duration,
}

impl Default for LagConfig {
    fn default() -> Self {
        Self { delay: Duration::from_micros(50), queue_max: 1024, deadline: Duration::from_secs(60) }
    }
}

/// Objects that operations refer to, as of the last enqueued one.
#[derive(Default)]
struct Enqueued {
    pools: HashMap<KvHandle, KvBinding>,
    ropes: HashMap<RopeHandle, RopeTable>,
    ids: (u32, Vec<u32>),
    plan: (u32, Arc<Plan>),
    reads: Vec<PendingRead>,
}

fn unknown(op: &'static str, what: &str) -> OpsError {
    OpsError::Shape { op, message: format!("{what} is not of this backend, or of an earlier step") }
}

impl Enqueued {
    fn pool(&self, op: &'static str, kv: KvHandle) -> Result<&KvBinding, OpsError> {
        self.pools.get(&kv).ok_or_else(|| unknown(op, "the KV pool"))
    }

    /// Poisons what `batch` will store in a layer, unless a job after `finished` still reads it.
    fn poison(&self, kv: KvHandle, pool: &KvBinding, layer: usize, batch: &Plan, finished: u64) {
        let pending = |r: &&PendingRead| r.kv == kv && r.layer == layer && r.job > finished;
        let reads: Vec<&PendingRead> = self.reads.iter().filter(pending).collect();
        if !still_read(pool, batch, &reads) {
            poison(pool, layer, batch);
        }
    }

    fn step(&self, op: &'static str, kv: KvHandle, plan: PlanHandle) -> Result<(&KvBinding, &Arc<Plan>), OpsError> {
        let pool = self.pool(op, kv)?;
        if plan.0 != self.plan.0 {
            return Err(unknown(op, "the plan"));
        }
        pool.check(op, &self.plan.1)?;
        Ok((pool, &self.plan.1))
    }
}

/// A backend that delays each operation and poisons outputs that are not ready, see the [module](self).
pub struct Lagging {
    inner: Arc<dyn Ops>,
    config: LagConfig,
    stream: Arc<Stream>,
    enqueued: Mutex<Enqueued>,
    thread: Option<JoinHandle<()>>,
}

impl Lagging {
    /// Runs `inner` on a separate thread. `inner` must not be used directly from here on.
    #[allow(clippy::new_ret_no_self)] // Backends are shared by nature.
    pub fn new(inner: Arc<dyn Ops>, config: LagConfig) -> Result<Arc<Self>, OpsError> {
        let stream = Arc::new(Stream::default());
        let (served, behind) = (stream.clone(), inner.clone());
        let thread = std::thread::Builder::new()
            .name("lagging".into())
            .spawn(move || served.serve(behind.as_ref(), config.delay))
            .map_err(|e| OpsError::Device(format!("cannot start a thread: {e}")))?;
        Ok(Arc::new(Self { inner, config, stream, enqueued: Mutex::default(), thread: Some(thread) }))
    }

    /// Stops the stream between two operations, for tests that inspect the state before a fence.
    pub fn hold(&self) {
        self.stream.hold(true);
    }

    /// Resumes the stream after [`Lagging::hold`].
    pub fn release(&self) {
        self.stream.hold(false);
    }

    fn push(&self, poison: Option<Work>, work: Work) -> Result<u64, OpsError> {
        self.stream.enqueue(Job { poison, work }, self.config.queue_max, self.config.deadline)
    }
}

/// Poison for a tensor whose first `rows` rows are about to be replaced.
fn poison_rows(tensor: Tensor, rows: usize) -> Option<Work> {
    Some(Box::new(move |ops, _| ops.upload(tensor, &vec![f32::NAN; rows * tensor.cols])))
}

fn gone(op: &'static str) -> OpsError {
    OpsError::Shape { op, message: "nothing was uploaded".into() }
}

impl Ops for Lagging {
    fn info(&self) -> BackendInfo {
        let info = self.inner.info();
        BackendInfo { name: format!("lagging {}", info.name), ..info }
    }

    fn prepare(&self, name: &str, n: usize, k: usize, dtype: Dtype, data: &[f32]) -> Result<Weight, OpsError> {
        self.inner.prepare(name, n, k, dtype, data)
    }

    fn alloc(&self, rows_max: usize, cols: usize) -> Result<Tensor, OpsError> {
        self.inner.alloc(rows_max, cols)
    }

    fn bind_kv(&self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<KvHandle, OpsError> {
        let binding = KvBinding::try_new(memory.clone(), map)?;
        let handle = self.inner.bind_kv(memory, map)?;
        self.enqueued.lock().pools.insert(handle, binding);
        Ok(handle)
    }

    fn upload_rope(&self, table: &RopeTable) -> Result<RopeHandle, OpsError> {
        let handle = self.inner.upload_rope(table)?;
        self.enqueued.lock().ropes.insert(handle, table.clone());
        Ok(handle)
    }

    fn upload_ids(&self, ids: &[u32]) -> Result<IdsHandle, OpsError> {
        let mut enqueued = self.enqueued.lock();
        enqueued.ids = (enqueued.ids.0.wrapping_add(1), ids.to_vec());
        let ids = ids.to_vec();
        self.push(None, Box::new(move |ops, current| ops.upload_ids(&ids).map(|ids| current.ids = Some(ids))))?;
        Ok(IdsHandle(enqueued.ids.0))
    }

    fn plan(&self, plan: &Plan) -> Result<PlanHandle, OpsError> {
        shape::plan(plan)?;
        let mut enqueued = self.enqueued.lock();
        let plan = Arc::new(plan.clone());
        enqueued.plan = (enqueued.plan.0.wrapping_add(1), plan.clone());
        self.push(None, Box::new(move |ops, current| ops.plan(&plan).map(|plan| current.plan = Some(plan))))?;
        Ok(PlanHandle(enqueued.plan.0))
    }

    fn upload(&self, tensor: Tensor, data: &[f32]) -> Result<(), OpsError> {
        shape::upload(tensor, data.len())?;
        let data = data.to_vec();
        self.push(None, Box::new(move |ops, _| ops.upload(tensor, &data))).map(|_| ())
    }

    fn embed(&self, table: Weight, ids: IdsHandle, out: Tensor, rows: usize) -> Result<(), OpsError> {
        let enqueued = self.enqueued.lock();
        if ids.0 != enqueued.ids.0 {
            return Err(OpsError::Shape { op: "embed", message: "the id list is of an earlier step".into() });
        }
        shape::embed(table, &enqueued.ids.1, out, rows)?;
        let work: Work =
            Box::new(move |ops, current| ops.embed(table, current.ids.ok_or_else(|| gone("embed"))?, out, rows));
        self.push(poison_rows(out, rows), work).map(|_| ())
    }

    fn rms_norm(&self, x: Tensor, gain: Weight, eps: f32, out: Tensor, rows: usize) -> Result<(), OpsError> {
        shape::rms_norm(x, gain, out, rows)?;
        self.push(poison_rows(out, rows), Box::new(move |ops, _| ops.rms_norm(x, gain, eps, out, rows))).map(|_| ())
    }

    fn linear(
        &self,
        x: Tensor,
        w: Weight,
        partitions: usize,
        store: Store,
        out: Tensor,
        rows: usize,
    ) -> Result<(), OpsError> {
        shape::linear(x, w, partitions, out, rows)?;
        let poison = if store == Store::Set { poison_rows(out, rows) } else { None };
        self.push(poison, Box::new(move |ops, _| ops.linear(x, w, partitions, store, out, rows))).map(|_| ())
    }

    fn rope_store(
        &self,
        kv: KvHandle,
        layer: usize,
        plan: PlanHandle,
        rope: RopeHandle,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Result<(), OpsError> {
        let op = "rope_store";
        let enqueued = self.enqueued.lock();
        let (pool, batch) = enqueued.step(op, kv, plan)?;
        let table = enqueued.ropes.get(&rope);
        let table =
            table.ok_or_else(|| OpsError::Shape { op, message: "the rope table is not of this backend".into() })?;
        shape::rope_store(pool, layer, batch, table, q, k, v)?;
        enqueued.poison(kv, pool, layer, batch, self.stream.finished());
        let (late_pool, late_batch) = (pool.clone(), batch.clone());
        let poison: Work = Box::new(move |_, _| {
            poison(&late_pool, layer, &late_batch);
            Ok(())
        });
        let work: Work = Box::new(move |ops, current| {
            ops.rope_store(kv, layer, current.plan.ok_or_else(|| gone(op))?, rope, q, k, v)
        });
        self.push(Some(poison), work).map(|_| ())
    }

    fn attend(
        &self,
        kv: KvHandle,
        layer: usize,
        plan: PlanHandle,
        q: Tensor,
        scale: f32,
        out: Tensor,
    ) -> Result<(), OpsError> {
        let op = "attend";
        let mut enqueued = self.enqueued.lock();
        let (pool, batch) = enqueued.step(op, kv, plan)?;
        shape::attend(pool, layer, batch, q, out)?;
        let batch = batch.clone();
        let work: Work =
            Box::new(move |ops, current| ops.attend(kv, layer, current.plan.ok_or_else(|| gone(op))?, q, scale, out));
        let job = self.push(poison_rows(out, batch.rows()), work)?;
        let finished = self.stream.finished();
        enqueued.reads.retain(|read| read.job > finished);
        enqueued.reads.push(PendingRead { job, kv, layer, plan: batch });
        Ok(())
    }

    fn copy_kv(&self, kv: KvHandle, from: BlockId, to: BlockId, tokens: usize) -> Result<(), OpsError> {
        let enqueued = self.enqueued.lock();
        let pool = enqueued.pool("copy_kv", kv)?;
        shape::copy_kv(pool, from, to, tokens)?;
        let stored = Plan { segments: vec![PlanSegment { position: 0, rows: tokens, blocks: vec![to] }] };
        let finished = self.stream.finished();
        (0..pool.layers()).for_each(|layer| enqueued.poison(kv, pool, layer, &stored, finished));
        let late_pool = pool.clone();
        let poison: Work = Box::new(move |_, _| {
            (0..late_pool.layers()).for_each(|layer| poison(&late_pool, layer, &stored));
            Ok(())
        });
        self.push(Some(poison), Box::new(move |ops, _| ops.copy_kv(kv, from, to, tokens))).map(|_| ())
    }

    fn silu_mul(&self, gate: Tensor, up: Tensor, rows: usize) -> Result<(), OpsError> {
        shape::silu_mul(gate, up, rows)?;
        self.push(None, Box::new(move |ops, _| ops.silu_mul(gate, up, rows))).map(|_| ())
    }

    fn gather_rows(&self, x: Tensor, rows: &[usize], out: Tensor) -> Result<(), OpsError> {
        shape::gather_rows(x, rows, out)?;
        let rows = rows.to_vec();
        self.push(poison_rows(out, rows.len()), Box::new(move |ops, _| ops.gather_rows(x, &rows, out))).map(|_| ())
    }

    fn fence(&self) -> Fence {
        Arc::new(LateFence { stream: self.stream.clone(), after: self.stream.enqueued() })
    }

    fn download(&self, tensor: Tensor, rows: usize, out: &mut [f32]) -> Result<(), OpsError> {
        shape::download(tensor, rows, out.len())?;
        self.stream.drain(self.config.deadline)?;
        self.inner.download(tensor, rows, out)
    }
}

impl Drop for Lagging {
    fn drop(&mut self) {
        self.stream.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // Its panics were turned into failed fences.
        }
    }
}
