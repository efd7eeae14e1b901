//! Prepared weights.

use super::{ModelConfig, ModelError, rope_table};
use crate::formats::{LayerTensor, ModelShape, ModelSource, TensorName};
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
        let shape = source.shape();
        let mut loader = Loader { source, ops, matrices: config.weights, progress, done: 0, total: elements(shape) };
        let embedding = loader.matrix(TensorName::Embedding, shape.vocab, shape.hidden)?;
        let layers = (0..shape.layers).map(|l| loader.layer(l, shape)).collect::<Result<_, _>>()?;
        let final_norm = loader.gain(TensorName::FinalNorm, shape.hidden)?;
        let output =
            if shape.tied { embedding } else { loader.matrix(TensorName::Output, shape.vocab, shape.hidden)? };
        let rope = ops.upload_rope(&rope_table(shape, config.model_len_max)?)?;
        Ok(Self {
            embedding,
            layers,
            final_norm,
            output,
            rope,
            attention_partitions: partitions(shape.kv_heads),
            mlp_partitions: partitions(shape.ffn),
        })
    }
}

/// Elements of all tensors: the unit of progress.
fn elements(shape: &ModelShape) -> usize {
    let heads = (shape.heads + shape.kv_heads) * shape.head_dim;
    let layer = shape.hidden * (2 + 2 * heads + 3 * shape.ffn);
    let tables = if shape.tied { 1 } else { 2 };
    tables * shape.vocab * shape.hidden + shape.layers * layer + shape.hidden
}

/// Reads, checks and prepares one tensor at a time.
struct Loader<'a> {
    source: &'a dyn ModelSource,
    ops: &'a dyn Ops,
    matrices: Dtype,
    progress: &'a dyn Fn(f32),
    done: usize,
    total: usize,
}

impl Loader<'_> {
    fn layer(&mut self, layer: usize, shape: &ModelShape) -> Result<Layer, ModelError> {
        let (hidden, ffn) = (shape.hidden, shape.ffn);
        let (query, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
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
