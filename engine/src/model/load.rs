//! Loads a model's weights onto a device and writes its forward pass as a program.

use super::{ModelError, rope_table};
use crate::families::{AttentionSpec, DecoderSpec, ExpertTensor, ExpertsSpec, LayerNorms, LayerTensor, TensorName};
use crate::formats::{ModelSource, StoredTensor};
use baton_kernels::device::{Device, Role, Rope, StoredRows, Weight, WeightShape, WeightSpec};
use baton_kernels::numerics::{Numerics, PARTITIONS_MAX};
use baton_kernels::program::{
    Attend, Embed, ExpertBiases, Experts, GateUp, Head, Norm, Op, Program, Project, Qkv, QueryKeyNorms,
};
use baton_kernels::storage::StorageFormat;

/// Partitions of K of the two GEMMs whose K is split under tensor parallelism. In `f32fma`, the largest power of two up to
/// [`PARTITIONS_MAX`] that divides `extent`; one in other classes.
pub(super) fn partitions(numerics: Numerics, extent: usize) -> usize {
    if !matches!(numerics, Numerics::F32Fma { .. }) {
        return 1;
    }
    let mut parts = PARTITIONS_MAX;
    while !extent.is_multiple_of(parts) {
        parts /= 2;
    }
    parts
}

/// Loads one weight at a time, in the order of computation. `progress` receives the finished fraction, 0 to 1, after each.
pub(super) fn program(
    source: &dyn ModelSource,
    device: &dyn Device,
    positions: usize,
    progress: &dyn Fn(f32),
) -> Result<Program, ModelError> {
    let spec = source.spec();
    let (numerics, total) = (device.info().numerics, spec.parameters());
    let mut loader = Loader { source, spec, device, progress, positions, ropes: Vec::new(), done: 0, total };
    let embedding = loader.load(Role::Embedding, &[TensorName::Embedding])?;
    let mut ops = vec![Op::Embed(Embed { table: embedding, factor: spec.embedding_factor })];
    for (l, layer_spec) in spec.layers.iter().enumerate() {
        let (layer, attention, eps) = (l as u32, &layer_spec.attention, layer_spec.rms_eps);
        let name = |tensor| TensorName::Layer(l, tensor);
        let (before, behind) = (layer_spec.norms != LayerNorms::Behind, layer_spec.norms != LayerNorms::Before);
        let norm_if = |holds: bool, loader: &mut Loader<'_>, tensor| match holds {
            true => loader.norm(name(tensor), eps).map(Some),
            false => Ok(None),
        };
        ops.push(Op::Qkv(Qkv {
            layer,
            norm: norm_if(before, &mut loader, LayerTensor::AttentionNorm)?,
            weight: loader.load(Role::Qkv, &[LayerTensor::Query, LayerTensor::Key, LayerTensor::Value].map(name))?,
            bias: match attention.qkv_bias {
                true => Some(
                    loader.biases(&[LayerTensor::QueryBias, LayerTensor::KeyBias, LayerTensor::ValueBias].map(name))?,
                ),
                false => None,
            },
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            norms: match attention.query_key_norm.is_some() {
                true => Some(QueryKeyNorms {
                    query: loader.norm(name(LayerTensor::QueryNorm), eps)?,
                    key: loader.norm(name(LayerTensor::KeyNorm), eps)?,
                }),
                false => None,
            },
            rope: loader.rope(attention)?,
        }));
        if l + 1 == spec.layers.len() {
            ops.push(Op::Select);
        }
        let AttentionSpec { scale, window, soft_cap, .. } = *attention;
        let sinks = loader.vector_if(attention.sinks, name(LayerTensor::Sinks))?;
        ops.push(Op::Attend(Attend { layer, scale, window, soft_cap, sinks }));
        ops.push(Op::Out(Project {
            weight: loader.load(Role::Out, &[name(LayerTensor::AttentionOutput)])?,
            partitions: partitions(numerics, attention.kv_heads),
            bias: loader.vector_if(attention.output_bias, name(LayerTensor::AttentionOutputBias))?,
            norm: norm_if(behind, &mut loader, LayerTensor::AttentionOutputNorm)?,
            factor: layer_spec.residual_factor,
        }));
        if let Some(ExpertsSpec { count, used, renormalize, biases }) = layer_spec.experts {
            let of_experts = |tensors: &[ExpertTensor]| -> Vec<TensorName> {
                let of_expert = |expert| tensors.iter().map(move |tensor| TensorName::Expert(l, expert, *tensor));
                (0..count).flat_map(of_expert).collect()
            };
            ops.push(Op::Experts(Experts {
                norm: norm_if(before, &mut loader, LayerTensor::MlpNorm)?,
                router: loader.load(Role::Router, &[name(LayerTensor::Router)])?,
                gate_up: loader.load(Role::GateUp, &of_experts(&[ExpertTensor::Gate, ExpertTensor::Up]))?,
                down: loader.load(Role::Down, &of_experts(&[ExpertTensor::Down]))?,
                biases: match biases {
                    true => Some(ExpertBiases {
                        router: loader.load(Role::Vector, &[name(LayerTensor::RouterBias)])?,
                        gate_up: loader.biases(&of_experts(&[ExpertTensor::GateBias, ExpertTensor::UpBias]))?,
                        down: loader.biases(&of_experts(&[ExpertTensor::DownBias]))?,
                    }),
                    false => None,
                },
                partitions: partitions(numerics, layer_spec.ffn),
                used,
                renormalize,
                activation: layer_spec.activation,
                factor: layer_spec.residual_factor,
            }));
            continue;
        }
        ops.push(Op::GateUp(GateUp {
            norm: norm_if(before, &mut loader, LayerTensor::MlpNorm)?,
            weight: loader.load(Role::GateUp, &[LayerTensor::Gate, LayerTensor::Up].map(name))?,
            activation: layer_spec.activation,
        }));
        ops.push(Op::Down(Project {
            weight: loader.load(Role::Down, &[name(LayerTensor::Down)])?,
            partitions: partitions(numerics, layer_spec.ffn),
            bias: None,
            norm: norm_if(behind, &mut loader, LayerTensor::MlpOutputNorm)?,
            factor: layer_spec.residual_factor,
        }));
    }
    let norm = loader.norm(TensorName::FinalNorm, spec.final_rms_eps)?;
    let weight = if spec.tied { embedding } else { loader.load(Role::Head, &[TensorName::Output])? };
    let (factor, soft_cap) = (spec.logit_factor, spec.logit_soft_cap);
    ops.extend([Op::Head(Head { norm, weight, factor, soft_cap }), Op::Sample]);
    Ok(Program { ops })
}

/// Reads, checks and loads one weight at a time.
struct Loader<'a> {
    source: &'a dyn ModelSource,
    spec: &'a DecoderSpec,
    device: &'a dyn Device,
    progress: &'a dyn Fn(f32),
    /// Positions of the rotary tables.
    positions: usize,
    /// Rotary tables, each with the first layer's attention that needs it: usually all layers share one.
    ropes: Vec<(&'a AttentionSpec, Rope)>,
    /// Parameters loaded, and of all tensors.
    done: u64,
    total: u64,
}

impl<'a> Loader<'a> {
    fn norm(&mut self, name: TensorName, eps: f32) -> Result<Norm, ModelError> {
        Ok(Norm { gain: self.load(Role::Vector, &[name])?, eps })
    }

    fn rope(&mut self, attention: &'a AttentionSpec) -> Result<Rope, ModelError> {
        let same = |of: &AttentionSpec| of.rope == attention.rope && of.head_dim == attention.head_dim;
        if let Some((_, rope)) = self.ropes.iter().find(|(of, _)| same(of)) {
            return Ok(*rope);
        }
        let rope = self.device.load_rope(rope_table(attention, self.positions)?)?;
        self.ropes.push((attention, rope));
        Ok(rope)
    }

    fn vector_if(&mut self, holds: bool, name: TensorName) -> Result<Option<Weight>, ModelError> {
        holds.then(|| self.load(Role::Vector, &[name])).transpose()
    }

    /// Biases as one vector.
    fn biases(&mut self, names: &[TensorName]) -> Result<Weight, ModelError> {
        let mut bytes = Vec::new();
        for name in names {
            let stored = self.stored(*name)?;
            let mut values = vec![0.0; self.spec.tensor_dims(*name)[1]];
            stored.format.expand(&stored.bytes, &mut values);
            bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        }
        let k = bytes.len() / size_of::<f32>();
        let rows = StoredRows { rows: 1, format: StorageFormat::F32, bytes: &bytes };
        let name = format!("{} and others", names[0]);
        Ok(self.device.load(&WeightSpec { name: &name, role: Role::Vector, k, parts: &[rows] })?)
    }

    /// A weight of these tensors, stacked; all have the same number of columns. What the device has packed before is not read.
    fn load(&mut self, role: Role, names: &[TensorName]) -> Result<Weight, ModelError> {
        let (name, k) = (names[0].to_string(), self.spec.tensor_dims(names[0])[1]);
        let rows: Vec<usize> = names.iter().map(|name| self.spec.tensor_dims(*name)[0]).collect();
        if let Some(weight) = self.device.cached(&WeightShape { name: &name, role, k, rows: &rows }) {
            self.loaded(weight.n * weight.k);
            return Ok(weight);
        }
        let tensors = names.iter().map(|name| self.stored(*name)).collect::<Result<Vec<_>, _>>()?;
        let mut parts = Vec::with_capacity(names.len());
        for (name, stored) in names.iter().zip(&tensors) {
            let [rows, _] = self.spec.tensor_dims(*name);
            parts.push(StoredRows { rows, format: stored.format, bytes: &stored.bytes });
        }
        let weight = self.device.load(&WeightSpec { name: &name, role, k, parts: &parts })?;
        names.iter().for_each(|name| self.source.release(*name));
        Ok(weight)
    }

    fn loaded(&mut self, parameters: usize) {
        self.done += parameters as u64;
        (self.progress)((self.done as f64 / self.total as f64) as f32);
    }

    /// One tensor, of the size that the spec asks for.
    fn stored(&mut self, name: TensorName) -> Result<StoredTensor<'a>, ModelError> {
        let stored = self.source.stored(name)?;
        let [rows, columns] = self.spec.tensor_dims(name);
        let expected = stored.format.row_bytes(columns).unwrap_or(0) * rows;
        if stored.bytes.len() != expected {
            return Err(ModelError::TensorSize { name, expected, got: stored.bytes.len() });
        }
        self.loaded(rows * columns);
        Ok(stored)
    }
}
