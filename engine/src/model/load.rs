//! Loads a model's weights onto a device and writes its forward pass as a program.

use super::{ModelError, rope_table};
use crate::families::{
    AttentionSpec, DecoderSpec, ExpertTensor, ExpertsSpec, GatedDeltaSpec, LatentSpec, LayerNorms, LayerTensor,
    TensorName,
};
use crate::formats::{ModelSource, StoredTensor};
use baton_kernels::device::{Device, Role, Rope, StoredRows, Weight, WeightShape, WeightSpec};
use baton_kernels::numerics::{Numerics, PARTITIONS_MAX};
use baton_kernels::program::{
    Attend, Embed, Expand, ExpertBiases, Experts, GateUp, GatedDelta, Head, Latent, LatentQuery, Norm, Op, Program,
    Project, Qkv, QueryKeyNorms, SharedExpert,
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
        let norm = norm_if(before, &mut loader, LayerTensor::AttentionNorm)?;
        let select = (l + 1 == spec.layers.len()).then_some(Op::Select);
        let (output, groups) = match layer_spec.delta {
            Some(delta) => {
                ops.push(Op::GatedDelta(loader.delta(l, delta, norm, eps)?));
                ops.extend(select);
                (LayerTensor::DeltaOutput, delta.key_heads)
            }
            None => {
                let (stores, behind) = loader.attention(l, attention, norm, eps)?;
                ops.push(stores);
                ops.extend(select);
                let AttentionSpec { scale, window, soft_cap, .. } = *attention;
                let sinks = loader.vector_if(attention.sinks, name(LayerTensor::Sinks))?;
                ops.push(Op::Attend(Attend { layer, scale, window, soft_cap, sinks }));
                ops.extend(behind);
                (LayerTensor::AttentionOutput, attention.kv_heads)
            }
        };
        ops.push(Op::Out(Project {
            weight: loader.load(Role::Out, &[name(output)])?,
            partitions: partitions(numerics, groups),
            bias: loader.vector_if(
                layer_spec.has_tensor(LayerTensor::AttentionOutputBias),
                name(LayerTensor::AttentionOutputBias),
            )?,
            norm: norm_if(behind, &mut loader, LayerTensor::AttentionOutputNorm)?,
            factor: layer_spec.residual_factor,
        }));
        if let Some(ExpertsSpec { count, choice, choice_bias, shared_ffn, biases }) = layer_spec.experts {
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
                        gate_up: loader.as_vector(&of_experts(&[ExpertTensor::GateBias, ExpertTensor::UpBias]))?,
                        down: loader.as_vector(&of_experts(&[ExpertTensor::DownBias]))?,
                    }),
                    false => None,
                },
                partitions: partitions(numerics, layer_spec.ffn),
                choice,
                choice_bias: loader.vector_if(choice_bias, name(LayerTensor::ChoiceBias))?,
                shared: match shared_ffn {
                    Some(ffn) => Some(SharedExpert {
                        gate_up: loader
                            .load(Role::GateUp, &[LayerTensor::SharedGate, LayerTensor::SharedUp].map(name))?,
                        down: loader.load(Role::Down, &[name(LayerTensor::SharedDown)])?,
                        partitions: partitions(numerics, ffn),
                    }),
                    None => None,
                },
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

    /// What comes before attention, and what comes behind it, if anything.
    fn attention(
        &mut self,
        l: usize,
        attention: &'a AttentionSpec,
        norm: Option<Norm>,
        eps: f32,
    ) -> Result<(Op, Option<Op>), ModelError> {
        Ok(match attention.latent {
            Some(latent) => {
                let (projections, values) = self.latent(l, attention, latent, norm)?;
                (Op::Latent(projections), Some(Op::Expand(values)))
            }
            None => {
                let qkv = self.qkv(l, attention, norm, eps)?;
                (Op::Qkv(qkv), qkv.gate.then_some(Op::Gate))
            }
        })
    }

    /// A gated delta rule.
    fn delta(
        &mut self,
        l: usize,
        delta: GatedDeltaSpec,
        norm: Option<Norm>,
        eps: f32,
    ) -> Result<GatedDelta, ModelError> {
        use LayerTensor::{DeltaA, DeltaB, DeltaConv, DeltaDecay, DeltaDecayBias, DeltaNorm, DeltaQkv, DeltaZ};
        let name = |tensor| TensorName::Layer(l, tensor);
        let GatedDeltaSpec { key_heads, value_heads, key_dim, value_dim, taps, length_eps } = delta;
        let (key, value) = (delta.query_dim(), delta.attended_dim());
        let heights = [key, key, value, value, value_heads, value_heads];
        Ok(GatedDelta {
            layer: l as u32,
            norm,
            weight: self.load_cut(Role::Qkv, &[DeltaQkv, DeltaZ, DeltaB, DeltaA].map(name), &heights)?,
            conv: self.as_vector(&[name(DeltaConv)])?,
            decay: self.load(Role::Vector, &[name(DeltaDecay)])?,
            decay_bias: self.load(Role::Vector, &[name(DeltaDecayBias)])?,
            output_norm: self.norm(name(DeltaNorm), eps)?,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            taps,
            length_eps,
        })
    }

    /// Projections of attention over keys and values.
    fn qkv(&mut self, l: usize, attention: &'a AttentionSpec, norm: Option<Norm>, eps: f32) -> Result<Qkv, ModelError> {
        let name = |tensor| TensorName::Layer(l, tensor);
        Ok(Qkv {
            layer: l as u32,
            norm,
            weight: match attention.output_gate {
                true => self.gated(l, attention)?,
                false => self.load(Role::Qkv, &[LayerTensor::Query, LayerTensor::Key, LayerTensor::Value].map(name))?,
            },
            bias: match attention.qkv_bias {
                true => Some(
                    self.as_vector(&[LayerTensor::QueryBias, LayerTensor::KeyBias, LayerTensor::ValueBias].map(name))?,
                ),
                false => None,
            },
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            norms: match attention.query_key_norm.is_some() {
                true => Some(QueryKeyNorms {
                    query: self.norm(name(LayerTensor::QueryNorm), eps)?,
                    key: self.norm(name(LayerTensor::KeyNorm), eps)?,
                }),
                false => None,
            },
            rope: self.rope(attention)?,
            gate: attention.output_gate,
        })
    }

    /// Query, key, value and gate as four parts. Query and gate are one tensor, in which the heads take turns.
    fn gated(&mut self, l: usize, attention: &AttentionSpec) -> Result<Weight, ModelError> {
        let names =
            [LayerTensor::Query, LayerTensor::Key, LayerTensor::Value].map(|tensor| TensorName::Layer(l, tensor));
        let (name, k) = (names[0].to_string(), self.spec.hidden);
        let (query, kv) = (attention.query_dim(), attention.kv_dim());
        let shape = WeightShape { name: &name, role: Role::Qkv, k, rows: &[query, kv, kv, query] };
        if let Some(weight) = self.device.cached(&shape) {
            self.loaded(weight.n * weight.k);
            return Ok(weight);
        }
        let [both, key, value] = [self.stored(names[0])?, self.stored(names[1])?, self.stored(names[2])?];
        let head_bytes = both.bytes.len() / (2 * attention.heads);
        // Every second run of rows, from the first or from the second on.
        let turns =
            |first: usize| both.bytes.chunks_exact(head_bytes).skip(first).step_by(2).collect::<Vec<_>>().concat();
        let (query_bytes, gate_bytes) = (turns(0), turns(1));
        let parts = [
            StoredRows { rows: query, format: both.format, bytes: &query_bytes },
            StoredRows { rows: kv, format: key.format, bytes: &key.bytes },
            StoredRows { rows: kv, format: value.format, bytes: &value.bytes },
            StoredRows { rows: query, format: both.format, bytes: &gate_bytes },
        ];
        let weight = self.device.load(&WeightSpec { name: &name, role: Role::Qkv, k, parts: &parts })?;
        names.iter().for_each(|name| self.source.release(*name));
        Ok(weight)
    }

    /// Projections of latent attention, and values out of latents.
    ///
    /// A head's queries are multiplied with the matrix that makes keys of latents, and what it attends to with the one that makes values, so that keys
    /// and values never exist: both are cut out of one tensor here, the first transposed.
    fn latent(
        &mut self,
        l: usize,
        attention: &'a AttentionSpec,
        latent: LatentSpec,
        norm: Option<Norm>,
    ) -> Result<(Latent, Expand), ModelError> {
        let LatentSpec { query_rank, rank, value_dim, rms_eps } = latent;
        let (heads, rotated) = (attention.heads, attention.rotated());
        let name = |tensor| TensorName::Layer(l, tensor);
        let first = if query_rank.is_some() { LayerTensor::QueryDown } else { LayerTensor::Query };
        let [columns, _] = self.spec.tensor_dims(name(first));
        let weight = self.load_cut(Role::Qkv, &[first, LayerTensor::KvDown].map(name), &[columns, rank, rotated])?;
        let query = match query_rank {
            Some(_) => Some(LatentQuery {
                norm: self.norm(name(LayerTensor::QueryDownNorm), rms_eps)?,
                weight: self.load(Role::Qkv, &[name(LayerTensor::QueryUp)])?,
            }),
            None => None,
        };
        let kv_norm = self.norm(name(LayerTensor::KvDownNorm), rms_eps)?;
        let rope = self.rope(attention)?;
        let (up, plain) = (name(LayerTensor::KvUp), attention.head_dim - rotated);
        let (keys_name, values_name) = (format!("{up} (keys)"), format!("{up} (values)"));
        let keys_rows = vec![rank; heads];
        let keys = WeightShape { name: &keys_name, role: Role::Heads, k: plain, rows: &keys_rows };
        let values_rows = vec![value_dim; heads];
        let values = WeightShape { name: &values_name, role: Role::Heads, k: rank, rows: &values_rows };
        let (keys, values) = match (self.device.cached(&keys), self.device.cached(&values)) {
            (Some(keys), Some(values)) => {
                self.loaded(keys.n * keys.k + values.n * values.k);
                (keys, values)
            }
            _ => {
                let stored = self.stored(up)?;
                let mut both = vec![0.0; heads * (plain + value_dim) * rank];
                stored.format.expand(&stored.bytes, &mut both);
                let of_heads = || both.chunks_exact((plain + value_dim) * rank);
                let transposed = |head: &[f32]| {
                    (0..rank).flat_map(|r| (0..plain).map(move |p| (p, r))).map(|(p, r)| head[p * rank + r]).collect()
                };
                let keys = self.load_heads(&keys, of_heads().map(transposed))?;
                let values = self.load_heads(&values, of_heads().map(|head| head[plain * rank..].to_vec()))?;
                self.source.release(up);
                (keys, values)
            }
        };
        let projections = Latent { layer: l as u32, norm, weight, query, kv_norm, keys, heads, rope };
        Ok((projections, Expand { weight: values, heads }))
    }

    /// A matrix for each head.
    fn load_heads(&self, shape: &WeightShape<'_>, heads: impl Iterator<Item = Vec<f32>>) -> Result<Weight, ModelError> {
        let bytes: Vec<Vec<u8>> = heads.map(|head| head.into_iter().flat_map(f32::to_le_bytes).collect()).collect();
        let parts: Vec<_> = shape
            .rows
            .iter()
            .zip(&bytes)
            .map(|(rows, bytes)| StoredRows { rows: *rows, format: StorageFormat::F32, bytes })
            .collect();
        let WeightShape { name, role, k, .. } = *shape;
        Ok(self.device.load(&WeightSpec { name, role, k, parts: &parts })?)
    }

    /// Biases, or the rows of other tensors, as one vector.
    fn as_vector(&mut self, names: &[TensorName]) -> Result<Weight, ModelError> {
        let mut bytes = Vec::new();
        for name in names {
            let stored = self.stored(*name)?;
            let mut values = vec![0.0; self.spec.tensor_dims(*name).iter().product()];
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
        let heights: Vec<usize> = names.iter().map(|name| self.spec.tensor_dims(*name)[0]).collect();
        self.load_cut(role, names, &heights)
    }

    /// The same, cut into parts of these heights. No part has rows of two tensors.
    fn load_cut(&mut self, role: Role, names: &[TensorName], heights: &[usize]) -> Result<Weight, ModelError> {
        let (name, k) = (names[0].to_string(), self.spec.tensor_dims(names[0])[1]);
        if let Some(weight) = self.device.cached(&WeightShape { name: &name, role, k, rows: heights }) {
            self.loaded(weight.n * weight.k);
            return Ok(weight);
        }
        let tensors = names.iter().map(|name| self.stored(*name)).collect::<Result<Vec<_>, _>>()?;
        let (mut parts, mut heights) = (Vec::with_capacity(heights.len()), heights.iter());
        for (name, stored) in names.iter().zip(&tensors) {
            let [mut left, _] = self.spec.tensor_dims(*name);
            let (row_bytes, mut bytes) = (stored.bytes.len() / left, &stored.bytes[..]);
            while left > 0 {
                let rows = *heights.next().expect("heights of all rows");
                let (part, rest) = bytes.split_at(rows * row_bytes);
                parts.push(StoredRows { rows, format: stored.format, bytes: part });
                (left, bytes) = (left - rows, rest);
            }
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
