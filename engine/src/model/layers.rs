//! Prepared weights.

use super::{ModelConfig, ModelError, rope_table};
use crate::formats::ModelSource;
use crate::models::{DecoderSpec, LayerTensor, TensorName};
use baton_kernels::numerics::PARTITIONS_MAX;
use baton_kernels::ops::{Ops, RopeHandle, Weight};
use baton_types::Dtype;

/// Weights of one decoder layer. Query, key and value stay separate matrices: fusing them would change no bit
/// (every output element has its own reduction), only the number of launches.
pub(super) struct Layer {
    pub(super) attention_norm: Weight,
    pub(super) query: Weight,
    pub(super) key: Weight,
    pub(super) value: Weight,
    pub(super) attention_output: Weight,
    pub(super) mlp_norm: Weight,
    pub(super) gate: Weight,
    pub(super) up: Weight,
    pub(super) down: Weight,
}

/// Everything on the device that does not change between steps.
pub(super) struct Weights {
    pub(super) embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Weight,
    /// The embedding itself where the model ties them.
    pub(super) output: Weight,
    pub(super) rope: RopeHandle,
    /// K partitions of the attention output GEMM.
    pub(super) attention_partitions: usize,
    /// K partitions of the MLP down GEMM.
    pub(super) mlp_partitions: usize,
}

/// The largest power of two up to [`PARTITIONS_MAX`] that divides `extent`: canonical numerics of the two GEMMs whose K is
/// split under tensor parallelism.
pub(super) fn partitions(extent: usize) -> usize {
    let mut parts = PARTITIONS_MAX;
    while !extent.is_multiple_of(parts) {
        parts /= 2;
    }
    parts
}

impl Weights {
    pub(super) fn load(
        source: &dyn ModelSource,
        ops: &dyn Ops,
        config: &ModelConfig,
        progress: &dyn Fn(f32),
    ) -> Result<Self, ModelError> {
        let spec = source.spec();
        let mut loader =
            Loader { source, ops, matrices: config.weights, progress, done: 0, total: spec.parameters() as usize };
        let embedding = loader.matrix(TensorName::Embedding, spec.vocab, spec.hidden)?;
        let layers = (0..spec.layers.len()).map(|l| loader.layer(l, spec)).collect::<Result<_, _>>()?;
        let final_norm = loader.gain(TensorName::FinalNorm, spec.hidden)?;
        let output = if spec.tied { embedding } else { loader.matrix(TensorName::Output, spec.vocab, spec.hidden)? };
        let rope = ops.upload_rope(&rope_table(&spec.layers[0].attention, config.model_len_max)?)?;
        Ok(Self {
            embedding,
            layers,
            final_norm,
            output,
            rope,
            attention_partitions: partitions(spec.layers[0].attention.kv_heads),
            mlp_partitions: partitions(spec.layers[0].ffn),
        })
    }
}

/// Reads, checks and prepares one tensor at a time.
struct Loader<'a> {
    source: &'a dyn ModelSource,
    ops: &'a dyn Ops,
    matrices: Dtype,
    progress: &'a dyn Fn(f32),
    done: usize,
    /// Elements of all tensors: the unit of progress.
    total: usize,
}

impl Loader<'_> {
    fn layer(&mut self, layer: usize, spec: &DecoderSpec) -> Result<Layer, ModelError> {
        let (hidden, attention, ffn) = (spec.hidden, &spec.layers[layer].attention, spec.layers[layer].ffn);
        let (query, kv) = (attention.query_dim(), attention.kv_dim());
        let name = |tensor| TensorName::Layer(layer, tensor);
        Ok(Layer {
            attention_norm: self.gain(name(LayerTensor::AttentionNorm), hidden)?,
            query: self.matrix(name(LayerTensor::Query), query, hidden)?,
            key: self.matrix(name(LayerTensor::Key), kv, hidden)?,
            value: self.matrix(name(LayerTensor::Value), kv, hidden)?,
            attention_output: self.matrix(name(LayerTensor::AttentionOutput), hidden, query)?,
            mlp_norm: self.gain(name(LayerTensor::MlpNorm), hidden)?,
            gate: self.matrix(name(LayerTensor::Gate), ffn, hidden)?,
            up: self.matrix(name(LayerTensor::Up), ffn, hidden)?,
            down: self.matrix(name(LayerTensor::Down), hidden, ffn)?,
        })
    }

    /// A `[n, k]` matrix in the configured format.
    fn matrix(&mut self, name: TensorName, n: usize, k: usize) -> Result<Weight, ModelError> {
        self.tensor(name, n, k, self.matrices)
    }

    /// A norm gain: only `k` numbers, so rounding them saves nothing.
    fn gain(&mut self, name: TensorName, k: usize) -> Result<Weight, ModelError> {
        self.tensor(name, 1, k, Dtype::F32)
    }

    fn tensor(&mut self, name: TensorName, n: usize, k: usize, dtype: Dtype) -> Result<Weight, ModelError> {
        let data = self.source.tensor(name)?;
        if data.len() != n * k {
            return Err(ModelError::TensorSize { name, expected: n * k, got: data.len() });
        }
        let weight = self.ops.prepare(&name.to_string(), n, k, dtype, &data)?;
        self.done += data.len();
        (self.progress)(self.done as f32 / self.total as f32);
        Ok(weight)
    }
}
