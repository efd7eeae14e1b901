//! The forward pass of a decoder as a typed list of fused operations.
//!
//! An operation reads and replaces the activations of a step: the *residual* stream `[rows, hidden]`, *query* `[rows, heads * head_dim]`,
//! *attended* (as query), *inner* `[rows, ffn]` and *logits* `[logit rows, vocab]`. Only the residual stream lives from layer to layer.
//!
//! Rounding. Every intermediate value is f32, rounded as the canonical order of its operation says, wherever the backend keeps it; the input
//! of each matrix is rounded as the numerics class says; KV is rounded to the types of its planes. So a backend may fuse what it likes: no
//! fusion changes a bit.

pub(crate) mod check;

use crate::device::{Rope, Weight};

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
    /// Query, key and value as three parts.
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
}

/// Causal attention over the pool: `query -> attended`. The row at position `p` attends to positions up to `p`.
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
/// The router's logits are `h * router^T`. Where there are biases, each is added to its matrix's products. The experts of the largest logits are used, of equal ones those with lower numbers; `p` is the softmax over
/// all experts.
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
    /// Experts used for a row.
    pub used: usize,
    /// Whether `p` of the experts used is divided by its sum.
    pub renormalize: bool,
    /// Of the gates.
    pub activation: Activation,
    /// Of what is added.
    pub factor: f32,
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
    /// See [`Attend`].
    Attend(Attend),
    /// Output of attention, of `x = attended`: see [`Project`].
    Out(Project),
    /// See [`GateUp`].
    GateUp(GateUp),
    /// Output of the MLP, of `x = inner`: see [`Project`].
    Down(Project),
    /// See [`Experts`].
    Experts(Experts),
    /// Keeps only the rows whose logits are needed ([`selected_rows`](crate::step::StepInput::selected_rows)): residual stream and query. After the last
    /// layer's KV is stored, nothing mixes rows but attention over the pool, so the other rows are not needed. A step without such rows
    /// ends here.
    Select,
    /// See [`Head`].
    Head(Head),
    /// The next token of each row that samples, by the order of [`crate::sampling`]: `logits -> tokens`. The only operation that waits for
    /// masks.
    Sample,
}

/// A forward pass. The operations are run in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The operations: `Embed`; for each layer `Qkv`, `Attend`, `Out`, and `GateUp`, `Down` or `Experts`; `Select` before the last layer's `Attend`; `Head`,
    /// `Sample`.
    pub ops: Vec<Op>,
}
