//! The microkernels of prefill and decode: R rows by P panels, every element in the canonical order.
#![allow(clippy::needless_range_loop)] // Indices name rows and panels of the accumulators, in every loop alike.

use super::vectors::{Vectors, Work};
use crate::cpu::f32fma::pack::{PANEL, Step};
use crate::host::Store;
use crate::numerics::{K_SLAB, PARTITIONS_MAX};

/// Levels of the tree of partition totals that can be pending at once, plus the one that is being summed.
const TREE: usize = PARTITIONS_MAX.ilog2() as usize + 1;

/// Sums of a tile: `[row][panel]`.
type Sums<F, const R: usize, const P: usize> = [[F; P]; R];

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

impl<W: Step, const R: usize, const P: usize> Work for Tile<'_, W, R, P> {
    #[inline(always)]
    fn call<V: Vectors>(self, vectors: V) {
        let k = self.panels[0].len();
        assert!(self.x.len() == R * k && self.panels.iter().all(|p| p.len() == k));
        // SAFETY: the lengths were just checked.
        let sums = unsafe { self.total(vectors, k) };
        self.put_all(vectors, &sums);
    }
}

impl<W: Step, const R: usize, const P: usize> Tile<'_, W, R, P> {
    /// The finished sums.
    ///
    /// # Safety
    /// `x` has `R * k` elements and every panel `k` steps; so below.
    #[inline(always)]
    unsafe fn total<V: Vectors>(&self, vectors: V, k: usize) -> Sums<V::F, R, P> {
        let part = k / self.partitions;
        // A binary counter: two totals of equally many partitions are merged at once, left plus right.
        let mut waiting = [[[vectors.zero(); P]; R]; TREE];
        let mut depth = 0;
        for done in 1..=self.partitions {
            // SAFETY: the partition ends at or before k.
            waiting[depth] = unsafe { self.partition(vectors, (done - 1) * part, part) };
            depth += 1;
            for _ in 0..done.trailing_zeros() {
                depth -= 1;
                waiting[depth - 1] = add(vectors, &waiting[depth - 1], &waiting[depth]);
            }
        }
        waiting[0]
    }

    /// Slab sums of one partition, in order.
    #[inline(always)]
    unsafe fn partition<V: Vectors>(&self, vectors: V, start: usize, len: usize) -> Sums<V::F, R, P> {
        // SAFETY: each slab lies within the partition, see `total`.
        let mut total = unsafe { self.slab(vectors, start, len.min(K_SLAB)) };
        let mut at = K_SLAB;
        while at < len {
            // SAFETY: as above.
            let sum = unsafe { self.slab(vectors, start + at, (len - at).min(K_SLAB)) };
            total = add(vectors, &total, &sum);
            at += K_SLAB;
        }
        total
    }

    /// Fused multiply-adds from +0, k ascending.
    #[inline(always)]
    unsafe fn slab<V: Vectors>(&self, vectors: V, start: usize, len: usize) -> Sums<V::F, R, P> {
        let mut acc = [[vectors.zero(); P]; R];
        let (mut k, end) = (start, start + len);
        // SAFETY: every step is below `end`.
        unsafe {
            // Two steps share a cache line of bf16. Tall tiles have no registers left for a second step and load the line twice.
            while R * P <= V::PAIRED_MAX && k + 2 <= end {
                self.prefetch(vectors, k);
                self.step(vectors, k, &mut acc);
                self.step(vectors, k + 1, &mut acc);
                k += 2;
            }
            while k < end {
                self.prefetch(vectors, k);
                self.step(vectors, k, &mut acc);
                k += 1;
            }
        }
        acc
    }

    /// Prefetches the same k of the next panels.
    #[inline(always)]
    fn prefetch<V: Vectors>(&self, vectors: V, k: usize) {
        if self.ahead > 0 {
            for panel in self.panels {
                vectors.prefetch(panel.as_ptr().wrapping_add(k + self.ahead));
                if R * P <= V::PAIRED_MAX && size_of::<W>() > 32 {
                    vectors.prefetch(panel.as_ptr().wrapping_add(k + 1 + self.ahead));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn step<V: Vectors>(&self, vectors: V, k: usize, acc: &mut Sums<V::F, R, P>) {
        for p in 0..P {
            // SAFETY: `k` is below the panel's steps.
            let w = unsafe { W::load(vectors, self.panels[p].as_ptr().add(k)) };
            for r in 0..R {
                // SAFETY: element k of row r, of R.
                let x = unsafe { *self.x.get_unchecked(r * self.panels[0].len() + k) };
                acc[r][p] = vectors.fma(x, w, acc[r][p]);
            }
        }
    }

    /// Stores or adds the sums; features beyond the row are dropped.
    #[inline(always)]
    fn put_all<V: Vectors>(&self, vectors: V, sums: &Sums<V::F, R, P>) {
        let Output { first, n, features } = self.output;
        for (r, row) in sums.iter().enumerate() {
            for (p, sum) in row.iter().enumerate() {
                let feature = p * PANEL;
                if feature >= features {
                    continue;
                }
                // SAFETY: `feature` lies in row r of the output, which belongs to this task.
                unsafe {
                    put(vectors, *sum, first.add(r * n + feature), (features - feature).min(PANEL), self.store);
                }
            }
        }
    }
}

#[inline(always)]
fn add<V: Vectors, const R: usize, const P: usize>(
    vectors: V,
    left: &Sums<V::F, R, P>,
    right: &Sums<V::F, R, P>,
) -> Sums<V::F, R, P> {
    let mut out = *left;
    for r in 0..R {
        for p in 0..P {
            out[r][p] = vectors.add(left[r][p], right[r][p]);
        }
    }
    out
}

/// # Safety
/// `to` is writable for `features` elements.
#[inline(always)]
unsafe fn put<V: Vectors>(vectors: V, sum: V::F, to: *mut f32, features: usize, store: Store) {
    // SAFETY: whole panels are stored directly to `to`; the end of a row is stored through a buffer of one panel.
    unsafe {
        if features == PANEL {
            let sum = if store == Store::Add { vectors.add(vectors.load(to), sum) } else { sum };
            return vectors.store(to, sum);
        }
        let mut buffer = [0.0f32; PANEL];
        vectors.store(buffer.as_mut_ptr(), sum);
        for (l, sum) in buffer.iter().enumerate().take(features) {
            let to = to.add(l);
            *to = if store == Store::Add { *to + sum } else { *sum };
        }
    }
}
