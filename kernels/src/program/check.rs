//! The rules of a program: the order of its operations, and shapes that fit each other, the bounds and the pool.

use super::{
    Activation, Choice, ExpertBiases, ExpertGroups, Experts, Head, Latent, LatentQuery, Norm, Op, Program, Project,
    Qkv, QueryKeyNorms, Scoring, SharedExpert,
};
use crate::device::{Bounds, DeviceError, Weight};
use crate::kv::{GroupLayout, PoolLayout, Stored};
use crate::numerics::PARTITIONS_MAX;
use baton_types::{BlockId, GroupKind};

/// Columns of the activations of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) vocab: usize,
    /// Residual stream.
    pub(crate) hidden: usize,
    /// Query, attended, and values out of latents, in the widest layer.
    pub(crate) query: usize,
    /// Gate of attention's output, in the widest layer that has one.
    pub(crate) gate: usize,
    /// Key, and value, in the widest layer.
    pub(crate) kv: usize,
    /// Gate, up and inner, in the widest layer.
    pub(crate) ffn: usize,
}

pub(super) type Check = Result<(), DeviceError>;

pub(super) fn require(op: &'static str, holds: bool, message: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(DeviceError::Shape { op, message: message() }) }
}

/// What the next operation may be.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Embed,
    /// The next layer, or the head.
    Qkv,
    Attend,
    Expand,
    Gate,
    /// Or the selection of rows, if a gated delta rule is before it.
    Out,
    GateUp,
    Down,
    Sample,
    Nothing,
}

impl Program {
    /// Checks order and shapes; returns the columns of the activations.
    pub(crate) fn check(&self, bounds: &Bounds) -> Result<Sizes, DeviceError> {
        for (name, bound) in [
            ("rows_max", bounds.rows_max),
            ("logit_rows_max", bounds.logit_rows_max),
            ("slots_max", bounds.slots_max),
            ("positions_max", bounds.positions_max),
        ] {
            require("compile", bound > 0, || format!("{name} is 0"))?;
        }
        bounds.adapters.check()?;
        let mut sizes = Sizes::default();
        let (mut expected, mut selected, mut layer) = (Expected::Embed, false, 0);
        // Query heads, and columns of query and inner, of the current layer.
        let (mut heads, mut query, mut inner) = (0, 0, 0);
        // Rank of the current layer's latents, if it stores some.
        let mut rank = None;
        // Whether it has a gate of attention's output, and whether it is a gated delta rule.
        let (mut gate, mut recurrent) = (false, false);
        for op in &self.ops {
            expected = match (op, expected) {
                (Op::Embed(op), Expected::Embed) => {
                    factor("embed", op.factor)?;
                    sizes.hidden = op.table.k;
                    sizes.vocab = op.table.n;
                    Expected::Qkv
                }
                (Op::Qkv(op), Expected::Qkv) if !selected => {
                    require("qkv", op.layer == layer, || format!("layer {} follows layer {layer}", op.layer))?;
                    layer += 1;
                    op.check(sizes.hidden, bounds)?;
                    (heads, query, rank) = (op.heads, op.heads * op.head_dim, None);
                    (gate, recurrent) = (op.gate, false);
                    sizes.query = sizes.query.max(query);
                    sizes.gate = sizes.gate.max(if gate { query } else { 0 });
                    sizes.kv = sizes.kv.max(op.kv_heads * op.head_dim);
                    Expected::Attend
                }
                (Op::Latent(op), Expected::Qkv) if !selected => {
                    require("latent", op.layer == layer, || format!("layer {} follows layer {layer}", op.layer))?;
                    layer += 1;
                    op.check(sizes.hidden, bounds)?;
                    (heads, rank) = (op.heads, Some(op.rank()));
                    (gate, recurrent) = (false, false);
                    sizes.query = sizes.query.max(op.heads * op.dim());
                    Expected::Attend
                }
                (Op::GatedDelta(op), Expected::Qkv) if !selected => {
                    require("gated_delta", op.layer == layer, || format!("layer {} follows layer {layer}", op.layer))?;
                    layer += 1;
                    op.check(sizes.hidden)?;
                    query = op.value_heads * op.value_dim;
                    sizes.query = sizes.query.max(query);
                    recurrent = true;
                    Expected::Out
                }
                (Op::Select, Expected::Attend) if !selected => {
                    selected = true;
                    Expected::Attend
                }
                (Op::Select, Expected::Out) if !selected && recurrent => {
                    selected = true;
                    Expected::Out
                }
                (Op::Attend(op), Expected::Attend) => {
                    let same = op.layer + 1 == layer;
                    require("attend", same, || format!("layer {} after the KV of layer {}", op.layer, layer - 1))?;
                    require("attend", op.window != Some(0), || "a window of 0 tokens".into())?;
                    soft_cap("attend", op.soft_cap)?;
                    vector("attend", op.sinks, heads)?;
                    match (rank, gate) {
                        (Some(_), _) => Expected::Expand,
                        (None, true) => Expected::Gate,
                        (None, false) => Expected::Out,
                    }
                }
                (Op::Gate, Expected::Gate) => Expected::Out,
                (Op::Expand(op), Expected::Expand) => {
                    let (rank, n) = (rank.unwrap_or_default(), op.weight.n);
                    require("expand", op.heads == heads && n.is_multiple_of(heads), || {
                        format!("{n} rows for {} heads, the layer has {heads}", op.heads)
                    })?;
                    matrix("expand", op.weight, n, rank)?;
                    query = n;
                    sizes.query = sizes.query.max(n);
                    Expected::Out
                }
                (Op::Out(op), Expected::Out) => {
                    op.check("out", query, sizes.hidden)?;
                    Expected::GateUp
                }
                (Op::GateUp(op), Expected::GateUp) => {
                    op.norm.map_or(Ok(()), |norm| norm.check("gate_up", sizes.hidden))?;
                    matrix("gate_up", op.weight, op.weight.n, sizes.hidden)?;
                    let n = op.weight.n;
                    require("gate_up", n.is_multiple_of(2), || format!("gate and up have {n} rows together"))?;
                    activation("gate_up", op.activation)?;
                    inner = n / 2;
                    sizes.ffn = sizes.ffn.max(inner);
                    Expected::Down
                }
                (Op::Down(op), Expected::Down) => {
                    op.check("down", inner, sizes.hidden)?;
                    Expected::Qkv
                }
                (Op::Experts(op), Expected::GateUp) => {
                    op.check(sizes.hidden)?;
                    Expected::Qkv
                }
                (Op::Head(op), Expected::Qkv) if selected => {
                    op.check(&sizes)?;
                    Expected::Sample
                }
                (Op::Sample, Expected::Sample) => Expected::Nothing,
                (op, expected) => {
                    let message = format!("{op:?} where {expected:?} is expected");
                    return Err(DeviceError::Shape { op: "compile", message });
                }
            };
        }
        require("compile", expected == Expected::Nothing, || {
            format!("the program ends where {expected:?} is expected")
        })?;
        Ok(sizes)
    }

    /// Layers that it stores KV or states of.
    pub(crate) fn layers(&self) -> u32 {
        self.ops.iter().filter(|op| op.stores().is_some()).count() as u32
    }

    /// Checks that each layer's group has the heads that the program stores, and keeps what it attends to.
    pub(crate) fn check_pool(&self, pool: &PoolLayout) -> Check {
        for op in &self.ops {
            match op {
                Op::Attend(op) => {
                    let GroupKind::Window(held) = pool.of_layer(op.layer).kind() else { continue };
                    let fits = op.window.is_some_and(|window| window <= held);
                    require("bind", fits, || {
                        format!("the pool keeps {held} tokens, layer {} has a window of {:?}", op.layer, op.window)
                    })?;
                }
                Op::Qkv(op) => stored(pool, op.layer, Stored::Heads { heads: op.kv_heads, dim: op.head_dim })?,
                Op::Latent(op) => stored(pool, op.layer, Stored::Latent { dim: op.dim() })?,
                Op::GatedDelta(op) => stored(pool, op.layer, op.stored())?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Checks that a layer's group has planes for what it stores.
fn stored(pool: &PoolLayout, layer: u32, ours: Stored) -> Check {
    let theirs = pool.of_layer(layer).stored();
    require("bind", ours == theirs, || format!("{theirs} in the pool, the model has {ours}"))
}

pub(super) fn matrix(op: &'static str, weight: Weight, n: usize, k: usize) -> Check {
    require(op, (weight.n, weight.k) == (n, k), || {
        format!("a weight of [{}, {}], [{n}, {k}] expected", weight.n, weight.k)
    })
}

/// A vector that need not be there.
fn vector(op: &'static str, weight: Option<Weight>, cols: usize) -> Check {
    weight.map_or(Ok(()), |weight| matrix(op, weight, 1, cols))
}

fn activation(op: &'static str, activation: Activation) -> Check {
    let Activation::ClampedSwiglu { alpha, limit } = activation else { return Ok(()) };
    let positive = |x: f32| x.is_finite() && x > 0.0;
    require(op, positive(alpha) && positive(limit), || format!("{activation:?}"))
}

impl Norm {
    pub(super) fn check(&self, op: &'static str, cols: usize) -> Check {
        matrix(op, self.gain, 1, cols)
    }
}

fn factor(op: &'static str, factor: f32) -> Check {
    require(op, factor.is_finite(), || format!("a factor of {factor}"))
}

fn soft_cap(op: &'static str, cap: Option<f32>) -> Check {
    require(op, cap.is_none_or(|cap| cap > 0.0 && cap.is_finite()), || format!("a soft cap of {cap:?}"))
}

impl Head {
    fn check(&self, sizes: &Sizes) -> Check {
        self.norm.check("head", sizes.hidden)?;
        matrix("head", self.weight, sizes.vocab, sizes.hidden)?;
        factor("head", self.factor)?;
        soft_cap("head", self.soft_cap)
    }
}

impl Experts {
    fn check(&self, hidden: usize) -> Check {
        let op = "experts";
        let Self { router, gate_up, down, choice, partitions, .. } = *self;
        self.norm.map_or(Ok(()), |norm| norm.check(op, hidden))?;
        let (experts, ffn) = (router.n, down.k);
        choice.check(experts)?;
        vector(op, self.choice_bias, experts)?;
        matrix(op, router, experts, hidden)?;
        matrix(op, gate_up, 2 * experts * ffn, hidden)?;
        matrix(op, down, experts * hidden, ffn)?;
        if let Some(ExpertBiases { router, gate_up, down }) = self.biases {
            matrix(op, router, 1, experts)?;
            matrix(op, gate_up, 1, 2 * experts * ffn)?;
            matrix(op, down, 1, experts * hidden)?;
        }
        if let Some(SharedExpert { gate_up, down, partitions }) = self.shared {
            matrix(op, gate_up, 2 * down.k, hidden)?;
            matrix(op, down, hidden, down.k)?;
            check_partitions(op, partitions, down.k)?;
        }
        activation(op, self.activation)?;
        check_partitions(op, partitions, ffn)?;
        factor(op, self.factor)
    }
}

impl Choice {
    fn check(&self, experts: usize) -> Check {
        let (op, used) = ("experts", self.used);
        require(op, experts > 0 && (1..=experts).contains(&used), || format!("{used} experts used of {experts}"))?;
        factor(op, self.factor)?;
        let Some(ExpertGroups { count, used, best }) = self.groups else { return Ok(()) };
        let fits = count > 0 && experts.is_multiple_of(count) && (1..=count).contains(&used);
        // Of a softmax, scores are compared by their logits, whose sum says nothing.
        let best_max = if self.scoring == Scoring::Softmax { 1 } else { 2 };
        require(op, fits && (1..=best_max).contains(&best) && best <= experts / count, || {
            format!("{used} of {count} groups of {experts} experts, by the best {best} of each")
        })?;
        require(op, self.used <= used * (experts / count), || {
            format!("{} experts used of {used} groups of {}", self.used, experts / count)
        })
    }
}

fn check_partitions(op: &'static str, parts: usize, input: usize) -> Check {
    require(op, parts.is_power_of_two() && parts <= PARTITIONS_MAX && input.is_multiple_of(parts), || {
        format!("{parts} partitions of {input} inputs; a power of two up to {PARTITIONS_MAX} that divides them")
    })
}

impl Project {
    fn check(&self, op: &'static str, input: usize, hidden: usize) -> Check {
        matrix(op, self.weight, hidden, input)?;
        vector(op, self.bias, hidden)?;
        self.norm.map_or(Ok(()), |norm| norm.check(op, hidden))?;
        factor(op, self.factor)?;
        check_partitions(op, self.partitions, input)
    }
}

impl Qkv {
    fn check(&self, hidden: usize, bounds: &Bounds) -> Check {
        let op = "qkv";
        let Self { heads, kv_heads, head_dim, rope, .. } = *self;
        self.norm.map_or(Ok(()), |norm| norm.check(op, hidden))?;
        require(op, head_dim > 0 && kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} heads of {head_dim} over {kv_heads} key/value heads")
        })?;
        let gate = if self.gate { heads } else { 0 };
        let n = (heads + 2 * kv_heads + gate) * head_dim;
        matrix(op, self.weight, n, hidden)?;
        vector(op, self.bias, n)?;
        if let Some(QueryKeyNorms { query, key }) = self.norms {
            // Of each head, or of all.
            let of_all = query.gain.k != head_dim || key.gain.k != head_dim;
            query.check(op, if of_all { heads * head_dim } else { head_dim })?;
            key.check(op, if of_all { kv_heads * head_dim } else { head_dim })?;
        }
        require(op, rope.dim <= head_dim, || format!("rope of {} in heads of {head_dim}", rope.dim))?;
        let positions = bounds.positions_max;
        require(op, positions <= rope.positions, || {
            format!("{positions} positions, the rope table has {}", rope.positions)
        })
    }
}

impl Latent {
    fn check(&self, hidden: usize, bounds: &Bounds) -> Check {
        let op = "latent";
        let Self { heads, rope, weight, keys, .. } = *self;
        let (rank, plain) = (self.rank(), keys.k);
        self.norm.map_or(Ok(()), |norm| norm.check(op, hidden))?;
        self.kv_norm.check(op, rank)?;
        require(op, heads > 0 && rank > 0 && plain > 0, || format!("{heads} heads of {plain}, latents of {rank}"))?;
        let first = match self.query {
            Some(LatentQuery { norm, weight }) => {
                norm.check(op, weight.k)?;
                matrix(op, weight, self.query_columns(), weight.k)?;
                weight.k
            }
            None => self.query_columns(),
        };
        matrix(op, weight, first + self.dim(), hidden)?;
        matrix(op, keys, heads * rank, plain)?;
        let positions = bounds.positions_max;
        require(op, positions <= rope.positions, || {
            format!("{positions} positions, the rope table has {}", rope.positions)
        })
    }
}

/// Checks a copy within a group of the pool; returns the group's layout.
pub(crate) fn copy_kv(
    pool: &PoolLayout,
    group: usize,
    from: BlockId,
    to: BlockId,
    tokens: usize,
) -> Result<&GroupLayout, DeviceError> {
    let (op, groups) = ("copy_kv", pool.groups().len());
    require(op, group < groups, || format!("group {group} of {groups}"))?;
    let kv = &pool.groups()[group];
    require(op, !kv.is_state(), || {
        format!("group {group} has states: each is of all tokens before it, and no part is copied")
    })?;
    require(op, from != to, || format!("block {from} onto itself"))?;
    require(op, from.0.max(to.0) < kv.blocks(), || format!("{from} to {to} in a pool of {}", kv.blocks()))?;
    require(op, (1..=kv.block_tokens()).contains(&tokens), || format!("{tokens} tokens of {}", kv.block_tokens()))?;
    Ok(kv)
}

/// Checks a rotary table.
pub(crate) fn rope_table(table: &crate::device::RopeTable) -> Check {
    let half = table.dim / 2;
    let fits = half > 0
        && table.dim.is_multiple_of(2)
        && table.cos.len() == table.sin.len()
        && table.cos.len().is_multiple_of(half);
    require("load_rope", fits, || {
        format!("{} cosines and {} sines for dim {}", table.cos.len(), table.sin.len(), table.dim)
    })
}
