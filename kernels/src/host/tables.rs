//! The objects behind the handles of a host backend.

use crate::kv::KvBinding;
use crate::ops::{IdsHandle, KvHandle, OpsError, Plan, PlanHandle, RopeHandle, RopeTable, Tensor, Weight};

pub(super) struct Prepared<M> {
    pub(super) matrix: M,
    /// Row 0 widened, where the weight is a vector.
    pub(super) vector: Option<Vec<f32>>,
}

/// The batch of the current step; `generation` distinguishes its handles from those of earlier steps.
#[derive(Default)]
pub(super) struct Step<T> {
    pub(super) generation: u32,
    pub(super) value: T,
}

/// The objects that the operations of a stream refer to.
pub(super) struct Tables<M> {
    pub(super) tensors: Vec<Vec<f32>>,
    pub(super) weights: Vec<Prepared<M>>,
    pub(super) pools: Vec<KvBinding>,
    pub(super) ropes: Vec<RopeTable>,
    pub(super) ids: Step<Vec<u32>>,
    pub(super) plan: Step<Plan>,
    /// The pool that the current plan's block tables were last checked against.
    pub(super) plan_checked: Option<KvHandle>,
}

impl<M> Default for Tables<M> {
    fn default() -> Self {
        Self {
            tensors: Vec::new(),
            weights: Vec::new(),
            pools: Vec::new(),
            ropes: Vec::new(),
            ids: Step::default(),
            plan: Step::default(),
            plan_checked: None,
        }
    }
}

fn unknown<T>(op: &'static str, what: &str) -> Result<T, OpsError> {
    Err(OpsError::Shape { op, message: format!("{what} is not of this backend, or of an earlier step") })
}

impl<M> Tables<M> {
    /// The first `rows` rows of a tensor.
    pub(super) fn rows(&self, op: &'static str, tensor: Tensor, rows: usize) -> Result<&[f32], OpsError> {
        match self.tensors.get(tensor.id as usize) {
            Some(data) if data.len() == tensor.rows_max * tensor.cols => Ok(&data[..rows * tensor.cols]),
            _ => unknown(op, "the tensor"),
        }
    }

    /// Removes a tensor, to write to it while others are read; [`Tables::put`] restores it.
    pub(super) fn take(&mut self, op: &'static str, tensor: Tensor) -> Result<Vec<f32>, OpsError> {
        self.rows(op, tensor, 0)?;
        Ok(std::mem::take(&mut self.tensors[tensor.id as usize]))
    }

    pub(super) fn put(&mut self, tensor: Tensor, data: Vec<f32>) {
        self.tensors[tensor.id as usize] = data;
    }

    pub(super) fn weight(&self, op: &'static str, weight: Weight) -> Result<&Prepared<M>, OpsError> {
        self.weights.get(weight.id as usize).map_or_else(|| unknown(op, "the weight"), Ok)
    }

    pub(super) fn rope(&self, op: &'static str, rope: RopeHandle) -> Result<&RopeTable, OpsError> {
        self.ropes.get(rope.0 as usize).map_or_else(|| unknown(op, "the rope table"), Ok)
    }

    pub(super) fn ids(&self, op: &'static str, ids: IdsHandle) -> Result<&[u32], OpsError> {
        if ids.0 == self.ids.generation { Ok(&self.ids.value) } else { unknown(op, "the id list") }
    }

    pub(super) fn pool(&self, op: &'static str, kv: KvHandle) -> Result<&KvBinding, OpsError> {
        self.pools.get(kv.0 as usize).map_or_else(|| unknown(op, "the KV pool"), Ok)
    }

    /// The current plan, its tables checked against the pool.
    pub(super) fn step(
        &mut self,
        op: &'static str,
        kv: KvHandle,
        plan: PlanHandle,
    ) -> Result<(&KvBinding, &Plan), OpsError> {
        if plan.0 != self.plan.generation {
            return unknown(op, "the plan");
        }
        if self.plan_checked != Some(kv) {
            self.pool(op, kv)?.check(op, &self.plan.value)?;
            self.plan_checked = Some(kv);
        }
        Ok((self.pool(op, kv)?, &self.plan.value))
    }
}
