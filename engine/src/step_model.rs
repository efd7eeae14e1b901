//! What the step loop needs of a model, so that tests can run it over a stand-in whose tokens betray a wrong block table.

use crate::model::{Logits, Model, ModelError, StepBatch};
use baton_kv_cache::ForkCopy;
use baton_types::Fence;

/// Computes one step at a time.
pub trait StepModel: Send + 'static {
    /// Vocabulary size.
    fn vocab(&self) -> usize;

    /// See [`Model::step`]. When it returns, nothing of the step reads or writes the pool any more: blocks may then go to other owners.
    fn step(&mut self, batch: &StepBatch, observer: &mut dyn FnMut(u32, &Fence)) -> Result<Logits, ModelError>;

    /// See [`Model::copy`]. When it returns, it is done, and both blocks may go to other owners.
    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError>;
}

impl StepModel for Model {
    fn vocab(&self) -> usize {
        self.shape().vocab
    }

    fn step(&mut self, batch: &StepBatch, observer: &mut dyn FnMut(u32, &Fence)) -> Result<Logits, ModelError> {
        Model::step(self, batch, observer)
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        Model::copy(self, copy)
    }
}
