//! The runner's interface to a model, so that tests can run it over a fake model whose tokens reveal a wrong block table.

use crate::model::{Model, ModelError, StepInput, StepOutput};
use baton_kernels::adapter::PackedAdapter;
use baton_kernels::device::DeviceError;
use baton_kernels::step::AdapterSlot;
use baton_kv_cache::ForkCopy;
use baton_types::{Digest, Fence};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Computes steps in order.
#[allow(missing_docs, reason = "the names of methods say it")]
pub trait StepModel: Send + 'static {
    fn vocab(&self) -> usize;

    /// Whether [`StepModel::launch`] returns before the step is computed. Then the runner launches one step ahead.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Its loaded adapters, with their digests.
    fn adapters(&self) -> BTreeMap<AdapterSlot, Digest> {
        BTreeMap::new()
    }

    /// See [`Model::load_adapter`] and [`Model::unload_adapter`]. Models without adapters have no slot for one.
    fn set_adapter(&mut self, slot: AdapterSlot, _: Option<Arc<PackedAdapter>>) -> Result<(), ModelError> {
        Err(DeviceError::AdapterSlots { slot, slots_max: 0 }.into())
    }

    /// See [`Model::leave`]; called before an adapter changes.
    fn leave(&mut self, _slots: &[usize]) -> Result<(), ModelError> {
        Ok(())
    }

    /// See [`Model::launch`]. Until [`StepModel::finish`] has returned, the blocks of the step keep their contents and owners.
    fn launch(&mut self, step: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError>;

    /// See [`Model::finish`]. When it returns, the step no longer reads or writes the pool: blocks that no later step uses may then change
    /// owners.
    fn finish(&mut self) -> Result<StepOutput, ModelError>;

    /// See [`Model::copy`]. When it returns, the copy is complete, and both blocks may change owners.
    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError>;
}

impl StepModel for Model {
    fn vocab(&self) -> usize {
        self.spec().vocab
    }

    fn is_asynchronous(&self) -> bool {
        Model::is_asynchronous(self)
    }

    fn adapters(&self) -> BTreeMap<AdapterSlot, Digest> {
        Model::adapters(self).clone()
    }

    fn set_adapter(&mut self, slot: AdapterSlot, adapter: Option<Arc<PackedAdapter>>) -> Result<(), ModelError> {
        match adapter {
            Some(adapter) => self.load_adapter(slot, adapter).map(|_| ()),
            None => self.unload_adapter(slot),
        }
    }

    fn leave(&mut self, slots: &[usize]) -> Result<(), ModelError> {
        Model::leave(self, slots)
    }

    fn launch(&mut self, step: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        Model::launch(self, step, observer)
    }

    fn finish(&mut self) -> Result<StepOutput, ModelError> {
        Model::finish(self)
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        Model::copy(self, copy)
    }
}
