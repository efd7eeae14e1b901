//! Softmax states of queries, and their arithmetic.

use super::super::step::LANES;
use crate::cpu::simd::{Pass, Wide};
use crate::host::Scores;
use crate::numerics::lanes::{self, merge};
use crate::numerics::{ATTENTION_BLOCK, exp2, join_sink_by_exp2};
use std::ops::Range;

/// A state within a split, but for its output.
#[derive(Clone)]
pub(super) struct Softmax {
    max: f32,
    sum: [f32; lanes::LANES],
}

impl Softmax {
    const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: [0.0; lanes::LANES] };
}

/// The state of whole splits, but for its output.
#[derive(Clone, Copy)]
struct Merged {
    max: f32,
    sum: f32,
}

/// States of all queries of a task.
pub(super) struct States {
    /// `None`: the query attends to nothing of this split so far.
    split: Vec<Option<Softmax>>,
    /// Outputs of the split: `[panel of elements][query]`.
    outputs: Vec<[f32; LANES]>,
    /// Of the splits before.
    merged: Vec<Option<Merged>>,
    merged_outputs: Vec<[f32; LANES]>,
}

impl States {
    pub(super) fn new(queries: usize, dim: usize) -> Self {
        let outputs = vec![[0.0; LANES]; queries * dim.div_ceil(LANES)];
        let (split, merged) = (vec![None; queries], vec![None; queries]);
        Self { split, merged_outputs: outputs.clone(), outputs, merged }
    }

    pub(super) fn softmax(&mut self, query: usize) -> &mut Softmax {
        self.split[query].get_or_insert(Softmax::EMPTY)
    }

    /// Multiplies the output of a query.
    pub(super) fn scale(&mut self, query: usize, factor: f32) {
        let queries = self.split.len();
        for output in self.outputs.iter_mut().skip(query).step_by(queries) {
            output.iter_mut().for_each(|o| *o *= factor);
        }
    }

    /// The outputs of some queries, of one panel.
    pub(super) fn outputs(&mut self, panel: usize, queries: Range<usize>) -> &mut [[f32; LANES]] {
        let all = self.split.len();
        &mut self.outputs[panel * all..(panel + 1) * all][queries]
    }

    /// Merges the split with those before it.
    pub(super) fn end_split(&mut self, factor: f32) -> EndSplit<'_> {
        EndSplit { states: self, factor }
    }

    /// Takes the sinks of `heads` into the states; queries are `[row][head]`.
    pub(super) fn join<'a>(&'a mut self, of: Scores<'a>, heads: Range<usize>, factor: f32) -> Join<'a> {
        Join { states: self, of, heads, factor }
    }

    /// The weighted means, `[query][dim]`.
    pub(super) fn results(&self, dim: usize) -> Vec<f32> {
        let (queries, mut results) = (self.merged.len(), Vec::with_capacity(self.merged.len() * dim));
        for (query, merged) in self.merged.iter().enumerate() {
            let r = merged.map_or(0.0, |merged| 1.0 / merged.sum);
            let outputs = self.merged_outputs.iter().skip(query).step_by(queries).flatten();
            results.extend(outputs.take(dim).map(|o| o * r));
        }
        results
    }
}

/// What values of a smaller maximum are multiplied with.
#[inline(always)]
fn decay(max: f32, of_all: f32, factor: f32) -> f32 {
    exp2((max - of_all) * factor)
}

/// The larger one; NaN if either is.
#[inline(always)]
fn max_or_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// Bounds the scores of a block.
pub(super) struct Cap<'a> {
    pub(super) of: Scores<'a>,
    pub(super) scores: &'a mut [f32; ATTENTION_BLOCK],
}

impl Pass for Cap<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, _: W) {
        self.of.cap_by_exp2(self.scores);
    }
}

/// Replaces the scores of a block by their weights, and adds these to the state. Returns what the output is multiplied with.
pub(super) struct Weigh<'a> {
    pub(super) softmax: &'a mut Softmax,
    pub(super) factor: f32,
    /// What the query attends to, counted in the block; not empty.
    pub(super) seen: Range<usize>,
    pub(super) scores: &'a mut [f32; ATTENTION_BLOCK],
}

impl Pass for Weigh<'_> {
    type Out = f32;

    #[inline(always)]
    fn call<W: Wide>(self, _: W) -> f32 {
        let Self { softmax: Softmax { max, sum }, factor, seen, scores } = self;
        let mut tops = [*max; LANES];
        for (i, s) in scores.iter().enumerate() {
            let s = if seen.start <= i && i < seen.end { *s } else { f32::NEG_INFINITY };
            tops[i % LANES] = max_or_nan(tops[i % LANES], s);
        }
        let mut top = tops[0];
        for other in tops {
            top = max_or_nan(top, other);
        }
        let a = decay(*max, top, factor);
        let offset = -(top * factor);
        for (i, s) in scores.iter_mut().enumerate() {
            let w = exp2(s.mul_add(factor, offset));
            *s = if seen.start <= i && i < seen.end { w } else { 0.0 };
        }
        let (rows, _) = scores.as_chunks::<{ lanes::LANES }>();
        for i in 0..lanes::LANES {
            sum[i] = sum[i].mul_add(a, rows[0][i]);
        }
        for weights in &rows[1..] {
            for i in 0..lanes::LANES {
                sum[i] += weights[i];
            }
        }
        *max = top;
        a
    }
}

/// See [`States::join`].
pub(super) struct Join<'a> {
    states: &'a mut States,
    of: Scores<'a>,
    heads: Range<usize>,
    factor: f32,
}

impl Pass for Join<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, _: W) {
        let Self { states: States { merged, merged_outputs, .. }, of, heads, factor } = self;
        let queries = merged.len();
        for (query, merged) in merged.iter_mut().enumerate() {
            let (Some(merged), Some(sink)) = (merged, of.sink(heads.start + query % heads.len())) else { continue };
            let [a, sum] = join_sink_by_exp2(merged.max, factor, merged.sum, sink);
            merged.sum = sum;
            for output in merged_outputs.iter_mut().skip(query).step_by(queries) {
                output.iter_mut().for_each(|o| *o *= a);
            }
        }
    }
}

/// See [`States::end_split`].
pub(super) struct EndSplit<'a> {
    states: &'a mut States,
    factor: f32,
}

impl Pass for EndSplit<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, _: W) {
        let Self { states: States { split, outputs, merged, merged_outputs }, factor } = self;
        let queries = split.len();
        for query in 0..queries {
            let Some(Softmax { max, sum }) = split[query].take() else { continue };
            let later = Merged { max, sum: merge(sum) };
            let earlier = merged[query];
            let (mut a, mut b) = (1.0, 1.0);
            merged[query] = Some(match earlier {
                None => later,
                Some(earlier) => {
                    let max = max_or_nan(earlier.max, later.max);
                    a = decay(earlier.max, max, factor);
                    b = decay(later.max, max, factor);
                    Merged { max, sum: later.sum.mul_add(b, earlier.sum * a) }
                }
            });
            for at in (query..outputs.len()).step_by(queries) {
                let part = std::mem::replace(&mut outputs[at], [0.0; LANES]);
                let to = &mut merged_outputs[at];
                if earlier.is_none() {
                    *to = part;
                    continue;
                }
                for i in 0..LANES {
                    to[i] = part[i].mul_add(b, to[i] * a);
                }
            }
        }
    }
}
