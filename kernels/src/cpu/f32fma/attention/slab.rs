//! One or two queries against one widened KV slab: scores, weights, weighted values.
#![allow(clippy::needless_range_loop)] // Indices name rows, panels and vectors of the accumulators, in every loop alike.

use crate::cpu::simd::{LANES, Simd, exp};
use crate::numerics::ATTENTION_SLAB;
use std::ops::Range;

/// Scores or weights of a slab.
pub(super) type SlabScores = [f32; ATTENTION_SLAB];

/// Lane dot products of one query with the first `tokens` keys, rounded up to whole vectors.
///
/// # Safety
/// `q` has `stride` elements; `keys` has rows of `stride` for `tokens` rounded up to 8; `stride` is a multiple of 8.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(
    s: S,
    q: *const f32,
    keys: *const f32,
    stride: usize,
    tokens: usize,
    out: &mut SlabScores,
) {
    for j in (0..tokens).step_by(8) {
        let mut acc = [s.splat(0.0); 8];
        for d in (0..stride).step_by(LANES) {
            // SAFETY: rows j .. j + 8 are there, and d + 8 <= stride.
            unsafe {
                let q = s.load(q.add(d));
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc = s.fma(q, s.load(keys.add((j + t) * stride + d)), *acc);
                }
            }
        }
        // SAFETY: j + 8 <= 64.
        unsafe { s.store(out.as_mut_ptr().add(j), s.merge8(acc)) };
    }
}

/// [`scores`] of two queries, each key loaded once.
///
/// # Safety
/// As for [`scores`].
#[inline(always)]
pub(super) unsafe fn scores_of_two<S: Simd>(
    s: S,
    q: [*const f32; 2],
    keys: *const f32,
    stride: usize,
    tokens: usize,
    out: &mut [SlabScores; 2],
) {
    for j in (0..tokens).step_by(4) {
        let mut acc = [s.splat(0.0); 8];
        for d in (0..stride).step_by(LANES) {
            // SAFETY: rows j .. j + 4 are there, and d + 8 <= stride.
            unsafe {
                let (a, b) = (s.load(q[0].add(d)), s.load(q[1].add(d)));
                for t in 0..4 {
                    let key = s.load(keys.add((j + t) * stride + d));
                    acc[t] = s.fma(a, key, acc[t]);
                    acc[4 + t] = s.fma(b, key, acc[4 + t]);
                }
            }
        }
        let mut both = [0.0; LANES];
        // SAFETY: one vector.
        unsafe { s.store(both.as_mut_ptr(), s.merge8(acc)) };
        out[0][j..j + 4].copy_from_slice(&both[..4]);
        out[1][j..j + 4].copy_from_slice(&both[4..]);
    }
}

/// Turns raw dot products into weights, in place; returns the slab's maximum and sum. Weights outside of `tokens`, from 0 to the next whole
/// vector, are 0.
#[inline(always)]
pub(super) fn weigh<S: Simd>(s: S, scores: &mut SlabScores, tokens: Range<usize>, scale: f32) -> [f32; 2] {
    let padded = tokens.end.next_multiple_of(LANES);
    for x in &mut scores[tokens.clone()] {
        *x *= scale;
    }
    // Tokens that are not attended to: below every score, so the weight is exactly +0.
    scores[..tokens.start].fill(f32::NEG_INFINITY);
    scores[tokens.end..padded].fill(f32::NEG_INFINITY);
    let at = scores.as_mut_ptr();
    let mut max = s.splat(f32::NEG_INFINITY);
    for j in (0..padded).step_by(LANES) {
        // SAFETY: j + 8 <= padded <= 64, here and below.
        max = s.max(max, unsafe { s.load(at.add(j)) });
    }
    let max = s.max_lane(max);
    let mut sum = s.splat(0.0);
    for j in (0..padded).step_by(LANES) {
        // SAFETY: as above.
        unsafe {
            let e = exp(s, s.sub(s.load(at.add(j)), s.splat(max)));
            s.store(at.add(j), e);
            sum = s.add(sum, e);
        }
    }
    [max, s.merge(sum)]
}

/// `o[d] = fma(weight_j, value_j[d], o[d])` for `tokens`, in order, for `R` queries at once, and the first `elements` of values.
///
/// # Safety
/// `weights` have 64 elements, `values` rows of `stride` up to the end of `tokens`, `o` `elements`, a multiple of 8 up to `stride`.
#[inline(always)]
pub(super) unsafe fn weighted_values<S: Simd, const R: usize>(
    s: S,
    weights: [*const f32; R],
    values: *const f32,
    [stride, elements]: [usize; 2],
    tokens: Range<usize>,
    o: [*mut f32; R],
) {
    let mut d = 0;
    // SAFETY: every strip ends at or before `elements`.
    unsafe {
        while R == 1 && d + 8 * LANES <= elements {
            strip::<S, R, 8>(s, weights, values.add(d), stride, tokens.clone(), o.map(|o| o.add(d)));
            d += 8 * LANES;
        }
        while d + 4 * LANES <= elements {
            strip::<S, R, 4>(s, weights, values.add(d), stride, tokens.clone(), o.map(|o| o.add(d)));
            d += 4 * LANES;
        }
        while d < elements {
            strip::<S, R, 1>(s, weights, values.add(d), stride, tokens.clone(), o.map(|o| o.add(d)));
            d += LANES;
        }
    }
}

/// `V` vectors of the head dimension, in registers over all tokens.
#[inline(always)]
unsafe fn strip<S: Simd, const R: usize, const V: usize>(
    s: S,
    weights: [*const f32; R],
    values: *const f32,
    stride: usize,
    tokens: Range<usize>,
    o: [*mut f32; R],
) {
    let mut acc = [[s.splat(0.0); V]; R];
    // SAFETY: the caller's promise, for all accesses below.
    unsafe {
        for r in 0..R {
            for v in 0..V {
                acc[r][v] = s.load(o[r].add(v * LANES));
            }
        }
        for j in tokens {
            let mut weight = [s.splat(0.0); R];
            for r in 0..R {
                weight[r] = s.splat(*weights[r].add(j));
            }
            for v in 0..V {
                let value = s.load(values.add(j * stride + v * LANES));
                for r in 0..R {
                    acc[r][v] = s.fma(weight[r], value, acc[r][v]);
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                s.store(o[r].add(v * LANES), acc[r][v]);
            }
        }
    }
}
