//! Loads a model's weights onto a device and writes its forward pass as a program.

use super::{ModelError, rope_table};
use crate::weights::{LayerTensor, ModelShape, ModelSource, StoredTensor, TensorName};
use baton_kernels::device::{Device, Role, StoredRows, Weight, WeightSpec};
use baton_kernels::numerics::{Numerics, PARTITIONS_MAX};
use baton_kernels::program::{Attend, GateUp, Head, Norm, Op, Program, Project, Qkv};

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
    let shape = source.shape();
    let (numerics, total) = (device.info().numerics, shape.parameters());
    let mut loader = Loader { source, shape, device, progress, done: 0, total };
    let rope = device.load_rope(rope_table(shape, positions)?)?;
    let embedding = loader.load(Role::Embedding, &[TensorName::Embedding])?;
    let mut ops = vec![Op::Embed(embedding)];
    for l in 0..shape.layers {
        let layer = l as u32;
        let name = |tensor| TensorName::Layer(l, tensor);
        let [query, key, value] = [LayerTensor::Query, LayerTensor::Key, LayerTensor::Value].map(name);
        ops.push(Op::Qkv(Qkv {
            layer,
            norm: loader.norm(name(LayerTensor::AttentionNorm))?,
            weight: loader.load(Role::Qkv, &[query, key, value])?,
            bias: None,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            head_norms: None,
            rope,
        }));
        if l + 1 == shape.layers {
            ops.push(Op::Select);
        }
        let scale = (1.0 / (shape.head_dim as f64).sqrt()) as f32;
        ops.push(Op::Attend(Attend { layer, scale, window: None }));
        let weight = loader.load(Role::Out, &[name(LayerTensor::AttentionOutput)])?;
        ops.push(Op::Out(Project { weight, partitions: partitions(numerics, shape.kv_heads) }));
        let norm = loader.norm(name(LayerTensor::MlpNorm))?;
        let weight = loader.load(Role::GateUp, &[LayerTensor::Gate, LayerTensor::Up].map(name))?;
        ops.push(Op::GateUp(GateUp { norm, weight }));
        let weight = loader.load(Role::Down, &[name(LayerTensor::Down)])?;
        ops.push(Op::Down(Project { weight, partitions: partitions(numerics, shape.ffn) }));
    }
    let norm = loader.norm(TensorName::FinalNorm)?;
    let weight = if shape.tied { embedding } else { loader.load(Role::Head, &[TensorName::Output])? };
    ops.push(Op::Head(Head { norm, weight }));
    Ok(Program { ops })
}

/// Reads, checks and loads one weight at a time.
struct Loader<'a> {
    source: &'a dyn ModelSource,
    shape: &'a ModelShape,
    device: &'a dyn Device,
    progress: &'a dyn Fn(f32),
    /// Parameters loaded, and of all tensors.
    done: u64,
    total: u64,
}

impl Loader<'_> {
    fn norm(&mut self, name: TensorName) -> Result<Norm, ModelError> {
        Ok(Norm { gain: self.load(Role::Vector, &[name])?, eps: self.shape.rms_eps })
    }

    /// A weight of these tensors, stacked; all have the same number of columns.
    fn load(&mut self, role: Role, names: &[TensorName]) -> Result<Weight, ModelError> {
        let tensors = names.iter().map(|name| self.source.stored(*name)).collect::<Result<Vec<_>, _>>()?;
        let mut parts = Vec::with_capacity(names.len());
        let mut k = 0;
        for (name, StoredTensor { format, bytes }) in names.iter().zip(&tensors) {
            let [rows, columns] = self.shape.tensor_dims(*name);
            let expected = format.row_bytes(columns).unwrap_or(0) * rows;
            if bytes.len() != expected {
                return Err(ModelError::TensorSize { name: *name, expected, got: bytes.len() });
            }
            parts.push(StoredRows { rows, format: *format, bytes });
            self.done += (rows * columns) as u64;
            k = columns;
        }
        let weight = self.device.load(&WeightSpec { name: &names[0].to_string(), role, k, parts: &parts })?;
        (self.progress)((self.done as f64 / self.total as f64) as f32);
        Ok(weight)
    }
}
