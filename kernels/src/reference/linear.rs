//! GEMM in the canonical order.

use crate::host::Store;

/// `out = x * w^T`, each element by `dot` of two rows of `k` elements.
pub(crate) fn linear<X, W>(
    x: &[X],
    w: &[W],
    k: usize,
    n: usize,
    store: Store,
    out: &mut [f32],
    dot: impl Fn(&[X], &[W]) -> f32,
) {
    for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (w, out) in w.chunks_exact(k).zip(out) {
            let total = dot(x, w);
            *out = match store {
                Store::Set => total,
                Store::Add => *out + total,
            };
        }
    }
}

/// The dot product of `f32fma`: slabs in order inside a partition, partitions in a binary tree. The canonical slab has
/// [`crate::numerics::K_SLAB`] products.
pub(crate) fn dot(x: &[f32], w: &[f32], partitions: usize, slab: usize) -> f32 {
    if partitions > 1 {
        let (mid, each) = (x.len() / 2, partitions / 2);
        return dot(&x[..mid], &w[..mid], each, slab) + dot(&x[mid..], &w[mid..], each, slab);
    }
    in_slabs(x, w, slab, |x, w| x.iter().zip(w).fold(0.0f32, |acc, (x, w)| x.mul_add(*w, acc)))
}

/// Sums of slabs by `dot`, added in order.
pub(crate) fn in_slabs<X, W>(x: &[X], w: &[W], slab: usize, dot: impl Fn(&[X], &[W]) -> f32) -> f32 {
    let sums = x.chunks(slab).zip(w.chunks(slab)).map(|(x, w)| dot(x, w));
    sums.reduce(|total, sum| total + sum).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_the_written_one() {
        // 2^24 absorbs each single 1 that is added to it, but not two that were added to each other first.
        const BIG: f32 = 16_777_216.0;
        for (x, partitions, slab, want) in [
            ([BIG, 1.0, 1.0, 1.0], 1, 4, BIG),       // one chain
            ([BIG, 0.0, 1.0, 1.0], 1, 2, BIG + 2.0), // slab sums are added
            ([BIG, 1.0, 1.0, 0.0], 1, 1, BIG),       // in order
            ([BIG, 1.0, 1.0, 1.0], 4, 4, BIG + 2.0), // (p0+p1) + (p2+p3)
            ([1.0, 1.0, BIG, 1.0], 4, 4, BIG + 2.0),
        ] {
            assert_eq!(dot(&x, &[1.0; 4], partitions, slab), want, "{x:?} in {partitions} partitions, slabs of {slab}");
        }
    }
}
