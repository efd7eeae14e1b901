//! A model on a device: its weights, its forward pass as a program, and the KV pool that it computes on.
//!
//! RMSNorm, rotary grouped-query or latent attention or a gated delta rule, and a SwiGLU MLP around an f32 residual stream; the architecture of
//! Touvron et al., "LLaMA" (arXiv:2302.13971). One [`Model`] computes one [`StepInput`] at a time: any mix of prefill chunks and decode rows,
//! each row independent of its neighbours.
//!
//! It does not know schedulers, text, or the kind of device that runs the program.

mod error;
mod load;
mod rope;
#[cfg(test)]
mod tests;

pub use baton_kernels::step::{Logits, StepInput, StepOutput, StepSegment};
pub use error::ModelError;
pub use rope::{inverse_frequencies, rope_table};

use crate::families::DecoderSpec;
use crate::formats::ModelSource;
use baton_kernels::adapter::{AdapterBounds, PackedAdapter};
use baton_kernels::device::{Bounds, Device, DeviceInfo, Executable};
use baton_kernels::step::AdapterSlot;
use baton_kv_cache::ForkCopy;
use baton_memory::PoolMemory;
use baton_types::{Compatibility, Digest, Dtype, Fence, KvLayout, KvPoolMap, LayoutError, NumericsClass};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Formats and bounds of a loaded model. The bounds size the activations, which are allocated once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// Element type of KV; the default is bf16.
    pub kv: Dtype,
    /// Most rows (tokens) of one step.
    pub rows_max: usize,
    /// Most rows of one step that need logits.
    pub logit_rows_max: usize,
    /// Most sequences that the device keeps between steps.
    pub slots_max: usize,
    /// Longest sequence; at most the context the model was made for. Decides the memory of the rotary tables: `4 * head_dim` bytes a
    /// position.
    pub model_len_max: usize,
    /// Bounds of adapters; the default has none.
    pub adapters: AdapterBounds,
}

/// A model whose weights are on its device, with the activations of one step.
pub struct Model {
    executable: Box<dyn Executable>,
    device: DeviceInfo,
    spec: DecoderSpec,
    config: ModelConfig,
    fingerprint: Digest,
    adapters: BTreeMap<AdapterSlot, Digest>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("spec", &self.spec).field("config", &self.config).finish_non_exhaustive()
    }
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl Model {
    /// Checks that the device computes the model, loads every weight, one at a time, and compiles the forward pass. `progress` receives the finished fraction, 0 to 1, after each
    /// weight.
    pub fn load(
        source: &dyn ModelSource,
        device: &dyn Device,
        config: ModelConfig,
        progress: &dyn Fn(f32),
    ) -> Result<Self, ModelError> {
        let spec = source.spec().clone();
        error::check_config(&spec, &config)?;
        error::check_device(&spec, &device.info())?;
        let program = load::program(source, device, config.model_len_max, progress)?;
        let ModelConfig { rows_max, logit_rows_max, slots_max, model_len_max: positions_max, adapters, .. } = config;
        let bounds = Bounds { rows_max, logit_rows_max, slots_max, positions_max, adapters };
        let (executable, adapters) = (device.compile(program, bounds)?, BTreeMap::new());
        Ok(Self { executable, device: device.info(), spec, config, fingerprint: source.fingerprint(), adapters })
    }

    /// Loads an adapter for sequences that name the slot, see [`Executable::load_adapter`]; returns its digest, which the hashes of their
    /// prefixes include ([`crate::PrefixUse::of_adapter`]).
    pub fn load_adapter(&mut self, slot: AdapterSlot, adapter: Arc<PackedAdapter>) -> Result<Digest, ModelError> {
        let digest = adapter.digest();
        self.executable.load_adapter(slot, adapter)?;
        self.adapters.insert(slot, digest);
        Ok(digest)
    }

    /// Frees the slot of an adapter, see [`Executable::unload_adapter`].
    pub fn unload_adapter(&mut self, slot: AdapterSlot) -> Result<(), ModelError> {
        self.executable.unload_adapter(slot)?;
        self.adapters.remove(&slot);
        Ok(())
    }

    /// See [`Executable::leave`].
    pub fn leave(&mut self, slots: &[usize]) -> Result<(), ModelError> {
        Ok(self.executable.leave(slots)?)
    }

    /// Loaded adapters, with their digests.
    pub fn adapters(&self) -> &BTreeMap<AdapterSlot, Digest> {
        &self.adapters
    }

    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// Whether a launch returns before the step is computed.
    pub fn is_asynchronous(&self) -> bool {
        self.device.asynchronous
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The KV layout with this block size, see [`DecoderSpec::kv_layout`].
    pub fn layout(&self, block_tokens: u32) -> Result<KvLayout, LayoutError> {
        self.spec.kv_layout(block_tokens, self.config.kv)
    }

    /// What peers compare before they exchange KV.
    pub fn compatibility(&self, layout: KvLayout) -> Compatibility {
        let numerics = self.device.numerics;
        let class = NumericsClass {
            order: numerics.name().to_owned(),
            weights: numerics.weights(),
            kv: self.config.kv,
            kernel_revision: self.device.kernel_revision,
        };
        Compatibility { model: self.fingerprint, layout, class }
    }

    /// Makes `memory` the pool of all later steps. Its layout must be this model's, with any block size.
    pub fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), ModelError> {
        let expected = self.layout(map.layout().block_tokens())?;
        if map.layout() != &expected {
            return Err(ModelError::WrongLayout { pool: map.layout().to_string(), model: expected.to_string() });
        }
        Ok(self.executable.bind(memory, map)?)
    }

    /// Launches one step, see [`Executable::launch`].
    pub fn launch(&mut self, step: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        Ok(self.executable.launch(step, observer)?)
    }

    /// Waits for the oldest launched step, so that a device failure fails the step it belongs to, and returns what it sampled.
    pub fn finish(&mut self) -> Result<StepOutput, ModelError> {
        Ok(self.executable.finish()?)
    }

    /// Copies the KV that two sequences share of a partial block, and waits for it.
    pub fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        for (group, (from, to)) in copy.from.0.iter().zip(&copy.to.0).enumerate() {
            for (from, to) in from.iter().zip(to) {
                self.executable.copy_kv(group, *from, *to, copy.tokens)?;
            }
        }
        Ok(())
    }
}
