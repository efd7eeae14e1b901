//! The runner's interface to a model, so that tests can run it over a fake model whose tokens reveal a wrong block table.

use crate::model::{Logits, Model, ModelError, StepInput};
use baton_kv_cache::ForkCopy;
use baton_types::Fence;

/// Computes one step at a time.
#[allow(missing_docs, reason = "the names of methods say it")]
pub trait StepModel: Send + 'static {
    fn vocab(&self) -> usize;

    /// See [`Model::launch`]. Until [`StepModel::finish`] has returned, the blocks of the batch keep their contents and owners.
    fn launch(&mut self, batch: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError>;

    /// See [`Model::finish`]. When it returns, the step no longer reads or writes the pool: blocks may then change owners.
    fn finish(&mut self) -> Result<Logits, ModelError>;

    /// See [`Model::copy`]. When it returns, the copy is complete, and both blocks may change owners.
    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError>;
}

impl StepModel for Model {
    fn vocab(&self) -> usize {
        self.spec().vocab
    }

    fn launch(&mut self, batch: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        Model::launch(self, batch, observer)
    }

    fn finish(&mut self) -> Result<Logits, ModelError> {
        Model::finish(self)
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        Model::copy(self, copy)
    }
}
