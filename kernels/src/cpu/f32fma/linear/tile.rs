//! The microkernels of prefill and decode: R rows by P panels, every element in the canonical order.
#![allow(clippy::needless_range_loop)] // Indices name rows, panels and vectors of the accumulators, in every loop alike.

use crate::cpu::f32fma::pack::{PANEL, Step};
use crate::cpu::simd::{Kernel, LANES, Simd};
use crate::host::Store;
use crate::numerics::{K_SLAB, PARTITIONS_MAX};

/// Levels of the tree of partition totals that can be pending at once, plus the one that is being summed.
const TREE: usize = PARTITIONS_MAX.ilog2() as usize + 1;

/// Sums of a tile: `[row][panel][half]`.
type Sums<F, const R: usize, const P: usize> = [[[F; 2]; P]; R];

/// One tile: a separate function, so that its accumulators have the registers to themselves.
pub(super) struct Tile<'a, W, const R: usize, const P: usize> {
    /// R rows, dense `[R, k]`.
    pub(super) x: &'a [f32],
    /// Panels of weights, `k` steps each.
    pub(super) panels: [&'a [W]; P],
    pub(super) partitions: usize,
    /// Number of steps to prefetch ahead; 0 prefetches nothing.
    pub(super) ahead: usize,
    pub(super) output: Output,
    pub(super) store: Store,
}

/// Destination of a tile: all of it is writable, and no other task touches it.
#[derive(Clone, Copy)]
pub(super) struct Output {
    /// Element of the first row and feature.
    pub(super) first: *mut f32,
    /// Features of a row.
    pub(super) n: usize,
    /// Features from `first` to the end of the row.
    pub(super) features: usize,
}

impl<W: Step, const R: usize, const P: usize> Kernel for Tile<'_, W, R, P> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, simd: S) {
        let k = self.panels[0].len();
        assert!(self.x.len() == R * k && self.panels.iter().all(|p| p.len() == k));
        // SAFETY: the lengths were just checked.
        let sums = unsafe { self.total(simd, k) };
        self.put_all(simd, &sums);
    }
}

impl<W: Step, const R: usize, const P: usize> Tile<'_, W, R, P> {
    /// The finished sums.
    ///
    /// # Safety
    /// `x` has `R * k` elements and every panel `k` steps; so below.
    #[inline(always)]
    unsafe fn total<S: Simd>(&self, simd: S, k: usize) -> Sums<S::F, R, P> {
        let part = k / self.partitions;
        // A binary counter: two totals of equally many partitions are merged at once, left plus right.
        let mut waiting = [[[[simd.splat(0.0); 2]; P]; R]; TREE];
        let mut depth = 0;
        for done in 1..=self.partitions {
            // SAFETY: the partition ends at or before k.
            waiting[depth] = unsafe { self.partition(simd, (done - 1) * part, part) };
            depth += 1;
            for _ in 0..done.trailing_zeros() {
                depth -= 1;
                waiting[depth - 1] = add(simd, &waiting[depth - 1], &waiting[depth]);
            }
        }
        waiting[0]
    }

    /// Slab sums of one partition, in order.
    #[inline(always)]
    unsafe fn partition<S: Simd>(&self, simd: S, start: usize, len: usize) -> Sums<S::F, R, P> {
        // SAFETY: each slab lies within the partition, see `total`.
        let mut total = unsafe { self.slab(simd, start, len.min(K_SLAB)) };
        let mut at = K_SLAB;
        while at < len {
            // SAFETY: as above.
            let sum = unsafe { self.slab(simd, start + at, (len - at).min(K_SLAB)) };
            total = add(simd, &total, &sum);
            at += K_SLAB;
        }
        total
    }

    /// Fused multiply-adds from +0, k ascending.
    #[inline(always)]
    unsafe fn slab<S: Simd>(&self, simd: S, start: usize, len: usize) -> Sums<S::F, R, P> {
        let mut acc = [[[simd.splat(0.0); 2]; P]; R];
        let (mut k, end) = (start, start + len);
        // SAFETY: every step is below `end`.
        unsafe {
            // Two steps share a cache line of bf16. Tall tiles have no registers left for a second step and load the line twice.
            while R * P <= 4 && k + 2 <= end {
                self.prefetch(simd, k);
                self.step(simd, k, &mut acc);
                self.step(simd, k + 1, &mut acc);
                k += 2;
            }
            while k < end {
                self.prefetch(simd, k);
                self.step(simd, k, &mut acc);
                k += 1;
            }
        }
        acc
    }

    /// Prefetches the same k of the next panels.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, k: usize) {
        if self.ahead > 0 {
            for panel in self.panels {
                simd.prefetch(panel.as_ptr().wrapping_add(k + self.ahead));
                if R * P <= 4 && size_of::<W>() > 32 {
                    simd.prefetch(panel.as_ptr().wrapping_add(k + 1 + self.ahead));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd>(&self, simd: S, k: usize, acc: &mut Sums<S::F, R, P>) {
        for p in 0..P {
            // SAFETY: `k` is below the panel's steps.
            let [low, high] = unsafe { W::load(simd, self.panels[p].as_ptr().add(k)) };
            for r in 0..R {
                // SAFETY: element k of row r, of R.
                let x = simd.splat(unsafe { *self.x.get_unchecked(r * self.panels[0].len() + k) });
                acc[r][p] = [simd.fma(x, low, acc[r][p][0]), simd.fma(x, high, acc[r][p][1])];
            }
        }
    }

    /// Stores or adds the sums; features beyond the row are dropped.
    #[inline(always)]
    fn put_all<S: Simd>(&self, simd: S, sums: &Sums<S::F, R, P>) {
        let Output { first, n, features } = self.output;
        for (r, row) in sums.iter().enumerate() {
            for (p, panel) in row.iter().enumerate() {
                for (h, sum) in panel.iter().enumerate() {
                    let feature = p * PANEL + h * LANES;
                    if feature >= features {
                        continue;
                    }
                    // SAFETY: `feature` lies in row r of the output, which belongs to this task.
                    unsafe {
                        put(simd, *sum, first.add(r * n + feature), (features - feature).min(LANES), self.store);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn add<S: Simd, const R: usize, const P: usize>(
    simd: S,
    left: &Sums<S::F, R, P>,
    right: &Sums<S::F, R, P>,
) -> Sums<S::F, R, P> {
    let mut out = *left;
    for r in 0..R {
        for p in 0..P {
            for h in 0..2 {
                out[r][p][h] = simd.add(left[r][p][h], right[r][p][h]);
            }
        }
    }
    out
}

/// # Safety
/// `to` is writable for `lanes` elements.
#[inline(always)]
unsafe fn put<S: Simd>(simd: S, sum: S::F, to: *mut f32, lanes: usize, store: Store) {
    // SAFETY: full vectors are stored directly to `to`; the end of a row is stored through a buffer of one vector.
    unsafe {
        if lanes == LANES {
            let sum = if store == Store::Add { simd.add(simd.load(to), sum) } else { sum };
            return simd.store(to, sum);
        }
        let mut buffer = [0.0f32; LANES];
        simd.store(buffer.as_mut_ptr(), sum);
        for (l, sum) in buffer.iter().enumerate().take(lanes) {
            let to = to.add(l);
            *to = if store == Store::Add { *to + sum } else { *sum };
        }
    }
}
