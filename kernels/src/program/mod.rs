//! The forward pass of a decoder as a typed list of fused operations.
//!
//! An operation reads and replaces the activations of a step: the *residual* stream `[rows, hidden]`, *query* `[rows, heads * head_dim]`,
//! *attended* (as query), *inner* `[rows, ffn]` and *logits* `[logit rows, vocab]`. Only the residual stream lives from layer to layer.
//!
//! Rounding. Every intermediate value is f32, rounded as the canonical order of its operation says, wherever the backend keeps it; the input
//! of each matrix is rounded as the numerics class says; KV is rounded to the types of its planes. So a backend may fuse what it likes: no
//! fusion changes a bit.

pub(crate) mod check;
mod delta;

use crate::device::{Rope, Weight};
pub use delta::{GatedDelta, TAPS_MAX};

/// RMSNorm of the residual stream, or of heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// `[1, cols]`
    pub gain: Weight,
    /// Added to the mean square.
    pub eps: f32,
}

/// Norms of query and key, before rotation: of each head, or of all heads of a token together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryKeyNorms {
    /// Gain `[1, head_dim]` for every query head, or `[1, heads * head_dim]` for all of them.
    pub query: Norm,
    /// Gain `[1, head_dim]` for every key head, or `[1, kv_heads * head_dim]` for all of them.
    pub key: Norm,
}

/// The token's row of a table: `residual = factor * table[id]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Embed {
    /// `[vocab, hidden]`
    pub table: Weight,
    /// Of every element, widened to f32.
    pub factor: f32,
}

impl Embed {
    /// The rows as they are.
    pub fn plain(table: Weight) -> Self {
        Self { table, factor: 1.0 }
    }
}

/// Norm, the three input projections, rotation, and the store of keys and values: `residual -> query, KV`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Qkv {
    /// The layer, as reported to the observer. The pool's layout names its group.
    pub layer: u32,
    /// Of the residual stream; `None`: it is projected as it is.
    pub norm: Option<Norm>,
    /// Query, key and value as three parts; the gate, if there is one, is a fourth, as high as the query's.
    pub weight: Weight,
    /// `[1, n]`, added to the projections.
    pub bias: Option<Weight>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Applied after the bias.
    pub norms: Option<QueryKeyNorms>,
    /// Rotates query and key.
    pub rope: Rope,
    /// Whether there is a gate of each query head, of which [`Op::Gate`] is made.
    pub gate: bool,
}

/// Norm, the projections of latent attention (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434), rotation, and the store of latents:
/// `residual -> query, KV`.
///
/// With `h = norm(residual)`, the compressed query `c_q = h * w_0^T` is, or becomes by `query`, the queries of all heads, each of elements that
/// stay and `rope.dim` that are rotated behind them. A head's first ones are multiplied with its part of `keys`, so that a query is `[rank]` and
/// the rotated elements. What is stored of a token is `kv_norm(h * w_1^T)`, of `rank` elements, and `h * w_2^T`, rotated. All heads attend to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// The layer, as reported to the observer. The pool's layout names its group.
    pub layer: u32,
    /// Of the residual stream; `None`: it is projected as it is.
    pub norm: Option<Norm>,
    /// Query or compressed query, compressed keys and values `[rank, hidden]`, and the key's rotated part `[rope.dim, hidden]`, as three parts.
    pub weight: Weight,
    /// The compressed query's norm and matrix, if it is compressed.
    pub query: Option<LatentQuery>,
    /// Of the compressed keys and values, `[1, rank]`.
    pub kv_norm: Norm,
    /// Keys out of latents, transposed: `[rank, plain elements of a head]` for each head.
    pub keys: Weight,
    /// Query heads.
    pub heads: usize,
    /// Rotates the last elements of each query, and the key's.
    pub rope: Rope,
}

/// See [`Latent`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentQuery {
    /// `[1, query rank]`
    pub norm: Norm,
    /// `[heads * (plain elements + rope.dim), query rank]`
    pub weight: Weight,
}

impl Latent {
    /// Elements of compressed keys and values.
    pub fn rank(&self) -> usize {
        self.kv_norm.gain.k
    }

    /// Elements that are stored of a token, and of a head's query.
    pub fn dim(&self) -> usize {
        self.rank() + self.rope.dim
    }

    /// Elements of all heads' queries before they are multiplied with [`Latent::keys`].
    pub(crate) fn query_columns(&self) -> usize {
        self.heads * (self.keys.k + self.rope.dim)
    }
}

/// Values out of latents, after the attention of a [`Latent`]: `attended -> attended`, `[rank]` to a value for each head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expand {
    /// `[elements of a value, rank]` for each head.
    pub weight: Weight,
    /// Query heads.
    pub heads: usize,
}

/// Causal attention over the pool: `query -> attended`. The row at position `p` attends to positions up to `p`. After a [`Latent`], values are the
/// first `rank` elements of what is stored, and `attended` has these of each head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attend {
    /// The layer, whose KV the operation before has stored.
    pub layer: u32,
    /// Factor of the scores.
    pub scale: f32,
    /// Positions that a row attends to, its own included; `None`: all.
    pub window: Option<u32>,
    /// Bound of the scores: `cap * tanh(score / cap)`, after [`Attend::scale`] and before the softmax.
    pub soft_cap: Option<f32>,
    /// `[1, heads]`: a score of each query head that joins its softmax, and has no value.
    pub sinks: Option<Weight>,
}

/// A projection that is added to the residual stream: `residual += factor * norm(x * w^T + bias)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Project {
    /// `[hidden, k]`
    pub weight: Weight,
    /// Contiguous parts of K, merged in a fixed binary tree (tensor parallelism).
    pub partitions: usize,
    /// `[1, hidden]`, added to the products.
    pub bias: Option<Weight>,
    /// Of the products of a row.
    pub norm: Option<Norm>,
    /// Of what is added.
    pub factor: f32,
}

impl Project {
    /// Adds the products as they are, of K in one piece.
    pub fn plain(weight: Weight) -> Self {
        Self { weight, partitions: 1, bias: None, norm: None, factor: 1.0 }
    }
}

/// The function of an MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`, the approximation of GELU (Hendrycks and Gimpel, arXiv:1606.08415).
    GeluTanh,
    /// `x / (1 + exp(-(alpha * x)))` of the gate, at most `limit`; one is added to `up`, bounded by `limit` on both sides, before the two are
    /// multiplied (gpt-oss).
    ClampedSwiglu {
        /// Factor of the gate in the sigmoid.
        alpha: f32,
        /// Positive.
        limit: f32,
    },
}

/// Norm, gate and up projection, and activation: `residual -> inner`, `inner = activation(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateUp {
    /// Of the residual stream; `None`: it is projected as it is.
    pub norm: Option<Norm>,
    /// Gate and up as two parts of equal height.
    pub weight: Weight,
    /// Of the gate.
    pub activation: Activation,
}

/// A layer's experts in place of its MLP: `residual += factor * sum_e p_e * expert_e(h)` over the experts that are used for a row, with
/// `h = norm(residual)` and `expert_e(h) = (activation(h * gate_e^T) * (h * up_e^T)) * down_e^T`.
///
/// The router's logits are `h * router^T`. Where there are biases, each is added to its matrix's products. [`Choice`] says which experts are used
/// and what `p` is. If there is a shared expert, all rows use it, and its products are added to that
/// sum, before [`Experts::factor`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Of the residual stream; `None`: it is taken as it is.
    pub norm: Option<Norm>,
    /// `[experts, hidden]`
    pub router: Weight,
    /// Gate and up of each expert, two parts for each, all of equal height.
    pub gate_up: Weight,
    /// `[hidden, ffn]` of each expert, one part for each.
    pub down: Weight,
    /// Of router, gates and ups, and downs: all or none.
    pub biases: Option<ExpertBiases>,
    /// Of the K of `down`, see [`Project`].
    pub partitions: usize,
    /// Which experts are used for a row, and their shares.
    pub choice: Choice,
    /// Added to the scores by which experts are chosen, `[1, experts]`; their shares have no part of it.
    pub choice_bias: Option<Weight>,
    /// The expert that all rows use.
    pub shared: Option<SharedExpert>,
    /// Of the gates.
    pub activation: Activation,
    /// Of what is added.
    pub factor: f32,
}

/// Which experts a row uses, and their shares. Of equal scores, those of lower numbers come first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Experts used for a row.
    pub used: usize,
    /// What makes scores of the router's logits.
    pub scoring: Scoring,
    /// Only experts of some groups may be used.
    pub groups: Option<ExpertGroups>,
    /// Whether the scores of the experts used are divided by their sum.
    pub renormalize: bool,
    /// Of each share.
    pub factor: f32,
}

impl Choice {
    /// A softmax over all experts.
    pub fn softmax(used: usize, renormalize: bool) -> Self {
        Self { used, scoring: Scoring::Softmax, groups: None, renormalize, factor: 1.0 }
    }
}

/// Scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The softmax over all experts. Experts are chosen by their logits.
    Softmax,
    /// `1 / (1 + exp(-logit))`
    Sigmoid,
}

/// Groups of neighbouring experts, all of equal size, those of the largest scores of which are chosen first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are.
    pub count: usize,
    /// How many are chosen.
    pub used: usize,
    /// How many of a group's largest scores add up to its own: 1 or 2.
    pub best: usize,
}

/// The expert that all rows use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpert {
    /// Gate and up as two parts of equal height.
    pub gate_up: Weight,
    /// `[hidden, ffn]`
    pub down: Weight,
    /// Of the K of `down`, see [`Project`].
    pub partitions: usize,
}

/// Biases of experts and of their router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertBiases {
    /// `[1, experts]`
    pub router: Weight,
    /// `[1, 2 * experts * ffn]`: of gate and up of each expert, as the parts of [`Experts::gate_up`].
    pub gate_up: Weight,
    /// `[1, experts * hidden]`
    pub down: Weight,
}

/// Norm and output matrix: `residual -> logits`, `logits = soft_cap(factor * (norm(residual) * w^T))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// Of the residual stream.
    pub norm: Norm,
    /// `[vocab, hidden]`
    pub weight: Weight,
    /// Of every logit.
    pub factor: f32,
    /// Bound of the logits: `cap * tanh(logit / cap)`, after the factor.
    pub soft_cap: Option<f32>,
}

impl Head {
    /// The logits as they are.
    pub fn plain(norm: Norm, weight: Weight) -> Self {
        Self { norm, weight, factor: 1.0, soft_cap: None }
    }
}

/// One fused operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// See [`Embed`].
    Embed(Embed),
    /// See [`Qkv`].
    Qkv(Qkv),
    /// See [`Latent`].
    Latent(Latent),
    /// See [`Attend`].
    Attend(Attend),
    /// See [`Expand`].
    Expand(Expand),
    /// The gate of attention's output: `attended = attended * sigmoid(gate)`, of the gate that the layer's [`Qkv`] has projected.
    Gate,
    /// See [`GatedDelta`].
    GatedDelta(GatedDelta),
    /// Output of attention or of a gated delta rule, of `x = attended`: see [`Project`].
    Out(Project),
    /// See [`GateUp`].
    GateUp(GateUp),
    /// Output of the MLP, of `x = inner`: see [`Project`].
    Down(Project),
    /// See [`Experts`].
    Experts(Experts),
    /// Keeps only the rows whose logits are needed ([`selected_rows`](crate::step::StepInput::selected_rows)): residual stream, and query and gate or, after
    /// a [`GatedDelta`], what it attended. After the last layer's KV is stored, nothing mixes rows but attention over the pool, so the other rows are
    /// not needed. A state needs them all. A step without such rows ends here.
    Select,
    /// See [`Head`].
    Head(Head),
    /// The next token of each row that samples, by the order of [`crate::sampling`]: `logits -> tokens`. The only operation that waits for
    /// masks.
    Sample,
}

impl Op {
    /// The layer whose KV or state it stores.
    pub(crate) fn stores(&self) -> Option<u32> {
        match self {
            Self::Qkv(op) => Some(op.layer),
            Self::Latent(op) => Some(op.layer),
            Self::GatedDelta(op) => Some(op.layer),
            _ => None,
        }
    }
}

/// A forward pass. The operations are run in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The operations: `Embed`; for each layer `Qkv`, `Attend`, `Out` (`Gate` before it, if there is a gate), or `Latent`, `Attend`, `Expand`, `Out`, or `GatedDelta`, `Out`,
    /// and `GateUp`, `Down` or `Experts`; `Select` before the last layer's `Attend` or after its `GatedDelta`; `Head`, `Sample`.
    pub ops: Vec<Op>,
}
