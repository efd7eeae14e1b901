//! Paged attention in splits of 512 tokens, as `docs/numerics.md` writes it: of `bf16x32` and `i8x32` ([`chains`]), and of the tensor-core
//! classes ([`tensor_core`]).

mod chains;
mod tensor_core;

use crate::host::{KvStep, Scores};
#[cfg(any(test, feature = "testing"))]
use crate::numerics::TensorCore;
use crate::numerics::{ATTENTION_BLOCK, ATTENTION_SPLIT, Half, Numerics};
use crate::step::StepSegment;
use chains::Chains;
use std::ops::Range;
use tensor_core::Tensor;

/// Causal attention of `q`, rows of `q.len() / step.rows()`.
///
/// # Panics
/// If the class has no splits, or the planes k and v are not of its type.
pub(crate) fn attend(numerics: Numerics, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]) {
    attend_cut(numerics, step, q, scores, out, |_| Cut::default());
}

/// Where splits and blocks begin.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cut {
    /// Places before that of the first token.
    pub(crate) lead: usize,
    /// Places that the first split has more than the others.
    pub(crate) before: usize,
}

impl Cut {
    /// The splits of these places.
    fn splits(self, places: &Range<usize>) -> std::ops::RangeInclusive<usize> {
        let split_of = |place: usize| place.saturating_sub(self.before) / ATTENTION_SPLIT;
        split_of(places.start)..=split_of(places.end - 1)
    }
}

/// As [`attend`], with the sequence of each segment cut so.
pub(crate) fn attend_cut(
    numerics: Numerics,
    step: KvStep<'_>,
    q: &[f32],
    scores: Scores<'_>,
    out: &mut [f32],
    cut: impl Fn(&StepSegment) -> Cut,
) {
    match numerics {
        Numerics::F32Fma { .. } => panic!("{numerics} has no splits"),
        Numerics::Bf16x32 | Numerics::I8x32 => {
            attend_by(&Chains { scores }, Half::Bf16, step, q, scores, out, cut);
        }
        Numerics::TensorCore { cores, half } => {
            attend_by(&Tensor::new(cores, half, scores), half, step, q, scores, out, cut);
        }
    }
}

/// The arithmetic of a class within its blocks.
trait Order {
    /// Softmax state over some tokens, not yet divided by its sum.
    type State;

    /// The state before the first token.
    fn empty(&self, dim: usize) -> Self::State;

    /// The state after one more block of [`ATTENTION_BLOCK`] places, at least one of which is seen.
    fn block(&self, state: Self::State, q: &[u16], block: &BlockOf<'_>) -> Self::State;

    /// What is left of a split that is complete.
    fn finish(&self, state: Self::State) -> Merged;

    /// Two neighbouring runs of splits.
    fn merge(&self, earlier: Merged, later: Merged) -> Merged;

    /// The state of all splits, with a score that has no value.
    fn join(&self, merged: Merged, sink: f32) -> Merged;

    /// The weighted mean.
    fn result(&self, merged: &Merged, out: &mut [f32]);
}

/// Keys and values of one block of tokens.
struct BlockOf<'a> {
    kv: &'a HeadKv,
    start: usize,
    /// The places that the row attends to.
    seen: Range<usize>,
}

impl BlockOf<'_> {
    /// All of its places.
    fn places(&self) -> Range<usize> {
        self.start..self.start + ATTENTION_BLOCK
    }

    /// The key at a place, if the row attends to it.
    fn key(&self, place: usize) -> Option<&[u16]> {
        self.seen.contains(&place).then(|| &self.kv.k[self.kv.at(place)])
    }

    /// An element of the value at a place; +0 if the row does not attend to it.
    fn value(&self, place: usize, d: usize) -> u16 {
        if self.seen.contains(&place) { self.kv.v[self.kv.at(place)][d] } else { 0 }
    }
}

/// The state of a row after whole splits.
pub(crate) struct Merged {
    pub(crate) max: f32,
    pub(crate) sum: f32,
    pub(crate) o: Vec<f32>,
}

fn attend_by<O: Order>(
    order: &O,
    half: Half,
    step: KvStep<'_>,
    q: &[f32],
    scores: Scores<'_>,
    out: &mut [f32],
    cut: impl Fn(&StepSegment) -> Cut,
) {
    let (dim, kv_heads) = (step.kv.dim(), step.kv.heads());
    let value_dim = step.value_dim(q, out);
    let cols = q.len() / step.rows();
    let group_cols = cols / kv_heads;
    let mut first_row = 0;
    for segment in step.segments {
        for kv_head in 0..kv_heads {
            let first = scores.first(segment.position);
            let head = HeadKv::load(half, step, segment, kv_head, first, cut(segment));
            for row in 0..segment.rows {
                let position = segment.position + row;
                let at = (first_row + row) * cols + kv_head * group_cols;
                let queries = q[at..at + group_cols].chunks_exact(dim);
                let group = group_cols / dim;
                let outs = at / dim * value_dim..(at + group_cols) / dim * value_dim;
                for (i, (q, out)) in queries.zip(out[outs].chunks_exact_mut(value_dim)).enumerate() {
                    let q: Vec<u16> = q.iter().map(|x| half.from_f32(*x)).collect();
                    let sink = scores.sink(kv_head * group + i);
                    head.attend(order, &q, scores.first(position)..position + 1, sink, out);
                }
            }
        }
        first_row += segment.rows;
    }
}

/// One KV head of a segment in the order of `bf16x32` and `i8x32`.
pub(crate) struct ChainsHead<'a> {
    order: Chains<'a>,
    scores: Scores<'a>,
    kv: HeadKv,
}

impl<'a> ChainsHead<'a> {
    /// # Panics
    /// If the planes k and v are not bf16.
    pub(crate) fn load(step: KvStep<'_>, segment: &StepSegment, kv_head: usize, scores: Scores<'a>) -> Self {
        let first = scores.first(segment.position);
        let kv = HeadKv::load(Half::Bf16, step, segment, kv_head, first, Cut::default());
        Self { order: Chains { scores }, scores, kv }
    }

    /// Attention of one query of the row at `position`; `head` is that of the query.
    pub(crate) fn attend(&self, q: &[f32], position: usize, head: usize, out: &mut [f32]) {
        let q: Vec<u16> = q.iter().map(|x| Half::Bf16.from_f32(*x)).collect();
        self.kv.attend(&self.order, &q, self.scores.first(position)..position + 1, self.scores.sink(head), out);
    }
}

/// Keys and values of one KV head of one sequence: `[tokens, dim]`, as bits.
struct HeadKv {
    dim: usize,
    cut: Cut,
    k: Vec<u16>,
    v: Vec<u16>,
}

impl HeadKv {
    /// Reads the tokens of the segment's sequence from `first` on. Those before, whose blocks may be gone, are zeros.
    ///
    /// # Panics
    /// If the planes k and v are not of this type.
    fn load(half: Half, step: KvStep<'_>, segment: &StepSegment, head: usize, first: usize, cut: Cut) -> Self {
        let (pool, dim) = (step.kv, step.kv.dim());
        let mut bytes = vec![0; dim * 2];
        let [k, v] = pool.planes().map(|plane| {
            assert_eq!(pool.dtype(plane), half.dtype(), "the class reads KV of this type");
            let mut out = vec![0; first * dim];
            for run in pool.runs(&segment.table, first..segment.end()) {
                for token in run.token..run.token + run.tokens {
                    let at = pool.offset(step.layer, plane, run.block, token);
                    pool.memory.copy_out(at + head * dim * 2, &mut bytes);
                    out.extend(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])));
                }
            }
            out
        });
        Self { dim, cut, k, v }
    }

    /// Where the key and the value of the token at `place` are.
    fn at(&self, place: usize) -> Range<usize> {
        let token = place - self.cut.lead;
        token * self.dim..(token + 1) * self.dim
    }

    /// Attention of one query over `tokens`, with as many elements of each value as `out` has.
    fn attend<O: Order>(&self, order: &O, q: &[u16], tokens: Range<usize>, sink: Option<f32>, out: &mut [f32]) {
        let lead = self.cut.lead;
        let places = tokens.start + lead..tokens.end + lead;
        let splits = self.cut.splits(&places).map(|split| self.split(order, q, &places, split, out.len()));
        if let Some(merged) = splits.reduce(|earlier, later| order.merge(earlier, later)) {
            let merged = match sink {
                Some(sink) => order.join(merged, sink),
                None => merged,
            };
            order.result(&merged, out);
        }
    }

    /// One query over those of its places that are in a split; of the first `dim` elements of values.
    fn split<O: Order>(&self, order: &O, q: &[u16], places: &Range<usize>, split: usize, dim: usize) -> Merged {
        let before = self.cut.before;
        let start = if split == 0 { 0 } else { before + split * ATTENTION_SPLIT };
        let seen = places.start.max(start)..places.end.min(before + (split + 1) * ATTENTION_SPLIT);
        let blocks = seen.start / ATTENTION_BLOCK..seen.end.div_ceil(ATTENTION_BLOCK);
        let state = blocks.fold(order.empty(dim), |state, block| {
            let block = BlockOf { kv: self, start: block * ATTENTION_BLOCK, seen: seen.clone() };
            order.block(state, q, &block)
        });
        order.finish(state)
    }
}

/// One KV head of a sequence in the order of a tensor-core class.
#[cfg(any(test, feature = "testing"))]
pub(crate) struct TensorHead {
    order: Tensor,
    kv: HeadKv,
}

#[cfg(any(test, feature = "testing"))]
impl TensorHead {
    /// Keys and values `[tokens, dim]`, as bits; `factor` is the class's.
    pub(crate) fn new(cores: TensorCore, half: Half, factor: f32, dim: usize, k: Vec<u16>, v: Vec<u16>) -> Self {
        Self { order: Tensor::with_factor(cores, half, factor), kv: HeadKv { dim, cut: Cut::default(), k, v } }
    }

    /// The splits of these tokens.
    pub(crate) fn splits(tokens: &Range<usize>) -> std::ops::RangeInclusive<usize> {
        Cut::default().splits(tokens)
    }

    /// One query over those of `tokens` that are in a split.
    pub(crate) fn split(&self, q: &[u16], tokens: &Range<usize>, split: usize) -> Merged {
        self.kv.split(&self.order, q, tokens, split, self.kv.dim)
    }

    /// The weighted mean over runs of splits, in order.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn result(&self, splits: impl Iterator<Item = Merged>, out: &mut [f32]) {
        let merged = splits.reduce(|earlier, later| self.order.merge(earlier, later)).expect("a split");
        self.order.result(&merged, out);
    }
}
