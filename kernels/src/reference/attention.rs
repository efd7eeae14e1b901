//! Paged attention in the canonical order.

use crate::host::{KvStep, Scores};
use crate::numerics::{exp, join_sink, lanes, round, soft_cap};
use crate::step::StepSegment;
use baton_types::BlockTable;
use std::ops::Range;

/// Stores rows of one plane (0: keys, 1: values), `[rows, kv_heads * dim]`, at their positions, rounded to the plane's type.
pub(crate) fn store(step: KvStep<'_>, plane: usize, data: &[f32]) {
    let pool = step.kv;
    let cols = pool.heads() * pool.dim();
    let (mut bytes, plane) = (Vec::new(), pool.planes()[plane]);
    let mut rows = data.chunks_exact(cols);
    for StepSegment { position, rows: count, table } in step.segments {
        for run in pool.runs(table, *position..position + count) {
            bytes.clear();
            rows.by_ref().take(run.tokens).for_each(|row| round::encode(pool.dtype(plane), row, &mut bytes));
            pool.memory.copy_in(pool.offset(step.layer, plane, run.block, run.token), &bytes);
        }
    }
}

/// Reads `tokens` of one plane, widened: `[tokens.end, kv_heads * dim]`, with zeros for those before. Blocks that left a window are not read.
pub(super) fn load(step: KvStep<'_>, plane: usize, table: &BlockTable, tokens: Range<usize>) -> Vec<f32> {
    let pool = step.kv;
    let cols = pool.heads() * pool.dim();
    let (mut out, mut bytes) = (vec![0.0; tokens.end * cols], Vec::new());
    let mut rest = &mut out[tokens.start * cols..];
    for run in pool.runs(table, tokens) {
        bytes.resize(run.tokens * pool.token_stride(plane), 0);
        pool.memory.copy_out(pool.offset(step.layer, plane, run.block, run.token), &mut bytes);
        let (now, later) = rest.split_at_mut(run.tokens * cols);
        round::decode(pool.dtype(plane), &bytes, now);
        rest = later;
    }
    out
}

/// Causal attention. `starts_slab(segment, token)` determines where slabs begin; canonically at every multiple of
/// [`crate::numerics::ATTENTION_SLAB`].
pub(crate) fn attend(
    step: KvStep<'_>,
    q: &[f32],
    scores: Scores<'_>,
    out: &mut [f32],
    starts_slab: impl Fn(&StepSegment, usize) -> bool,
) {
    let (dim, kv_cols) = (step.kv.dim(), step.kv.heads() * step.kv.dim());
    let cols = q.len() / step.rows();
    let (group, value_dim) = (cols / kv_cols, step.value_dim(q, out));
    let mut rows = q.chunks_exact(cols).zip(out.chunks_exact_mut(cols / dim * value_dim));
    for segment in step.segments {
        let tokens = scores.first(segment.position)..segment.position + segment.rows;
        let [k, v] = step.kv.planes().map(|plane| load(step, plane, &segment.table, tokens.clone()));
        for (i, (q, out)) in rows.by_ref().take(segment.rows).enumerate() {
            let (first, visible) = (scores.first(segment.position + i), segment.position + i + 1);
            let bounds: Vec<usize> =
                (first + 1..visible).filter(|&t| starts_slab(segment, t)).chain([visible]).collect();
            // Where the slab of the first token begins: its lanes count from there.
            let slab_of_first = (0..=first).rev().find(|&t| t == 0 || starts_slab(segment, t)).unwrap_or(0);
            for (head, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(value_dim)).enumerate() {
                let at = |t: usize| t * kv_cols + head / group * dim;
                let (mut start, mut origin, mut state) = (first, slab_of_first, None);
                for &end in &bounds {
                    let keys = (start..end).map(|t| &k[at(t)..at(t) + dim]);
                    let values = (start..end).map(|t| &v[at(t)..at(t) + value_dim]);
                    let slab = Partial::slab(q, keys, (value_dim, values), scores, start - origin);
                    state = Some(state.map_or_else(|| slab.clone(), |running: Partial| running.merge(&slab)));
                    (start, origin) = (end, end);
                }
                let Some(state) = state else { continue };
                let Partial { sum, o, .. } = match scores.sink(head) {
                    Some(sink) => state.join(sink),
                    None => state,
                };
                out.iter_mut().zip(o).for_each(|(out, o)| *out = o / sum);
            }
        }
    }
}

/// Softmax state over some tokens, not yet divided by its sum.
#[derive(Clone)]
struct Partial {
    max: f32,
    sum: f32,
    o: Vec<f32>,
}

impl Partial {
    /// The state of a slab without its first `left_out` tokens, whose weights count as zero. Values come with their length.
    fn slab<'a>(
        q: &[f32],
        keys: impl Iterator<Item = &'a [f32]>,
        (value_dim, values): (usize, impl Iterator<Item = &'a [f32]>),
        of: Scores<'_>,
        left_out: usize,
    ) -> Self {
        let capped = |score: f32| of.soft_cap.map_or(score, |cap| soft_cap(score, cap));
        let scores: Vec<f32> = keys.map(|k| capped(lanes::dot(q, k) * of.scale)).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| exp(s - max)).collect();
        let mut o = vec![0.0f32; value_dim];
        for (e, v) in weights.iter().zip(values) {
            o.iter_mut().zip(v).for_each(|(o, v)| *o = e.mul_add(*v, *o));
        }
        let lanes: Vec<f32> = std::iter::repeat_n(0.0, left_out).chain(weights).collect();
        Self { max, sum: lanes::sum(&lanes), o }
    }

    fn merge(mut self, slab: &Self) -> Self {
        let max = self.max.max(slab.max);
        let (a, b) = (exp(self.max - max), exp(slab.max - max));
        self.o.iter_mut().zip(&slab.o).for_each(|(o, s)| *o = s.mul_add(b, *o * a));
        Self { max, sum: slab.sum.mul_add(b, self.sum * a), o: self.o }
    }

    /// With a score that has no value.
    fn join(mut self, sink: f32) -> Self {
        let [a, sum] = join_sink(self.max, self.sum, sink);
        self.o.iter_mut().for_each(|o| *o *= a);
        Self { sum, ..self }
    }
}
