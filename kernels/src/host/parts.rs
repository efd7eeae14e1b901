//! Operations of a program as their parts, one after another: the canonical order, literally.

use super::adapted::AdaptedLayer;
use super::{HostKernels, KvStep, NormOf, ProjectOf, QkvOf, Store};
use crate::adapter::Linear;

/// What the parts of an operation hand to one another; the memory is reused.
#[derive(Debug, Default)]
pub struct Scratch<I> {
    input: I,
    /// Rows after a norm.
    normed: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    up: Vec<f32>,
    /// Heads after their norm.
    heads: Vec<f32>,
}

/// The first `len` elements, whatever they are.
fn room(data: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if data.len() < len {
        data.resize(len, 0.0);
    }
    &mut data[..len]
}

/// Rounds the normed rows of `residual` for products with `w`.
fn normed_input<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    norm: NormOf<'_>,
    residual: &[f32],
    normed: &mut Vec<f32>,
    input: &mut K::Input,
) {
    let normed = room(normed, residual.len());
    kernels.rms_norm(residual, norm.gain, norm.eps, normed);
    kernels.input(normed, residual.len() / norm.gain.len(), w, input);
}

#[allow(clippy::too_many_arguments, reason = "the operation's own, and which rows have an adapter")]
pub(super) fn qkv<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    op: &QkvOf<'_>,
    step: KvStep<'_>,
    residual: &[f32],
    q: &mut [f32],
    scratch: &mut Scratch<K::Input>,
    adapted: Option<AdaptedLayer<'_>>,
) {
    let Scratch { input, normed, key, value, heads, .. } = scratch;
    normed_input(kernels, w, op.norm, residual, normed, input);
    let rows = step.rows();
    let (k, v) = (room(key, rows * op.kv), room(value, rows * op.kv));
    kernels.linear(input, w, 1, Store::Set, &mut [&mut *q, &mut *k, &mut *v]);
    if let Some(adapted) = adapted {
        for (linear, y) in [(Linear::Query, &mut *q), (Linear::Key, &mut *k), (Linear::Value, &mut *v)] {
            adapted.add(kernels, linear, normed, y);
        }
    }
    if let Some(bias) = op.bias {
        let (of_query, rest) = bias.split_at(op.query);
        let (of_key, of_value) = rest.split_at(op.kv);
        for (x, bias) in [(&mut *q, of_query), (&mut *k, of_key), (&mut *v, of_value)] {
            x.chunks_exact_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
        }
    }
    [&mut *q, &mut *k, &mut *v].into_iter().for_each(|x| kernels.numerics().round_products(x));
    if let Some([query, key]) = op.head_norms {
        for (x, norm) in [(&mut *q, query), (&mut *k, key)] {
            let heads = room(heads, x.len());
            kernels.rms_norm(x, norm.gain, norm.eps, heads);
            x.copy_from_slice(heads);
        }
    }
    kernels.rope_store(step, op.rope, q, k, v);
}

pub(super) fn project<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    op: &ProjectOf,
    x: &[f32],
    residual: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    kernels.input(x, op.rows, w, &mut scratch.input);
    kernels.linear(&scratch.input, w, op.partitions, Store::Add, &mut [residual]);
}

pub(super) fn gate_up<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    norm: NormOf<'_>,
    residual: &[f32],
    inner: &mut [f32],
    scratch: &mut Scratch<K::Input>,
    adapted: Option<AdaptedLayer<'_>>,
) {
    let Scratch { input, normed, up, .. } = scratch;
    normed_input(kernels, w, norm, residual, normed, input);
    let up = room(up, inner.len());
    kernels.linear(input, w, 1, Store::Set, &mut [&mut *inner, &mut *up]);
    if let Some(adapted) = adapted {
        for (linear, y) in [(Linear::Gate, &mut *inner), (Linear::Up, &mut *up)] {
            adapted.add(kernels, linear, normed, y);
        }
    }
    [&mut *inner, &mut *up].into_iter().for_each(|x| kernels.numerics().round_products(x));
    kernels.silu_mul(inner, up);
}

pub(super) fn head<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    norm: NormOf<'_>,
    residual: &[f32],
    logits: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    normed_input(kernels, w, norm, residual, &mut scratch.normed, &mut scratch.input);
    kernels.linear(&scratch.input, w, 1, Store::Set, &mut [logits]);
}
