//! States of softmax: of a split while its blocks pass by, and merged over splits.

use super::Rows;
use super::plan::{Heads, Item};
use super::work::Kernels;
use crate::numerics::{ATTENTION_SPLIT, EXP_LO, exp, join_sink};

/// Maximum and sum of a softmax state.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    pub(super) max: f32,
    pub(super) sum: f32,
}

impl Softmax {
    pub(super) const START: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Takes one more block, whose weights below the greater maximum `max` have this sum; returns the factor of what was before.
    pub(super) fn add(&mut self, max: f32, sum: f32) -> f32 {
        // Equal maxima differ by 0 (or are infinite, and the weights are NaN), and exp(0) = 1. Below EXP_LO it is 0, which takes some processors long
        // to compute.
        let below = self.max - max;
        let factor = if max == self.max {
            1.0
        } else if below < EXP_LO {
            0.0
        } else {
            exp(below)
        };
        *self = Self { max, sum: self.sum.mul_add(factor, sum) };
        factor
    }
}

/// Merges the state of the next split into the running one.
#[inline(always)]
pub(super) fn merge(o: &mut [f32], state: &mut Softmax, later: &[f32], part: Softmax) {
    let max = state.max.max(part.max);
    let (a, b) = (exp(state.max - max), exp(part.max - max));
    for (o, part) in o.iter_mut().zip(later) {
        *o = part.mul_add(b, *o * a);
    }
    *state = Softmax { max, sum: part.sum.mul_add(b, state.sum * a) };
}

/// Takes the sink of a query's head into the state of all its splits, divides by the sum and stores.
///
/// # Safety
/// The query's head lies in `out`, and nobody else stores it.
#[inline(always)]
pub(super) unsafe fn finish<K: Kernels>(
    rows: &Rows<'_>,
    heads: Heads,
    item: &Item,
    query: usize,
    o: &mut [f32],
    state: Softmax,
    out: *mut f32,
) {
    let mut sum = state.sum;
    if let Some(sink) = rows.scores.sink(heads.head(item, query)) {
        let [a, of_all] = join_sink(state.max, sum, sink);
        o.iter_mut().for_each(|o| *o *= a);
        sum = of_all;
    }
    // SAFETY: the caller's promise.
    K::finish(o, sum, unsafe {
        std::slice::from_raw_parts_mut(out.add(heads.offset_out(item, query)), heads.value_dim)
    });
}

/// Merges the splits of a divided item, in order, and finishes it. Inlined as [`super::work::run`].
///
/// # Safety
/// `states` are those of the item, `[query][split]`; the item's rows and heads lie in the output and nobody else uses them.
#[inline(always)]
pub(super) unsafe fn merge_item<K: Kernels>(
    rows: &Rows<'_>,
    heads: Heads,
    item: &Item,
    states: *mut f32,
    out: *mut f32,
) {
    let (size, padded) = (heads.state(), heads.value_padded);
    for query in 0..item.kv_heads.len() * heads.queries(item) {
        let position = item.position + heads.row(item, query);
        let first = rows.scores.first(position) / ATTENTION_SPLIT - item.splits.start;
        let end = (position + 1).div_ceil(ATTENTION_SPLIT) - item.splits.start;
        // SAFETY: the caller's promise.
        unsafe {
            let states = states.add(query * item.splits.len() * size);
            let states = std::slice::from_raw_parts_mut(states, item.splits.len() * size);
            let (running, later) = states[first * size..end * size].split_at_mut(size);
            let (o, softmax) = running.split_at_mut(padded);
            let mut state = Softmax { max: softmax[0], sum: softmax[1] };
            for part in later.chunks_exact(size) {
                merge(o, &mut state, &part[..padded], Softmax { max: part[padded], sum: part[padded + 1] });
            }
            finish::<K>(rows, heads, item, query, o, state, out);
        }
    }
}
