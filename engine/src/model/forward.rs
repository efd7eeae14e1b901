//! One step through all layers.

use super::layers::Layer;
use super::{Logits, Model, ModelError, StepBatch};
use baton_kernels::ops::{IdsHandle, KvHandle, OpsError, Plan, PlanHandle, Store, Tensor};
use baton_types::Fence;

/// What the operations of one step share.
struct Step {
    kv: KvHandle,
    plan: PlanHandle,
    rows: usize,
}

impl Model {
    /// Launches one batch: enqueues the stores of every row's KV, and everything up to the logits of the requested rows.
    ///
    /// `observer` is called for each layer as soon as the stores of its KV are enqueued, with a fence after them. A transfer that starts
    /// there overlaps this layer's attention and MLP and all later layers.
    pub fn launch(&mut self, batch: &StepBatch, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        let pool = self.pool.as_ref().ok_or(ModelError::Unbound)?;
        batch.check(&self.config, self.spec.vocab, &pool.map)?;
        let ids = self.ops.upload_ids(&batch.ids)?;
        let plan = self.ops.plan(&Plan { segments: batch.segments.clone() })?;
        let step = Step { kv: pool.handle, plan, rows: batch.ids.len() };
        self.enqueue(&step, ids, &batch.logit_rows, observer)?;
        self.logit_rows = batch.logit_rows.len();
        Ok(())
    }

    /// Waits for the launched batch, so that a device failure fails the step it belongs to, and returns the requested logits.
    pub fn finish(&mut self) -> Result<Logits, ModelError> {
        let rows = std::mem::take(&mut self.logit_rows);
        let mut logits = Logits { vocab: self.spec.vocab, data: vec![0.0; rows * self.spec.vocab] };
        // Without requested rows this copies nothing and only waits.
        self.ops.download(self.buffers.logits, rows, &mut logits.data)?;
        Ok(logits)
    }

    fn enqueue(
        &self,
        step: &Step,
        ids: IdsHandle,
        logit_rows: &[usize],
        observer: &mut dyn FnMut(u32, &Fence),
    ) -> Result<(), OpsError> {
        let (ops, b, w) = (&self.ops, &self.buffers, &self.weights);
        ops.embed(w.embedding, ids, b.residual, step.rows)?;
        let last = w.layers.len() - 1;
        for (l, layer) in w.layers.iter().enumerate() {
            self.store_kv(step, l, layer)?;
            observer(l as u32, &ops.fence());
            if l < last {
                self.attend(step, l)?;
                self.project_and_mlp(l, layer, b.attended, b.residual, step.rows)?;
            }
        }
        if logit_rows.is_empty() {
            return Ok(());
        }
        // Nothing after the last layer's attention mixes rows, so only the requested rows are computed further. Their bits are the same.
        let rows = logit_rows.len();
        self.attend(step, last)?;
        ops.gather_rows(b.attended, logit_rows, b.last_attended)?;
        ops.gather_rows(b.residual, logit_rows, b.last_residual)?;
        self.project_and_mlp(last, &w.layers[last], b.last_attended, b.last_residual, rows)?;
        ops.rms_norm(b.last_residual, w.final_norm, self.spec.final_rms_eps, b.normed, rows)?;
        ops.linear(b.normed, w.output, 1, Store::Set, b.logits, rows)
    }

    /// Norm, the three input projections, rotation, and the store into the pool.
    fn store_kv(&self, step: &Step, l: usize, layer: &Layer) -> Result<(), OpsError> {
        let (ops, b, rows) = (&self.ops, &self.buffers, step.rows);
        ops.rms_norm(b.residual, layer.attention_norm, self.spec.layers[l].rms_eps, b.normed, rows)?;
        ops.linear(b.normed, layer.query, 1, Store::Set, b.query, rows)?;
        ops.linear(b.normed, layer.key, 1, Store::Set, b.key, rows)?;
        ops.linear(b.normed, layer.value, 1, Store::Set, b.value, rows)?;
        ops.rope_store(step.kv, l, step.plan, self.weights.rope, b.query, b.key, b.value)
    }

    /// Attention of all rows over the pool, scaled by `1 / sqrt(head_dim)`.
    fn attend(&self, step: &Step, l: usize) -> Result<(), OpsError> {
        let scale = (1.0 / (self.spec.layers[l].attention.head_dim as f64).sqrt()) as f32;
        self.ops.attend(step.kv, l, step.plan, self.buffers.query, scale, self.buffers.attended)
    }

    /// The rest of a layer, row by row: `residual += attended * Wo`, then `residual += (silu(h * Wg) * (h * Wu)) * Wd`.
    fn project_and_mlp(
        &self,
        l: usize,
        layer: &Layer,
        attended: Tensor,
        residual: Tensor,
        rows: usize,
    ) -> Result<(), OpsError> {
        let (ops, b, w) = (&self.ops, &self.buffers, &self.weights);
        ops.linear(attended, layer.attention_output, w.attention_partitions, Store::Add, residual, rows)?;
        ops.rms_norm(residual, layer.mlp_norm, self.spec.layers[l].rms_eps, b.normed, rows)?;
        ops.linear(b.normed, layer.gate, 1, Store::Set, b.gate, rows)?;
        ops.linear(b.normed, layer.up, 1, Store::Set, b.up, rows)?;
        ops.silu_mul(b.gate, b.up, rows)?;
        ops.linear(b.gate, layer.down, w.mlp_partitions, Store::Add, residual, rows)
    }
}
