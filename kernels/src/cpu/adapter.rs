//! Low-rank changes of linears: vectors along a row, rows divided among threads.

use super::simd::{Kernel, LANES, Simd};
use super::{CpuKernels, Shared};
use crate::adapter::{AdapterBounds, LowRank};

/// Adds the change to each row of `y`.
pub(super) fn adapt(kernels: &CpuKernels, x: &[f32], change: &LowRank, y: &mut [f32]) {
    let LowRank { k, n, .. } = *change;
    let rows = x.len() / k;
    assert!(x.len() == rows * k && y.len() == rows * n);
    let shared = Shared(y.as_mut_ptr());
    kernels.threads.run(rows, &|row| {
        // SAFETY: `y` has as many rows of `n`, and each is of one task.
        let y = unsafe { std::slice::from_raw_parts_mut(shared.get().add(row * n), n) };
        kernels.level.run(Adapt { x: &x[row * k..(row + 1) * k], change, y });
    });
}

/// One row.
struct Adapt<'a> {
    x: &'a [f32],
    change: &'a LowRank,
    y: &'a mut [f32],
}

impl Kernel for Adapt<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let LowRank { rank, k, n, a, b, scale } = self.change;
        let (rank, n, scale) = (*rank, *n, *scale);
        let mut down = [0.0f32; AdapterBounds::RANK_MAX];
        let down = &mut down[..rank];
        for (down, a) in down.iter_mut().zip(a.chunks_exact(*k)) {
            *down = s.merge(dot_lanes(s, self.x, a));
        }
        let whole = n / LANES * LANES;
        assert!(self.y.len() == n && b.len() == rank * n);
        for start in (0..whole).step_by(LANES) {
            let mut up = s.splat(0.0);
            for (j, down) in down.iter().enumerate() {
                // SAFETY: `start + LANES <= n`, and `b` has `rank` rows of `n`.
                up = s.fma(unsafe { s.load(b.as_ptr().add(j * n + start)) }, s.splat(*down), up);
            }
            let y = &mut self.y[start..start + LANES];
            // SAFETY: one vector.
            unsafe { s.store(y.as_mut_ptr(), s.add(s.load(y.as_ptr()), s.mul(s.splat(scale), up))) };
        }
        for (i, y) in self.y.iter_mut().enumerate().skip(whole) {
            let mut up = 0.0f32;
            for (j, down) in down.iter().enumerate() {
                up = b[j * n + i].mul_add(*down, up);
            }
            *y += scale * up;
        }
    }
}

/// Lanes of the dot product, the tail padded with zeros.
#[inline(always)]
fn dot_lanes<S: Simd>(s: S, a: &[f32], b: &[f32]) -> S::F {
    let mut acc = s.splat(0.0);
    let ((a_whole, a_tail), (b_whole, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_whole.iter().zip(b_whole) {
        // SAFETY: chunks are one vector each.
        acc = unsafe { s.fma(s.load(a.as_ptr()), s.load(b.as_ptr()), acc) };
    }
    if !a_tail.is_empty() {
        let mut padded = [[0.0; LANES]; 2];
        padded[0][..a_tail.len()].copy_from_slice(a_tail);
        padded[1][..b_tail.len()].copy_from_slice(b_tail);
        // SAFETY: as above.
        acc = unsafe { s.fma(s.load(padded[0].as_ptr()), s.load(padded[1].as_ptr()), acc) };
    }
    acc
}
