//! Projections of latent attention. The canonical order, literally: all kernels do it so.

use super::parts::{Scratch, normed_input, room};
use super::{HeadProducts, HostKernels, KvStep, LatentMatrices, LatentOf, RotatedHeads, Store};

/// The operation [`Latent`](crate::program::Latent), of all rows of `residual`.
pub(super) fn latent<K: HostKernels>(
    kernels: &K,
    matrices: &LatentMatrices<'_, K::Matrix>,
    op: &LatentOf<'_>,
    step: KvStep<'_>,
    residual: &[f32],
    query: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    let (rows, rank, rotated) = (step.rows(), op.kv_norm.gain.len(), op.rope.dim);
    let of_heads = op.heads * (op.plain + rotated);
    let round = |x: &mut [f32]| kernels.numerics().round_products(x);
    let mut queries = std::mem::take(&mut scratch.queries);
    let Scratch { input, normed, key, value, heads, up, .. } = scratch;
    normed_input(kernels, matrices.down, op.norm, residual, rows, normed, input);
    let first = op.query_norm.map_or(of_heads, |norm| norm.gain.len());
    let (q, compressed, key) =
        (room(&mut queries, rows * of_heads.max(first)), room(value, rows * rank), room(key, rows * rotated));
    let q = &mut q[..rows * first];
    kernels.linear(input, matrices.down, 0, 1, Store::Set, &mut [&mut *q, &mut *compressed, &mut *key]);
    [&mut *q, &mut *compressed, &mut *key].into_iter().for_each(round);
    if let (Some(w), Some(norm)) = (matrices.query, op.query_norm) {
        let normed = room(heads, rows * first);
        kernels.rms_norm(q, norm.gain, norm.eps, normed);
        kernels.input(normed, rows, w, input);
        let q = room(&mut queries, rows * of_heads);
        kernels.linear(input, w, 0, 1, Store::Set, &mut [&mut *q]);
        round(q);
    }
    let normed = room(heads, rows * rank);
    kernels.rms_norm(compressed, op.kv_norm.gain, op.kv_norm.eps, normed);
    let stored = room(up, rows * (rank + rotated));
    for ((stored, latent), key) in
        stored.chunks_exact_mut(rank + rotated).zip(normed.chunks_exact(rank)).zip(key.chunks_exact(rotated))
    {
        stored[..rank].copy_from_slice(latent);
        stored[rank..].copy_from_slice(key);
    }
    let part = RotatedHeads { dim: rank + rotated, first: rank };
    kernels.rotate(step, op.rope, part, stored);
    kernels.store(step, 0, stored);
    let products = HeadProducts { rows, heads: op.heads, k: op.plain, n: rank, rest: rotated };
    kernels.by_head(matrices.keys, products, &queries[..rows * of_heads], query, scratch);
    round(query);
    kernels.rotate(step, op.rope, part, query);
    scratch.queries = queries;
}
