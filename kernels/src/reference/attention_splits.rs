//! Paged attention of `bf16x32` and `i8x32`, as `docs/numerics.md` writes it.

use crate::host::{KvStep, Scores};
use crate::numerics::{ATTENTION_BLOCK, ATTENTION_SPLIT, exp, flushed};
use crate::step::StepSegment;
use baton_types::Dtype;
use half::bf16;
use std::ops::Range;

/// Lanes of the sum of a block's weights.
const SUM_LANES: usize = 16;

/// Causal attention of `q`, rows of `q.len() / step.rows()`.
///
/// # Panics
/// If the planes k and v are not bf16.
pub(crate) fn attend(step: KvStep<'_>, q: &[f32], scores: Scores, out: &mut [f32]) {
    attend_cut(step, q, scores, out, |_| Cut::default());
}

/// Where splits and blocks begin.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cut {
    /// Places before that of the first token.
    pub(crate) lead: usize,
    /// Places that the first split has more than the others.
    pub(crate) before: usize,
}

/// As [`attend`], with the sequence of each segment cut so.
pub(crate) fn attend_cut(
    step: KvStep<'_>,
    q: &[f32],
    scores: Scores,
    out: &mut [f32],
    cut: impl Fn(&StepSegment) -> Cut,
) {
    let (dim, kv_heads) = (step.kv.dim(), step.kv.heads());
    let cols = q.len() / step.rows();
    let group_cols = cols / kv_heads;
    let mut first_row = 0;
    for segment in step.segments {
        for kv_head in 0..kv_heads {
            let first = scores.first(segment.position);
            let head = HeadKv { cut: cut(segment), ..HeadKv::load(step, segment, kv_head, first) };
            for row in 0..segment.rows {
                let position = segment.position + row;
                let at = (first_row + row) * cols + kv_head * group_cols;
                let queries = q[at..at + group_cols].chunks_exact(dim);
                for (q, out) in queries.zip(out[at..at + group_cols].chunks_exact_mut(dim)) {
                    head.attend(q, scores.first(position)..position + 1, scores.scale, out);
                }
            }
        }
        first_row += segment.rows;
    }
}

/// Keys and values of one KV head of one sequence: `[tokens, dim]`.
pub(crate) struct HeadKv {
    dim: usize,
    cut: Cut,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl HeadKv {
    /// Reads the tokens of the segment's sequence from `first` on. Those before, whose blocks may be gone, are zeros.
    ///
    /// # Panics
    /// If the planes k and v are not bf16.
    pub(crate) fn load(step: KvStep<'_>, segment: &StepSegment, head: usize, first: usize) -> Self {
        let (pool, dim) = (step.kv, step.kv.dim());
        let mut bytes = vec![0; dim * 2];
        let [k, v] = pool.planes().map(|plane| {
            assert_eq!(pool.dtype(plane), Dtype::Bf16, "attention of bf16x32 reads bf16");
            let mut out = vec![bf16::ZERO; first * dim];
            for run in pool.runs(&segment.table, first..segment.end()) {
                for token in run.token..run.token + run.tokens {
                    let at = pool.offset(step.layer, plane, run.block, token);
                    pool.memory.copy_out(at + head * dim * 2, &mut bytes);
                    out.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])));
                }
            }
            out
        });
        Self { dim, cut: Cut::default(), k, v }
    }

    /// Where the key and the value of the token at `place` are.
    fn at(&self, place: usize) -> Range<usize> {
        let token = place - self.cut.lead;
        token * self.dim..(token + 1) * self.dim
    }

    /// Attention of one query over `tokens`.
    pub(crate) fn attend(&self, q: &[f32], tokens: Range<usize>, scale: f32, out: &mut [f32]) {
        let q: Vec<bf16> = q.iter().map(|x| bf16::from_f32(*x)).collect();
        let Cut { lead, before } = self.cut;
        let tokens = tokens.start + lead..tokens.end + lead;
        let split_of = |place: usize| place.saturating_sub(before) / ATTENTION_SPLIT;
        let state = (split_of(tokens.start)..=split_of(tokens.end - 1)).map(|split| {
            let start = if split == 0 { 0 } else { before + split * ATTENTION_SPLIT };
            let seen = tokens.start.max(start)..tokens.end.min(before + (split + 1) * ATTENTION_SPLIT);
            let blocks = seen.start / ATTENTION_BLOCK..seen.end.div_ceil(ATTENTION_BLOCK);
            blocks.fold(State::new(self.dim), |state, block| self.block(state, &q, block, &seen, scale))
        });
        let Some(State { sum, o, .. }) = state.reduce(State::merge) else { return };
        out.iter_mut().zip(o).for_each(|(out, o)| *out = o / sum);
    }

    /// The state after one more block, of which the row attends to `seen`.
    fn block(&self, state: State, q: &[bf16], block: usize, seen: &Range<usize>, scale: f32) -> State {
        let start = block * ATTENTION_BLOCK;
        let tokens = start..start + ATTENTION_BLOCK;
        let scores: Vec<Option<f32>> =
            tokens.clone().map(|t| seen.contains(&t).then(|| flushed::dot(q, &self.k[self.at(t)]) * scale)).collect();
        let max = scores.iter().flatten().copied().fold(state.max, f32::max);
        let a = exp(state.max - max);
        let weights: Vec<bf16> =
            scores.iter().map(|s| s.map_or(bf16::ZERO, |s| bf16::from_f32(exp(s - max)))).collect();
        let mut o = state.o;
        for (d, o) in o.iter_mut().enumerate() {
            let value = |t| if seen.contains(&t) { self.v[self.at(t)][d] } else { bf16::ZERO };
            let products = weights.iter().enumerate().map(|(i, w)| (*w, value(start + i)));
            *o = flushed::add_groups(flushed::mul(*o, a), products);
        }
        State { max, sum: state.sum.mul_add(a, sum(&weights)), o }
    }
}

/// Sixteen lanes, halved to eight, which merge as always.
fn sum(weights: &[bf16]) -> f32 {
    let mut lanes = [0.0f32; SUM_LANES];
    weights.iter().enumerate().for_each(|(i, w)| lanes[i % SUM_LANES] += w.to_f32());
    crate::numerics::lanes::merge(std::array::from_fn(|i| lanes[i] + lanes[i + SUM_LANES / 2]))
}

/// Softmax state over some tokens, not yet divided by its sum.
struct State {
    max: f32,
    sum: f32,
    o: Vec<f32>,
}

impl State {
    fn new(dim: usize) -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, o: vec![0.0; dim] }
    }

    /// Not flushed.
    fn merge(mut self, later: Self) -> Self {
        let max = self.max.max(later.max);
        let (a, b) = (exp(self.max - max), exp(later.max - max));
        self.o.iter_mut().zip(&later.o).for_each(|(o, part)| *o = part.mul_add(b, *o * a));
        Self { max, sum: later.sum.mul_add(b, self.sum * a), o: self.o }
    }
}
