//! A gated delta rule. The canonical order, literally: all kernels do it so.

use super::parts::{Scratch, room};
use super::{DeltaOf, DeltaRows, HostKernels, KvStep};
use crate::program::Activation;

/// What the parts of [`gated_delta`] hand to one another.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Products, then what the convolution made of them.
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    /// Query and key of unit lengths.
    normed: [Vec<f32>; 2],
    decay: Vec<f32>,
    beta: Vec<f32>,
    /// What the states made of queries, and these after their norm.
    out: Vec<f32>,
    out_normed: Vec<f32>,
}

/// The operation [`GatedDelta`](crate::program::GatedDelta), of all rows of `residual`.
pub(super) fn gated_delta<K: HostKernels>(
    kernels: &K,
    w: &K::Matrix,
    op: &DeltaOf<'_>,
    step: KvStep<'_>,
    residual: &[f32],
    attended: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    let (rows, heads) = (step.rows(), op.heads);
    let keys = rows * heads.key_heads * heads.key_dim;
    let values = rows * heads.value_heads * heads.value_dim;
    let mut buffers = std::mem::take(&mut scratch.delta);
    let Buffers { query, key, value, normed, decay, beta, out, out_normed } = &mut buffers;
    let (query, key, value) = (room(query, keys), room(key, keys), room(value, values));
    let (beta, decay) = (room(beta, rows * heads.value_heads), room(decay, rows * heads.value_heads));
    // The gate becomes what is attended.
    let outs = &mut [&mut *query, &mut *key, &mut *value, &mut *attended, &mut *beta, &mut *decay];
    kernels.normed_linear(w, op.norm, residual, rows, outs, scratch);
    outs.iter_mut().for_each(|out| kernels.numerics().round_products(out));
    kernels.convolve(step, op.conv, [&mut *query, &mut *key, &mut *value]);
    kernels.decays(op, decay, beta);
    let [query, key] = {
        let [first, second] = normed;
        let (to_query, to_key) = (room(first, keys), room(second, keys));
        let [of_query, of_key] = op.lengths;
        kernels.rms_norm(query, of_query.gain, of_query.eps, to_query);
        kernels.rms_norm(key, of_key.gain, of_key.eps, to_key);
        [to_query, to_key]
    };
    let (out, out_normed) = (room(out, values), room(out_normed, values));
    let of_rows = DeltaRows { query, key, value, decay, beta };
    kernels.delta_rule(step, heads, of_rows, out);
    kernels.rms_norm(out, op.output_norm.gain, op.output_norm.eps, out_normed);
    kernels.activate(Activation::Silu, attended, out_normed);
    scratch.delta = buffers;
}
