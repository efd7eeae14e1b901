//! Operations as [kernels](super::HostKernels) take them: all of an operation of a [program](crate::program) but its activations, with slices in place of
//! handles.

use crate::device::{Role, RopeTable};
use crate::program::{Activation, Choice};

/// Which part of a head is rotated: as many elements as the table has.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct RotatedHeads {
    /// Elements of a head.
    pub dim: usize,
    /// The first that is rotated.
    pub first: usize,
}

/// Products of heads, each with a part of a matrix: of `k` elements each, `n` products.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct HeadProducts {
    pub rows: usize,
    pub heads: usize,
    pub k: usize,
    pub n: usize,
    /// Elements of a head behind those `k`, which are copied behind the products.
    pub rest: usize,
}

impl HeadProducts {
    /// Elements of a row of `x`, and of `out`.
    pub(crate) fn columns(&self) -> [usize; 2] {
        [self.k, self.n].map(|elements| self.heads * (elements + self.rest))
    }
}

/// RMSNorm of rows or heads as long as `gain`.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct NormOf<'a> {
    pub gain: &'a [f32],
    pub eps: f32,
}

/// All of [`Qkv`](crate::program::Qkv) but its matrix.
#[derive(Clone, Copy, Debug)]
pub struct QkvOf<'a> {
    /// Of the residual stream.
    pub norm: Option<NormOf<'a>>,
    /// Of query, key, value and gate.
    pub bias: Option<&'a [f32]>,
    /// Columns of the query.
    pub query: usize,
    /// Columns of the key, and of the value.
    pub kv: usize,
    /// Whether there is a gate, of as many columns as the query.
    pub gate: bool,
    /// Of query and key.
    pub norms: Option<[NormOf<'a>; 2]>,
    /// Rotates query and key.
    pub rope: &'a RopeTable,
}

/// What `Out` or `Down` adds to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct ProjectOf<'a> {
    /// [`Role::Out`] or [`Role::Down`].
    pub role: Role,
    /// Of K, see [`Project`](crate::program::Project).
    pub partitions: usize,
    /// Rows of the step.
    pub rows: usize,
    /// Added to the products.
    pub bias: Option<&'a [f32]>,
    /// Of the products of a row.
    pub norm: Option<NormOf<'a>>,
    /// Of what is added.
    pub factor: f32,
}

impl ProjectOf<'_> {
    /// Whether products are added as they are.
    pub(crate) fn is_plain(&self) -> bool {
        self.bias.is_none() && self.norm.is_none() && self.factor == 1.0
    }
}

/// Which experts a row uses, and their shares: see [`Choice`](crate::program::Choice).
#[derive(Clone, Copy, Debug)]
pub struct ChoiceOf<'a> {
    /// All but the bias.
    pub of: Choice,
    /// Added to the scores by which experts are chosen.
    pub bias: Option<&'a [f32]>,
}

/// All of [`GateUp`](crate::program::GateUp) but its matrix.
#[derive(Clone, Copy, Debug)]
pub struct GateUpOf<'a> {
    /// Of the residual stream.
    pub norm: Option<NormOf<'a>>,
    /// Of the gate.
    pub activation: Activation,
    /// Rows of the step.
    pub rows: usize,
}

/// The matrices of [`Latent`](crate::program::Latent).
#[allow(missing_docs, reason = "the names of fields say it")]
pub struct LatentMatrices<'a, M> {
    /// Query or compressed query, compressed keys and values, and the rotated part of the key.
    pub down: &'a M,
    pub query: Option<&'a M>,
    pub keys: &'a M,
}

/// All of [`Latent`](crate::program::Latent) but its matrices.
#[derive(Clone, Copy, Debug)]
pub struct LatentOf<'a> {
    /// Of the residual stream.
    pub norm: Option<NormOf<'a>>,
    /// Of the compressed query, if there is one.
    pub query_norm: Option<NormOf<'a>>,
    /// Of the compressed keys and values.
    pub kv_norm: NormOf<'a>,
    /// Query heads.
    pub heads: usize,
    /// Elements of a head's query that are not rotated.
    pub plain: usize,
    /// Rotates the others, and the key's.
    pub rope: &'a RopeTable,
}

/// Sizes of the heads of a gated delta rule, see [`GatedDelta`](crate::program::GatedDelta).
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct DeltaHeads {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

/// All of [`GatedDelta`](crate::program::GatedDelta) but its matrix.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct DeltaOf<'a> {
    /// Of the residual stream.
    pub norm: Option<NormOf<'a>>,
    pub heads: DeltaHeads,
    /// `[taps, channels]`
    pub conv: &'a [f32],
    /// Of each value head: factor of the exponent, `exp(A_log)`.
    pub rates: &'a [f32],
    pub decay_bias: &'a [f32],
    /// Of a head's query and key.
    pub lengths: [NormOf<'a>; 2],
    /// Of a value head.
    pub output_norm: NormOf<'a>,
}

/// Rows of a gated delta rule.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRows<'a> {
    /// `[rows, key_heads * key_dim]`, of length `1 / sqrt(key_dim)`.
    pub query: &'a [f32],
    /// As the query, of length 1.
    pub key: &'a [f32],
    /// `[rows, value_heads * value_dim]`
    pub value: &'a [f32],
    /// `[rows, value_heads]`: what the state is multiplied by.
    pub decay: &'a [f32],
    /// `[rows, value_heads]`: how much of the difference to the value is stored.
    pub beta: &'a [f32],
}

/// The matrices of [`Experts`](crate::program::Experts).
#[allow(missing_docs, reason = "the names of fields say it")]
pub struct ExpertMatrices<'a, M> {
    pub router: &'a M,
    pub gate_up: &'a M,
    pub down: &'a M,
    /// Gate and up, and down, of the expert that all rows use.
    pub shared: Option<[&'a M; 2]>,
}

/// All of [`Experts`](crate::program::Experts) but its matrices.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsOf<'a> {
    /// Of the residual stream.
    pub norm: Option<NormOf<'a>>,
    /// How many there are.
    pub experts: usize,
    /// Columns of an expert's gate.
    pub ffn: usize,
    /// Which are used for a row, and their shares.
    pub choice: ChoiceOf<'a>,
    /// Columns of the gate of the expert that all rows use, and its partitions of K, if there is one.
    pub shared: Option<[usize; 2]>,
    /// Of the gates.
    pub activation: Activation,
    /// Of K of the down projections.
    pub partitions: usize,
    /// Of router, gates and ups, and downs, as in [`ExpertBiases`](crate::program::ExpertBiases).
    pub biases: Option<[&'a [f32]; 3]>,
    /// Of what is added.
    pub factor: f32,
    /// Rows of the step.
    pub rows: usize,
}
