//! Projections of latent attention. The canonical order, literally: all kernels do it so.

use super::parts::{Scratch, room};
use super::{HeadProducts, HostKernels, KvStep, LatentMatrices, LatentOf, RotatedHeads};

/// What the parts of [`latent`] hand to one another.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Compressed queries, and queries before they are multiplied into the space of latents.
    compressed_queries: Vec<f32>,
    queries: Vec<f32>,
    /// Compressed keys and values, and these after their norm.
    compressed: Vec<f32>,
    normed: Vec<f32>,
    /// The key's rotated part.
    key: Vec<f32>,
    /// Both, as they are stored.
    stored: Vec<f32>,
}

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
    let dim = rank + rotated;
    let round = |x: &mut [f32]| kernels.numerics().round_products(x);
    let mut buffers = std::mem::take(&mut scratch.latent);
    let Buffers { compressed_queries, queries, compressed, normed, key, stored } = &mut buffers;
    let queries = room(queries, rows * op.heads * (op.plain + rotated));
    let (compressed, key) = (room(compressed, rows * rank), room(key, rows * rotated));
    match (matrices.query, op.query_norm) {
        (Some(w), Some(norm)) => {
            let first = room(compressed_queries, rows * norm.gain.len());
            let outs = &mut [&mut *first, &mut *compressed, &mut *key];
            kernels.normed_linear(matrices.down, op.norm, residual, rows, outs, scratch);
            round(first);
            kernels.normed_linear(w, Some(norm), first, rows, &mut [&mut *queries], scratch);
        }
        _ => {
            let outs = &mut [&mut *queries, &mut *compressed, &mut *key];
            kernels.normed_linear(matrices.down, op.norm, residual, rows, outs, scratch);
        }
    }
    [&mut *queries, &mut *compressed, &mut *key].into_iter().for_each(round);
    let normed = room(normed, rows * rank);
    kernels.rms_norm(compressed, op.kv_norm.gain, op.kv_norm.eps, normed);
    let stored = room(stored, rows * dim);
    for ((stored, latent), key) in
        stored.chunks_exact_mut(dim).zip(normed.chunks_exact(rank)).zip(key.chunks_exact(rotated))
    {
        stored[..rank].copy_from_slice(latent);
        stored[rank..].copy_from_slice(key);
    }
    let part = RotatedHeads { dim, first: rank };
    kernels.rotate(step, op.rope, part, stored);
    kernels.store(step, 0, stored);
    let products = HeadProducts { rows, heads: op.heads, k: op.plain, n: rank, rest: rotated };
    kernels.by_head(matrices.keys, products, queries, query, scratch);
    round(query);
    kernels.rotate(step, op.rope, part, query);
    scratch.latent = buffers;
}
