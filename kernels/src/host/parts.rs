//! Operations of a program as their parts, one after another: the canonical order, literally.

use super::adapted::AdaptedLayer;
use super::{GateUpOf, HeadProducts, HostKernels, KvStep, NormOf, ProjectOf, QkvOf, Store, delta, latent};
use crate::adapter::Linear;
use crate::numerics::soft_cap;

/// What the parts of an operation hand to one another; the memory is reused.
#[derive(Debug, Default)]
pub struct Scratch<I> {
    pub(super) input: I,
    /// Rows after a norm.
    pub(super) normed: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    pub(super) up: Vec<f32>,
    /// Heads after their norm.
    heads: Vec<f32>,
    pub(super) latent: latent::Buffers,
    pub(super) delta: delta::Buffers,
    /// Products before they are added to the residual stream.
    pub(super) added: Vec<f32>,
    /// Rows of one expert, and its gate.
    pub(super) gathered: Vec<f32>,
    pub(super) gate: Vec<f32>,
}

/// The first `len` elements, whatever they are.
pub(super) fn room(data: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if data.len() < len {
        data.resize(len, 0.0);
    }
    &mut data[..len]
}

/// Adds a bias to all rows.
pub(super) fn add_bias(x: &mut [f32], bias: &[f32]) {
    x.chunks_exact_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
}

pub(crate) fn scale(x: &mut [f32], factor: f32) {
    if factor != 1.0 {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Inlined, for the vectors of the caller.
#[inline(always)]
pub(crate) fn finish_logits(logits: &mut [f32], factor: f32, cap: Option<f32>) {
    scale(logits, factor);
    if let Some(cap) = cap {
        logits.iter_mut().for_each(|x| *x = soft_cap(*x, cap));
    }
}

/// Rounds the rows of `residual`, normed if there is a norm, for products with `w`. Returns them as they were before they were rounded.
pub(super) fn normed_input<'a, K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    norm: Option<NormOf<'_>>,
    residual: &'a [f32],
    rows: usize,
    normed: &'a mut Vec<f32>,
    input: &mut K::Input,
) -> &'a [f32] {
    let x = match norm {
        Some(norm) => {
            let normed = room(normed, residual.len());
            kernels.rms_norm(residual, norm.gain, norm.eps, normed);
            normed
        }
        None => residual,
    };
    kernels.input(x, rows, w, input);
    x
}

/// Products of all rows of `x`, after a norm if there is one, with all parts of a matrix.
pub(crate) fn normed_linear<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    norm: Option<NormOf<'_>>,
    x: &[f32],
    rows: usize,
    outs: &mut [&mut [f32]],
    scratch: &mut Scratch<K::Input>,
) {
    normed_input(kernels, w, norm, x, rows, &mut scratch.normed, &mut scratch.input);
    kernels.linear(&scratch.input, w, 0, 1, Store::Set, outs);
}

#[allow(clippy::too_many_arguments, reason = "the operation's own, and which rows have an adapter")]
pub(crate) fn qkv<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    op: &QkvOf<'_>,
    step: KvStep<'_>,
    residual: &[f32],
    q: &mut [f32],
    gate: &mut [f32],
    scratch: &mut Scratch<K::Input>,
    adapted: Option<AdaptedLayer<'_>>,
) {
    let Scratch { input, normed, key, value, heads, .. } = scratch;
    let rows = step.rows();
    let normed = normed_input(kernels, w, op.norm, residual, rows, normed, input);
    let (k, v) = (room(key, rows * op.kv), room(value, rows * op.kv));
    match op.gate {
        true => kernels.linear(input, w, 0, 1, Store::Set, &mut [&mut *q, &mut *k, &mut *v, &mut *gate]),
        false => kernels.linear(input, w, 0, 1, Store::Set, &mut [&mut *q, &mut *k, &mut *v]),
    }
    if let Some(adapted) = adapted {
        for (linear, y) in [(Linear::Query, &mut *q), (Linear::Key, &mut *k), (Linear::Value, &mut *v)] {
            adapted.add(kernels, linear, normed, y);
        }
    }
    if let Some(bias) = op.bias {
        let (of_query, rest) = bias.split_at(op.query);
        let (of_key, rest) = rest.split_at(op.kv);
        let (of_value, of_gate) = rest.split_at(op.kv);
        for (x, bias) in [(&mut *q, of_query), (&mut *k, of_key), (&mut *v, of_value)] {
            add_bias(x, bias);
        }
        if op.gate {
            add_bias(gate, of_gate);
        }
    }
    [&mut *q, &mut *k, &mut *v, gate].into_iter().for_each(|x| kernels.numerics().round_products(x));
    if let Some([query, key]) = op.norms {
        for (x, norm) in [(&mut *q, query), (&mut *k, key)] {
            let heads = room(heads, x.len());
            kernels.rms_norm(x, norm.gain, norm.eps, heads);
            x.copy_from_slice(heads);
        }
    }
    kernels.rope_store(step, op.rope, q, k, v);
}

/// Products of the first `k` elements of each head with the part of the matrix that has the head's number; the other elements follow as they are.
/// `x` is `[rows, heads, k + rest]`, `out` `[rows, heads, n + rest]`.
pub(crate) fn by_head<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    of: HeadProducts,
    x: &[f32],
    out: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    let HeadProducts { rows, heads, k, n, rest } = of;
    let [columns, out_columns] = of.columns();
    let Scratch { input, gathered, gate, .. } = scratch;
    for head in 0..heads {
        let gathered = room(gathered, rows * k);
        for (row, to) in gathered.chunks_exact_mut(k).enumerate() {
            to.copy_from_slice(&x[row * columns + head * (k + rest)..][..k]);
        }
        kernels.input(gathered, rows, w, input);
        let products = room(gate, rows * n);
        kernels.linear(input, w, head, 1, Store::Set, &mut [&mut *products]);
        for (row, products) in products.chunks_exact(n).enumerate() {
            let to = &mut out[row * out_columns + head * (n + rest)..][..n + rest];
            to[..n].copy_from_slice(products);
            to[n..].copy_from_slice(&x[row * columns + head * (k + rest) + k..][..rest]);
        }
    }
}

pub(crate) fn project<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    op: &ProjectOf<'_>,
    x: &[f32],
    residual: &mut [f32],
    scratch: &mut Scratch<K::Input>,
    adapted: Option<(AdaptedLayer<'_>, Linear)>,
) {
    if let Some((adapted, linear)) = adapted.filter(|_| op.is_plain()) {
        kernels.project(w, op, x, residual, scratch);
        adapted.add(kernels, linear, x, residual);
        return;
    }
    let Scratch { input, normed, added, .. } = scratch;
    kernels.input(x, op.rows, w, input);
    if op.is_plain() {
        kernels.linear(input, w, 0, op.partitions, Store::Add, &mut [residual]);
        return;
    }
    let added = room(added, residual.len());
    kernels.linear(input, w, 0, op.partitions, Store::Set, &mut [&mut *added]);
    if let Some((adapted, linear)) = adapted {
        adapted.add(kernels, linear, x, added);
    }
    if let Some(bias) = op.bias {
        add_bias(added, bias);
    }
    kernels.numerics().round_products(added);
    match op.norm {
        Some(norm) => {
            let normed = room(normed, added.len());
            kernels.rms_norm(added, norm.gain, norm.eps, normed);
            kernels.add_scaled(normed, op.factor, residual);
        }
        None => kernels.add_scaled(added, op.factor, residual),
    }
}

pub(super) fn gate_up<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    op: &GateUpOf<'_>,
    residual: &[f32],
    inner: &mut [f32],
    scratch: &mut Scratch<K::Input>,
    adapted: Option<AdaptedLayer<'_>>,
) {
    let Scratch { input, normed, up, .. } = scratch;
    let normed = normed_input(kernels, w, op.norm, residual, op.rows, normed, input);
    let up = room(up, inner.len());
    kernels.linear(input, w, 0, 1, Store::Set, &mut [&mut *inner, &mut *up]);
    if let Some(adapted) = adapted {
        for (linear, y) in [(Linear::Gate, &mut *inner), (Linear::Up, &mut *up)] {
            adapted.add(kernels, linear, normed, y);
        }
    }
    [&mut *inner, &mut *up].into_iter().for_each(|x| kernels.numerics().round_products(x));
    kernels.activate(op.activation, inner, up);
}

pub(super) fn head<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    norm: NormOf<'_>,
    residual: &[f32],
    logits: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    let rows = residual.len() / norm.gain.len();
    normed_input(kernels, w, Some(norm), residual, rows, &mut scratch.normed, &mut scratch.input);
    kernels.linear(&scratch.input, w, 0, 1, Store::Set, &mut [logits]);
}
