//! The forward pass of Llama-family models, written only in terms of [`Ops`].
//!
//! RMSNorm, rotary grouped-query attention and a SwiGLU MLP around an f32 residual stream; the architecture of
//! Touvron et al., "LLaMA" (arXiv:2302.13971). One [`Model`] owns prepared weights, activations and a bound KV pool, and
//! computes one [`StepBatch`] at a time: any mix of prefill chunks and decode rows, each row independent of its neighbours.
//!
//! It does not know schedulers, sampling, text, or the kind of device that runs the operations.

mod batch;
mod buffers;
mod error;
mod forward;
mod layers;
mod rope;
#[cfg(test)]
mod tests;

pub use batch::{Logits, StepBatch};
pub use error::ModelError;
pub use rope::{inverse_frequencies, rope_table};

use crate::formats::ModelSource;
use crate::models::DecoderSpec;
use baton_kernels::ops::{KvHandle, Ops};
use baton_kv_cache::ForkCopy;
use baton_types::{Compatibility, Digest, Dtype, KvLayout, KvPoolMap, LayoutError, NumericsClass, PoolMemory};
use buffers::Buffers;
use layers::Weights;
use std::sync::Arc;

/// Formats and bounds of a loaded model. The bounds size the activations, which are allocated once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// Format in which matrices enter the GEMMs; the CPU engine's default is bf16. Norm gains always stay f32.
    pub weights: Dtype,
    /// Element type of KV; the default is bf16.
    pub kv: Dtype,
    /// Most rows (tokens) of one step.
    pub rows_max: usize,
    /// Most rows of one step that need logits.
    pub logit_rows_max: usize,
    /// Longest sequence; at most the context the model was made for. Decides the memory of the rotary tables: `4 * head_dim` bytes a
    /// position.
    pub model_len_max: usize,
}

/// A KV pool the model may compute on.
struct Pool {
    handle: KvHandle,
    map: KvPoolMap,
}

/// A model whose weights are on its device, with the buffers of one step.
pub struct Model {
    ops: Arc<dyn Ops>,
    spec: DecoderSpec,
    config: ModelConfig,
    fingerprint: Digest,
    weights: Weights,
    buffers: Buffers,
    pool: Option<Pool>,
    /// Rows of logits of the step that was launched.
    logit_rows: usize,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("spec", &self.spec).field("config", &self.config).finish_non_exhaustive()
    }
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl Model {
    /// Reads and prepares every weight, one tensor at a time: at most one tensor of the model is in memory as f32. `progress` receives the
    /// finished fraction, 0 to 1, after each tensor.
    pub fn load(
        source: &dyn ModelSource,
        ops: Arc<dyn Ops>,
        config: ModelConfig,
        progress: &dyn Fn(f32),
    ) -> Result<Self, ModelError> {
        let spec = source.spec().clone();
        error::check_config(&spec, &config)?;
        let weights = Weights::load(source, &*ops, &config, progress)?;
        let buffers = Buffers::alloc(&*ops, &spec, &config)?;
        Ok(Self { ops, spec, config, fingerprint: source.fingerprint(), weights, buffers, pool: None, logit_rows: 0 })
    }

    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The KV layout with this block size: one `full` group with planes `k` and `v`.
    pub fn layout(&self, block_tokens: u32) -> Result<KvLayout, LayoutError> {
        self.spec.kv_layout(block_tokens, self.config.kv)
    }

    /// What peers compare before they exchange KV.
    pub fn compatibility(&self, layout: KvLayout) -> Compatibility {
        let info = self.ops.info();
        let class = NumericsClass {
            isa: info.isa.to_owned(),
            weights: self.config.weights,
            kv: self.config.kv,
            kernel_revision: info.kernel_revision,
        };
        Compatibility { model: self.fingerprint, layout, class }
    }

    /// Makes `memory` the pool of all later steps. Its layout must be this model's, with any block size.
    pub fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), ModelError> {
        let expected = self.layout(map.layout().block_tokens())?;
        if map.layout() != &expected {
            return Err(ModelError::WrongLayout { pool: map.layout().to_string(), model: expected.to_string() });
        }
        let handle = self.ops.bind_kv(memory, map)?;
        self.pool = Some(Pool { handle, map: map.clone() });
        Ok(())
    }

    /// Copies the KV that two sequences share of a partial block, and waits for it.
    pub fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        let pool = self.pool.as_ref().ok_or(ModelError::Unbound)?;
        // The engine computes only layouts of one group; the copy supports several.
        let [from, to] = [&copy.from, &copy.to].map(|blocks| blocks.0[0][0]);
        self.ops.copy_kv(pool.handle, from, to, copy.tokens)?;
        Ok(self.ops.download(self.buffers.logits, 0, &mut [])?)
    }
}
