//! The shape rules of every operation, checked at enqueue by all backends.

use crate::kv::KvBinding;
use crate::numerics::PARTITIONS_MAX;
use crate::ops::{OpsError, Plan, RopeTable, Tensor, Weight};
use baton_types::BlockId;

type Check = Result<(), OpsError>;

fn require(op: &'static str, holds: bool, message: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(OpsError::Shape { op, message: message() }) }
}

fn rows_fit(op: &'static str, tensor: Tensor, rows: usize) -> Check {
    require(op, rows <= tensor.rows_max, || format!("{rows} rows of a tensor of {}", tensor.rows_max))
}

fn cols_are(op: &'static str, what: &str, tensor: Tensor, cols: usize) -> Check {
    require(op, tensor.cols == cols, || format!("{what} has {} columns, {cols} expected", tensor.cols))
}

fn distinct(op: &'static str, a: Tensor, b: Tensor) -> Check {
    require(op, a.id != b.id, || "input and output are the same tensor".into())
}

pub(crate) fn prepare(name: &str, n: usize, k: usize, len: usize) -> Check {
    require("prepare", n > 0 && k > 0 && n.checked_mul(k) == Some(len), || {
        format!("{name}: {len} elements for a [{n}, {k}] weight")
    })
}

pub(crate) fn alloc(rows_max: usize, cols: usize) -> Check {
    require("alloc", rows_max > 0 && cols > 0 && rows_max.checked_mul(cols).is_some(), || {
        format!("a tensor cannot be [{rows_max}, {cols}]")
    })
}

pub(crate) fn rope_table(table: &RopeTable) -> Check {
    let half = table.dim / 2;
    let fits = half > 0
        && table.dim.is_multiple_of(2)
        && table.cos.len() == table.sin.len()
        && table.cos.len().is_multiple_of(half);
    require("upload_rope", fits, || {
        format!("{} cosines and {} sines for dim {}", table.cos.len(), table.sin.len(), table.dim)
    })
}

pub(crate) fn plan(plan: &Plan) -> Check {
    require("plan", plan.segments.iter().all(|s| s.rows > 0), || "a segment has no rows".into())
}

pub(crate) fn upload(tensor: Tensor, len: usize) -> Check {
    require("upload", len.is_multiple_of(tensor.cols), || format!("{len} elements in rows of {}", tensor.cols))?;
    rows_fit("upload", tensor, len / tensor.cols)
}

pub(crate) fn download(tensor: Tensor, rows: usize, len: usize) -> Check {
    rows_fit("download", tensor, rows)?;
    require("download", len == rows * tensor.cols, || format!("a buffer of {len} for {rows} rows of {}", tensor.cols))
}

pub(crate) fn embed(table: Weight, ids: &[u32], out: Tensor, rows: usize) -> Check {
    let op = "embed";
    rows_fit(op, out, rows)?;
    cols_are(op, "out", out, table.k)?;
    require(op, rows <= ids.len(), || format!("{rows} rows of {} uploaded ids", ids.len()))?;
    let stranger = ids[..rows].iter().find(|&&id| id as usize >= table.n);
    require(op, stranger.is_none(), || format!("token {} of a vocabulary of {}", stranger.unwrap_or(&0), table.n))
}

pub(crate) fn rms_norm(x: Tensor, gain: Weight, out: Tensor, rows: usize) -> Check {
    let op = "rms_norm";
    distinct(op, x, out)?;
    rows_fit(op, x, rows)?;
    rows_fit(op, out, rows)?;
    cols_are(op, "out", out, x.cols)?;
    require(op, gain.n == 1, || format!("the gain is [{}, {}], not a vector", gain.n, gain.k))?;
    cols_are(op, "x", x, gain.k)
}

pub(crate) fn linear(x: Tensor, w: Weight, partitions: usize, out: Tensor, rows: usize) -> Check {
    let op = "linear";
    distinct(op, x, out)?;
    rows_fit(op, x, rows)?;
    rows_fit(op, out, rows)?;
    cols_are(op, "x", x, w.k)?;
    cols_are(op, "out", out, w.n)?;
    require(op, partitions.is_power_of_two() && partitions <= PARTITIONS_MAX && w.k.is_multiple_of(partitions), || {
        format!("{partitions} partitions of {} inputs; a power of two up to {PARTITIONS_MAX} that divides them", w.k)
    })
}

fn heads(op: &'static str, kv: &KvBinding, layer: usize, plan: &Plan, q: Tensor) -> Check {
    rows_fit(op, q, plan.rows())?;
    require(op, layer < kv.layers(), || format!("layer {layer} of a group of {}", kv.layers()))?;
    let shared = kv.heads() * kv.dim();
    require(op, q.cols.is_multiple_of(shared), || format!("q has {} columns, not a multiple of {shared}", q.cols))
}

pub(crate) fn rope_store(
    kv: &KvBinding,
    layer: usize,
    plan: &Plan,
    rope: &RopeTable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Check {
    let op = "rope_store";
    heads(op, kv, layer, plan, q)?;
    for (name, tensor) in [("k", k), ("v", v)] {
        rows_fit(op, tensor, plan.rows())?;
        cols_are(op, name, tensor, kv.heads() * kv.dim())?;
    }
    require(op, q.id != k.id && k.id != v.id && q.id != v.id, || "q, k and v share a tensor".into())?;
    require(op, rope.dim <= kv.dim(), || format!("rope of {} in heads of {}", rope.dim, kv.dim()))?;
    let positions = rope.cos.len() / (rope.dim / 2);
    let last = plan.segments.iter().map(|s| s.position + s.rows).max().unwrap_or(0);
    require(op, last <= positions, || format!("{last} positions, the rope table has {positions}"))
}

pub(crate) fn attend(kv: &KvBinding, layer: usize, plan: &Plan, q: Tensor, out: Tensor) -> Check {
    let op = "attend";
    heads(op, kv, layer, plan, q)?;
    distinct(op, q, out)?;
    rows_fit(op, out, plan.rows())?;
    cols_are(op, "out", out, q.cols)
}

pub(crate) fn copy_kv(kv: &KvBinding, from: BlockId, to: BlockId, tokens: usize) -> Check {
    let op = "copy_kv";
    require(op, from != to, || format!("block {from} onto itself"))?;
    require(op, from.0.max(to.0) < kv.map.blocks(), || format!("{from} to {to} in a pool of {}", kv.map.blocks()))?;
    require(op, (1..=kv.block_tokens()).contains(&tokens), || format!("{tokens} tokens of {}", kv.block_tokens()))
}

pub(crate) fn silu_mul(gate: Tensor, up: Tensor, rows: usize) -> Check {
    let op = "silu_mul";
    distinct(op, gate, up)?;
    rows_fit(op, gate, rows)?;
    rows_fit(op, up, rows)?;
    cols_are(op, "up", up, gate.cols)
}

pub(crate) fn gather_rows(x: Tensor, rows: &[usize], out: Tensor) -> Check {
    let op = "gather_rows";
    distinct(op, x, out)?;
    rows_fit(op, out, rows.len())?;
    cols_are(op, "out", out, x.cols)?;
    require(op, rows.iter().all(|&r| r < x.rows_max), || format!("rows {rows:?} of a tensor of {}", x.rows_max))
}
