//! `Ops` over host kernels: resolve handles, check, compute.

use super::tables::Prepared;
use super::{HostBackend, HostKernels, KvStep};
use crate::kv::KvBinding;
use crate::numerics::ISA;
use crate::ops::{
    BackendInfo, IdsHandle, KvHandle, Ops, OpsError, Plan, PlanHandle, RopeHandle, RopeTable, Store, Tensor, Weight,
};
use crate::shape;
use baton_types::fence::AlreadyDone;
use baton_types::{BlockId, Dtype, Fence, KvPoolMap, MemoryKind, PoolMemory};
use std::sync::Arc;

/// Zeroed memory, or a typed error if the allocation fails.
fn zeros(len: usize, what: &str) -> Result<Vec<f32>, OpsError> {
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| OpsError::OutOfMemory {
        kind: MemoryKind::Host,
        bytes: len.saturating_mul(4),
        what: what.into(),
    })?;
    data.resize(len, 0.0);
    Ok(data)
}

impl<K: HostKernels> Ops for HostBackend<K> {
    fn info(&self) -> BackendInfo {
        let (name, kernel_revision) = (self.kernels.name(), self.kernels.revision());
        BackendInfo { name, isa: ISA, kernel_revision, memory: MemoryKind::Host }
    }

    fn prepare(&self, name: &str, n: usize, k: usize, dtype: Dtype, data: &[f32]) -> Result<Weight, OpsError> {
        shape::prepare(name, n, k, data.len())?;
        let matrix = self.kernels.pack(n, k, dtype, data);
        let vector = (n == 1).then(|| {
            let mut row = vec![0.0; k];
            self.kernels.row(&matrix, 0, &mut row);
            row
        });
        let mut tables = self.tables.lock();
        tables.weights.push(Prepared { matrix, vector });
        Ok(Weight { id: tables.weights.len() as u32 - 1, n, k, dtype })
    }

    fn alloc(&self, rows_max: usize, cols: usize) -> Result<Tensor, OpsError> {
        shape::alloc(rows_max, cols)?;
        let data = zeros(rows_max * cols, "an activation")?;
        let mut tables = self.tables.lock();
        tables.tensors.push(data);
        Ok(Tensor { id: tables.tensors.len() as u32 - 1, rows_max, cols })
    }

    fn bind_kv(&self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<KvHandle, OpsError> {
        if memory.kind() != MemoryKind::Host {
            let message = format!("a host backend cannot reach a pool in {}", memory.kind());
            return Err(OpsError::Shape { op: "bind_kv", message });
        }
        let binding = KvBinding::try_new(memory, map)?;
        let mut tables = self.tables.lock();
        tables.pools.push(binding);
        Ok(KvHandle(tables.pools.len() as u32 - 1))
    }

    fn upload_rope(&self, table: &RopeTable) -> Result<RopeHandle, OpsError> {
        shape::rope_table(table)?;
        let mut tables = self.tables.lock();
        tables.ropes.push(table.clone());
        Ok(RopeHandle(tables.ropes.len() as u32 - 1))
    }

    fn upload_ids(&self, ids: &[u32]) -> Result<IdsHandle, OpsError> {
        let mut tables = self.tables.lock();
        tables.ids.generation = tables.ids.generation.wrapping_add(1);
        tables.ids.value.clear();
        tables.ids.value.extend_from_slice(ids);
        Ok(IdsHandle(tables.ids.generation))
    }

    fn plan(&self, plan: &Plan) -> Result<PlanHandle, OpsError> {
        shape::plan(plan)?;
        let mut tables = self.tables.lock();
        tables.plan.generation = tables.plan.generation.wrapping_add(1);
        tables.plan.value = plan.clone();
        tables.plan_checked = None;
        Ok(PlanHandle(tables.plan.generation))
    }

    fn upload(&self, tensor: Tensor, data: &[f32]) -> Result<(), OpsError> {
        shape::upload(tensor, data.len())?;
        let mut tables = self.tables.lock();
        tables.rows("upload", tensor, 0)?;
        tables.tensors[tensor.id as usize][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn embed(&self, table: Weight, ids: IdsHandle, out: Tensor, rows: usize) -> Result<(), OpsError> {
        let op = "embed";
        let mut tables = self.tables.lock();
        shape::embed(table, tables.ids(op, ids)?, out, rows)?;
        tables.weight(op, table)?;
        let mut data = tables.take(op, out)?;
        let matrix = &tables.weight(op, table)?.matrix;
        for (row, &id) in data.chunks_exact_mut(table.k).zip(&tables.ids.value[..rows]) {
            self.kernels.row(matrix, id as usize, row);
        }
        tables.put(out, data);
        Ok(())
    }

    fn rms_norm(&self, x: Tensor, gain: Weight, eps: f32, out: Tensor, rows: usize) -> Result<(), OpsError> {
        let op = "rms_norm";
        shape::rms_norm(x, gain, out, rows)?;
        let mut tables = self.tables.lock();
        tables.rows(op, x, rows)?;
        let shape_error = || OpsError::Shape { op, message: "the gain is not a prepared vector".into() };
        tables.weight(op, gain)?.vector.as_ref().ok_or_else(shape_error)?;
        let mut data = tables.take(op, out)?;
        let vector = tables.weight(op, gain)?.vector.as_ref().ok_or_else(shape_error)?;
        self.kernels.rms_norm(tables.rows(op, x, rows)?, vector, eps, &mut data[..rows * out.cols]);
        tables.put(out, data);
        Ok(())
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
        let op = "linear";
        shape::linear(x, w, partitions, out, rows)?;
        let mut tables = self.tables.lock();
        tables.rows(op, x, rows)?;
        tables.weight(op, w)?;
        let mut data = tables.take(op, out)?;
        let input = tables.rows(op, x, rows)?;
        let matrix = &tables.weight(op, w)?.matrix;
        self.kernels.linear(input, matrix, partitions, store, &mut data[..rows * out.cols], rows);
        tables.put(out, data);
        Ok(())
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
        let mut tables = self.tables.lock();
        tables.step(op, kv, plan)?;
        let (pool, batch) = (&tables.pools[kv.0 as usize], &tables.plan.value);
        shape::rope_store(pool, layer, batch, tables.rope(op, rope)?, q, k, v)?;
        let rows = batch.rows();
        for tensor in [q, k, v] {
            tables.rows(op, tensor, rows)?;
        }
        let (mut q_data, mut k_data) = (tables.take(op, q)?, tables.take(op, k)?);
        let step = KvStep { kv: &tables.pools[kv.0 as usize], layer, plan: &tables.plan.value };
        let (table, values) = (tables.rope(op, rope)?, tables.rows(op, v, rows)?);
        self.kernels.rope_store(step, table, &mut q_data[..rows * q.cols], &mut k_data[..rows * k.cols], values);
        tables.put(q, q_data);
        tables.put(k, k_data);
        Ok(())
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
        let mut tables = self.tables.lock();
        let (pool, batch) = tables.step(op, kv, plan)?;
        shape::attend(pool, layer, batch, q, out)?;
        let rows = batch.rows();
        tables.rows(op, q, rows)?;
        let mut data = tables.take(op, out)?;
        let step = KvStep { kv: &tables.pools[kv.0 as usize], layer, plan: &tables.plan.value };
        if rows > 0 {
            self.kernels.attend(step, tables.rows(op, q, rows)?, scale, &mut data[..rows * out.cols]);
        }
        tables.put(out, data);
        Ok(())
    }

    fn copy_kv(&self, kv: KvHandle, from: BlockId, to: BlockId, tokens: usize) -> Result<(), OpsError> {
        let tables = self.tables.lock();
        let pool = tables.pool("copy_kv", kv)?;
        shape::copy_kv(pool, from, to, tokens)?;
        pool.copy(from, to, tokens);
        Ok(())
    }

    fn silu_mul(&self, gate: Tensor, up: Tensor, rows: usize) -> Result<(), OpsError> {
        let op = "silu_mul";
        shape::silu_mul(gate, up, rows)?;
        let mut tables = self.tables.lock();
        tables.rows(op, up, rows)?;
        let mut data = tables.take(op, gate)?;
        self.kernels.silu_mul(&mut data[..rows * gate.cols], tables.rows(op, up, rows)?);
        tables.put(gate, data);
        Ok(())
    }

    fn gather_rows(&self, x: Tensor, rows: &[usize], out: Tensor) -> Result<(), OpsError> {
        let op = "gather_rows";
        shape::gather_rows(x, rows, out)?;
        let mut tables = self.tables.lock();
        tables.rows(op, x, 0)?;
        let mut data = tables.take(op, out)?;
        let input = tables.rows(op, x, x.rows_max)?;
        for (to, &row) in data.chunks_exact_mut(x.cols).zip(rows) {
            to.copy_from_slice(&input[row * x.cols..(row + 1) * x.cols]);
        }
        tables.put(out, data);
        Ok(())
    }

    fn fence(&self) -> Fence {
        Arc::new(AlreadyDone)
    }

    fn download(&self, tensor: Tensor, rows: usize, out: &mut [f32]) -> Result<(), OpsError> {
        shape::download(tensor, rows, out.len())?;
        out.copy_from_slice(self.tables.lock().rows("download", tensor, rows)?);
        Ok(())
    }
}
