//! Operations with their weights: every handle of a program is resolved once.

use super::{
    ChoiceOf, DeltaHeads, DeltaOf, ExpertMatrices, ExpertsOf, GateUpOf, HostKernels, LatentMatrices, LatentOf, Loaded,
    NormOf, ProjectOf, QkvOf, Scores, Shared,
};
use crate::device::{DeviceError, Role, RopeTable, Weight};
use crate::numerics::exp;
use crate::program::{self, Activation, Op};
use std::sync::Arc;

/// An operation with its weights.
pub(super) enum Resolved<M> {
    /// With its factor.
    Embed(Arc<Loaded<M>>, f32),
    Qkv(Qkv<M>),
    Latent(Latent<M>),
    Attend(Attend),
    Expand(Expand<M>),
    Gate,
    GatedDelta(GatedDelta<M>),
    Out(Projection<M>),
    GateUp(GateUp<M>),
    Down(Projection<M>),
    Experts(Experts<M>),
    Select,
    Head(Head<M>),
    Sample,
}

pub(super) struct Attend {
    pub(super) op: program::Attend,
    pub(super) sinks: Option<Vec<f32>>,
}

/// A projection of `k` columns that is added to the residual stream.
pub(super) struct Projection<M> {
    pub(super) weight: Arc<Loaded<M>>,
    pub(super) k: usize,
    pub(super) partitions: usize,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) norm: Option<Norm>,
    pub(super) factor: f32,
}

pub(super) struct GateUp<M> {
    pub(super) norm: Option<Norm>,
    pub(super) weight: Arc<Loaded<M>>,
    pub(super) activation: Activation,
    /// Columns of the gate.
    pub(super) ffn: usize,
}

pub(super) struct Experts<M> {
    pub(super) norm: Option<Norm>,
    /// Router, gate and up, and down.
    pub(super) weights: [Arc<Loaded<M>>; 3],
    /// Gate and up, and down, of the expert that all rows use.
    pub(super) shared: Option<[Arc<Loaded<M>>; 2]>,
    pub(super) choice_bias: Option<Vec<f32>>,
    /// Of the same.
    pub(super) biases: Option<[Vec<f32>; 3]>,
    pub(super) op: program::Experts,
}

pub(super) struct Head<M> {
    pub(super) norm: Norm,
    pub(super) weight: Arc<Loaded<M>>,
    pub(super) factor: f32,
    pub(super) soft_cap: Option<f32>,
}

pub(super) struct Norm {
    pub(super) gain: Vec<f32>,
    pub(super) eps: f32,
}

pub(super) struct Qkv<M> {
    pub(super) layer: u32,
    pub(super) norm: Option<Norm>,
    pub(super) weight: Arc<Loaded<M>>,
    /// Of query, key, value and gate.
    pub(super) bias: Option<Vec<f32>>,
    /// Columns of query, and of key and value.
    pub(super) query: usize,
    pub(super) kv: usize,
    pub(super) gate: bool,
    /// Of query and key.
    pub(super) norms: Option<[Norm; 2]>,
    pub(super) rope: Arc<RopeTable>,
}

pub(super) struct Latent<M> {
    pub(super) op: program::Latent,
    pub(super) norm: Option<Norm>,
    pub(super) down: Arc<Loaded<M>>,
    /// Norm and matrix.
    pub(super) query: Option<(Norm, Arc<Loaded<M>>)>,
    pub(super) kv_norm: Norm,
    pub(super) keys: Arc<Loaded<M>>,
    pub(super) rope: Arc<RopeTable>,
}

pub(super) struct GatedDelta<M> {
    pub(super) op: program::GatedDelta,
    pub(super) norm: Option<Norm>,
    pub(super) weight: Arc<Loaded<M>>,
    /// `[taps, channels]`
    conv: Vec<f32>,
    rates: Vec<f32>,
    decay_bias: Vec<f32>,
    /// Of query and key.
    lengths: [Norm; 2],
    output_norm: Norm,
}

pub(super) struct Expand<M> {
    pub(super) weight: Arc<Loaded<M>>,
    pub(super) heads: usize,
    /// Elements of a latent, and of a value.
    pub(super) rank: usize,
    pub(super) value: usize,
}

impl<K: HostKernels> Shared<K> {
    fn norm(&self, norm: &program::Norm) -> Result<Norm, DeviceError> {
        Ok(Norm { gain: self.vector(norm.gain)?, eps: norm.eps })
    }

    fn norm_if(&self, norm: Option<program::Norm>) -> Result<Option<Norm>, DeviceError> {
        norm.map(|norm| self.norm(&norm)).transpose()
    }

    fn projection(&self, op: &program::Project) -> Result<Projection<K::Matrix>, DeviceError> {
        let norm = self.norm_if(op.norm)?;
        let (weight, k) = (self.matrix(op.weight, 1)?, op.weight.k);
        let bias = self.vector_if(op.bias)?;
        Ok(Projection { weight, k, partitions: op.partitions, bias, norm, factor: op.factor })
    }

    fn vector_if(&self, weight: Option<Weight>) -> Result<Option<Vec<f32>>, DeviceError> {
        weight.map(|weight| self.vector(weight)).transpose()
    }

    fn gated_delta(&self, op: &program::GatedDelta) -> Result<GatedDelta<K::Matrix>, DeviceError> {
        let (stored, channels) = (self.vector(op.conv)?, op.channels());
        let conv = (0..op.taps * channels).map(|at| stored[at % channels * op.taps + at / channels]).collect();
        // The norm of a length is that of a mean square: with `n` elements, `x / sqrt(sum + eps)` is `x / sqrt(sum / n + eps / n) / sqrt(n)`.
        let dim = op.key_dim as f32;
        let length = |factor: f32| Norm { gain: vec![factor; op.key_dim], eps: op.length_eps / dim };
        Ok(GatedDelta {
            op: *op,
            norm: self.norm_if(op.norm)?,
            weight: self.matrix(op.weight, op.columns().len())?,
            conv,
            rates: self.vector(op.decay)?.into_iter().map(exp).collect(),
            decay_bias: self.vector(op.decay_bias)?,
            lengths: [length(1.0 / dim), length(1.0 / dim.sqrt())],
            output_norm: self.norm(&op.output_norm)?,
        })
    }

    pub(super) fn resolve(&self, op: &Op) -> Result<Resolved<K::Matrix>, DeviceError> {
        Ok(match op {
            Op::Embed(op) => Resolved::Embed(self.matrix(op.table, 1)?, op.factor),
            Op::Qkv(op) => Resolved::Qkv(Qkv {
                layer: op.layer,
                norm: self.norm_if(op.norm)?,
                weight: self.matrix(op.weight, if op.gate { 4 } else { 3 })?,
                bias: self.vector_if(op.bias)?,
                query: op.heads * op.head_dim,
                kv: op.kv_heads * op.head_dim,
                gate: op.gate,
                norms: match &op.norms {
                    Some(norms) => Some([self.norm(&norms.query)?, self.norm(&norms.key)?]),
                    None => None,
                },
                rope: self.rope(op.rope)?,
            }),
            Op::Latent(op) => Resolved::Latent(Latent {
                op: *op,
                norm: self.norm_if(op.norm)?,
                down: self.matrix(op.weight, 3)?,
                query: match &op.query {
                    Some(program::LatentQuery { norm, weight }) => Some((self.norm(norm)?, self.matrix(*weight, 1)?)),
                    None => None,
                },
                kv_norm: self.norm(&op.kv_norm)?,
                keys: self.matrix(op.keys, op.heads)?,
                rope: self.rope(op.rope)?,
            }),
            Op::Expand(op) => Resolved::Expand(Expand {
                weight: self.matrix(op.weight, op.heads)?,
                heads: op.heads,
                rank: op.weight.k,
                value: op.weight.n / op.heads,
            }),
            Op::Attend(op) => Resolved::Attend(Attend { op: *op, sinks: self.vector_if(op.sinks)? }),
            Op::Out(op) => Resolved::Out(self.projection(op)?),
            Op::GateUp(op) => Resolved::GateUp(GateUp {
                norm: self.norm_if(op.norm)?,
                weight: self.matrix(op.weight, 2)?,
                activation: op.activation,
                ffn: op.weight.n / 2,
            }),
            Op::Down(op) => Resolved::Down(self.projection(op)?),
            Op::Experts(op) => Resolved::Experts(Experts {
                norm: self.norm_if(op.norm)?,
                weights: [
                    self.matrix(op.router, 1)?,
                    self.matrix(op.gate_up, 2 * op.router.n)?,
                    self.matrix(op.down, op.router.n)?,
                ],
                shared: match op.shared {
                    Some(program::SharedExpert { gate_up, down, .. }) => {
                        Some([self.matrix(gate_up, 2)?, self.matrix(down, 1)?])
                    }
                    None => None,
                },
                choice_bias: self.vector_if(op.choice_bias)?,
                biases: match op.biases {
                    Some(program::ExpertBiases { router, gate_up, down }) => {
                        Some([self.vector(router)?, self.vector(gate_up)?, self.vector(down)?])
                    }
                    None => None,
                },
                op: *op,
            }),
            Op::Select => Resolved::Select,
            Op::Gate => Resolved::Gate,
            Op::GatedDelta(op) => Resolved::GatedDelta(self.gated_delta(op)?),
            Op::Head(op) => Resolved::Head(Head {
                norm: self.norm(&op.norm)?,
                weight: self.matrix(op.weight, 1)?,
                factor: op.factor,
                soft_cap: op.soft_cap,
            }),
            Op::Sample => Resolved::Sample,
        })
    }
}

impl Norm {
    pub(super) fn of(&self) -> NormOf<'_> {
        NormOf { gain: &self.gain, eps: self.eps }
    }
}

impl Attend {
    pub(super) fn of(&self) -> Scores<'_> {
        let program::Attend { scale, window, soft_cap, .. } = self.op;
        Scores { scale, window: window.map(|tokens| tokens as usize), soft_cap, sinks: self.sinks.as_deref() }
    }
}

impl<M> Projection<M> {
    pub(super) fn of(&self, role: Role, rows: usize) -> ProjectOf<'_> {
        let norm = self.norm.as_ref().map(Norm::of);
        let bias = self.bias.as_deref();
        ProjectOf { role, partitions: self.partitions, rows, bias, norm, factor: self.factor }
    }
}

impl<M> GateUp<M> {
    pub(super) fn of(&self, rows: usize) -> GateUpOf<'_> {
        GateUpOf { norm: self.norm.as_ref().map(Norm::of), activation: self.activation, rows }
    }
}

impl<M> Experts<M> {
    pub(super) fn of(&self, rows: usize) -> ExpertsOf<'_> {
        let program::Experts { router, down, partitions, choice, shared, activation, factor, .. } = self.op;
        let norm = self.norm.as_ref().map(Norm::of);
        let biases = self.biases.as_ref().map(|biases| biases.each_ref().map(Vec::as_slice));
        let (experts, ffn) = (router.n, down.k);
        let choice = ChoiceOf { of: choice, bias: self.choice_bias.as_deref() };
        let shared = shared.map(|shared| [shared.down.k, shared.partitions]);
        ExpertsOf { norm, experts, ffn, choice, shared, activation, partitions, biases, factor, rows }
    }

    pub(super) fn matrices(&self) -> ExpertMatrices<'_, M> {
        let [router, gate_up, down] = self.weights.each_ref().map(|weight| weight.matrix());
        let shared = self.shared.as_ref().map(|weights| weights.each_ref().map(|weight| weight.matrix()));
        ExpertMatrices { router, gate_up, down, shared }
    }
}

impl<M> Latent<M> {
    pub(super) fn of(&self) -> LatentOf<'_> {
        LatentOf {
            norm: self.norm.as_ref().map(Norm::of),
            query_norm: self.query.as_ref().map(|(norm, _)| norm.of()),
            kv_norm: self.kv_norm.of(),
            heads: self.op.heads,
            plain: self.op.keys.k,
            rope: &self.rope,
        }
    }

    pub(super) fn matrices(&self) -> LatentMatrices<'_, M> {
        let query = self.query.as_ref().map(|(_, weight)| weight.matrix());
        LatentMatrices { down: self.down.matrix(), query, keys: self.keys.matrix() }
    }
}

impl<M> GatedDelta<M> {
    pub(super) fn of(&self) -> DeltaOf<'_> {
        let program::GatedDelta { key_heads, value_heads, key_dim, value_dim, .. } = self.op;
        DeltaOf {
            norm: self.norm.as_ref().map(Norm::of),
            heads: DeltaHeads { key_heads, value_heads, key_dim, value_dim },
            conv: &self.conv,
            rates: &self.rates,
            decay_bias: &self.decay_bias,
            lengths: self.lengths.each_ref().map(Norm::of),
            output_norm: self.output_norm.of(),
        }
    }
}

impl<M> Qkv<M> {
    pub(super) fn of(&self) -> QkvOf<'_> {
        QkvOf {
            norm: self.norm.as_ref().map(Norm::of),
            bias: self.bias.as_deref(),
            query: self.query,
            kv: self.kv,
            gate: self.gate,
            norms: self.norms.as_ref().map(|norms| norms.each_ref().map(Norm::of)),
            rope: &self.rope,
        }
    }
}
