//! GEMM in the written order.

use super::Rows;
use crate::ops::Store;

/// `out = x * w^T` with slabs of `slab` products; the canonical length is [`crate::numerics::K_SLAB`].
pub(crate) fn linear(
    x: &[f32],
    w: &Rows,
    partitions: usize,
    slab: usize,
    store: Store,
    out: &mut [f32],
    rows: usize,
) {
    for m in 0..rows {
        for n in 0..w.n {
            let total = dot(&x[m * w.k..(m + 1) * w.k], &w.data[n * w.k..(n + 1) * w.k], partitions, slab);
            let to = &mut out[m * w.n + n];
            *to = match store {
                Store::Set => total,
                Store::Add => *to + total,
            };
        }
    }
}

/// One element: slabs in order inside a partition, partitions in a binary tree.
fn dot(x: &[f32], w: &[f32], partitions: usize, slab: usize) -> f32 {
    if partitions > 1 {
        let (mid, each) = (x.len() / 2, partitions / 2);
        return dot(&x[..mid], &w[..mid], each, slab) + dot(&x[mid..], &w[mid..], each, slab);
    }
    let slabs = x.chunks(slab).zip(w.chunks(slab));
    let sums = slabs.map(|(x, w)| x.iter().zip(w).fold(0.0f32, |acc, (x, w)| x.mul_add(*w, acc)));
    sums.reduce(|total, sum| total + sum).unwrap_or(0.0)
}
