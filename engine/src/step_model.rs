//! What turns need of a model, so that tests can run them over a stand-in whose tokens betray a wrong block table.

use crate::model::{Logits, Model, ModelError, StepBatch};
use baton_kv_cache::ForkCopy;
use baton_types::Fence;

/// Computes one step at a time.
#[allow(missing_docs, reason = "the names of methods say it")]
pub trait StepModel: Send + 'static {
    fn vocab(&self) -> usize;

    /// See [`Model::launch`]. Until [`StepModel::finish`] returned, the blocks of the batch stay as they are and with their owners.
    fn launch(&mut self, batch: &StepBatch, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError>;

    /// See [`Model::finish`]. When it returns, nothing of the step reads or writes the pool any more: blocks may then go to other owners.
    fn finish(&mut self) -> Result<Logits, ModelError>;

    /// See [`Model::copy`]. When it returns, it is done, and both blocks may go to other owners.
    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError>;
}

impl StepModel for Model {
    fn vocab(&self) -> usize {
        self.shape().vocab
    }

    fn launch(&mut self, batch: &StepBatch, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        Model::launch(self, batch, observer)
    }

    fn finish(&mut self) -> Result<Logits, ModelError> {
        Model::finish(self)
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        Model::copy(self, copy)
    }
}
