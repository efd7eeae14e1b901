//! The unit of work of a thread: the slabs of one item, or the merge of states that several threads computed.

use super::slab::{SlabScores, scores, scores_of_two, weigh, weighted_values};
use super::{Heads, Item};
use crate::cpu::pool_memory::HeadSource;
use crate::cpu::simd::{Kernel, LANES, Simd};
use crate::host::{KvStep, Scores};
use crate::numerics::{ATTENTION_SLAB, exp, join_sink};
use std::ops::Range;

/// Buffers that a thread keeps between tasks.
#[derive(Default)]
pub(super) struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[query][stride]`, padded with zeros.
    queries: Vec<f32>,
    /// `[query]` states of an undivided item.
    states: Vec<f32>,
    /// State of one slab of two queries.
    slab: Vec<f32>,
}

impl Scratch {
    pub(super) const fn new() -> Self {
        Self { keys: Vec::new(), values: Vec::new(), queries: Vec::new(), states: Vec::new(), slab: Vec::new() }
    }
}

/// Some slabs of an item.
pub(super) struct SlabTask<'a> {
    pub(super) step: KvStep<'a>,
    pub(super) heads: Heads,
    pub(super) item: &'a Item,
    pub(super) slabs: Range<usize>,
    pub(super) q: &'a [f32],
    pub(super) scores: Scores<'a>,
    /// Where to store the state of each slab, `[query][slab of the item]`; `None`: merge and finish here.
    pub(super) keep: Option<*mut f32>,
    /// The whole output; only this task stores the item's rows and heads.
    pub(super) out: *mut f32,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for SlabTask<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Self { step, heads, item, slabs, q, scores, keep, out, scratch } = self;
        let (stride, size) = (heads.stride, heads.state());
        let queries = item.rows * heads.group;
        scratch.prepare(heads, queries, step.kv.is_latent());
        gather(heads, item, q, &mut scratch.queries);
        let segment = &step.segments[item.segment];
        let [k, v] = step.kv.planes();
        let source =
            HeadSource { pool: step.kv, layer: step.layer, plane: k, head: item.kv_head, table: &segment.table };

        for slab in slabs.clone() {
            let start = slab * ATTENTION_SLAB;
            let end = (start + ATTENTION_SLAB).min(item.position + item.rows);
            // Tokens before the window of the first row may be gone. Scores are computed for them too, and dropped: zeros instead.
            let from = scores.first(item.position).clamp(start, end);
            let gone = (from - start) * stride;
            scratch.keys[..gone].fill(0.0);
            source.widen(s, from..end, stride, &mut scratch.keys[gone..]);
            // In a latent group they are parts of the keys.
            let value_source = (v != k).then_some(HeadSource { plane: v, ..source });
            if let Some(source) = value_source {
                source.widen(s, from..end, stride, &mut scratch.values[gone..]);
            }
            if slab + 1 < slabs.end {
                let next = end..(end + ATTENTION_SLAB).min(item.position + item.rows);
                source.prefetch(s, next.clone());
                value_source.iter().for_each(|source| source.prefetch(s, next.clone()));
            }
            // Scores are computed in whole vectors, and those of absent tokens are dropped. Their keys are zeroed, because old data could
            // be NaN.
            let padded = (end - start).next_multiple_of(LANES);
            scratch.keys[(end - start) * stride..padded * stride].fill(0.0);

            let mut query = 0;
            while query < queries {
                // Both ends ascend with the row.
                let visible = |query: usize| {
                    let position = item.position + query / heads.group;
                    let from = scores.first(position).saturating_sub(start);
                    from..(position + 1).saturating_sub(start).min(ATTENTION_SLAB)
                };
                let tokens = [visible(query), visible((query + 1).min(queries - 1))];
                if tokens[0].is_empty() {
                    query += 1;
                    continue;
                }
                let pair = if query + 1 < queries && !tokens[1].is_empty() { 2 } else { 1 };
                scratch.slab.fill(0.0);
                // SAFETY: `prepare` sized all buffers for these shapes; `query + pair <= queries`.
                unsafe { compute(s, heads, scratch, query, pair, &tokens, scores) };
                for i in 0..pair {
                    let from = &scratch.slab[i * size..(i + 1) * size];
                    match keep {
                        // SAFETY: `[query][slab]` lies in the item's states, and this task has the slab to itself.
                        Some(keep) => unsafe {
                            let to = keep.add(((query + i) * item.slabs.len() + slab - item.slabs.start) * size);
                            std::ptr::copy_nonoverlapping(from.as_ptr(), to, size);
                        },
                        None => {
                            let state = &mut scratch.states[(query + i) * size..(query + i + 1) * size];
                            let first = scores.first(item.position + (query + i) / heads.group) / ATTENTION_SLAB;
                            if slab == first { state.copy_from_slice(from) } else { merge(s, state, from) }
                        }
                    }
                }
                query += pair;
            }
        }
        if keep.is_none() {
            for query in 0..queries {
                // SAFETY: the item's rows and heads lie in the output and belong to this task.
                unsafe {
                    let state = &mut scratch.states[query * size..(query + 1) * size];
                    finish(s, heads, item, query, scores, state, out);
                }
            }
        }
    }
}

impl Scratch {
    #[inline(always)]
    fn prepare(&mut self, heads: Heads, queries: usize, is_latent: bool) {
        // Zeros, because the padding from `dim` to `stride` is not written later.
        for (buffer, len) in [
            (&mut self.keys, ATTENTION_SLAB * heads.stride),
            (&mut self.values, if is_latent { 0 } else { ATTENTION_SLAB * heads.stride }),
            (&mut self.queries, queries * heads.stride),
        ] {
            if heads.stride != heads.dim {
                buffer.clear();
            }
            buffer.resize(len, 0.0);
        }
        self.states.resize(queries * heads.state(), 0.0);
        self.slab.resize(2 * heads.state(), 0.0);
    }
}

/// Queries of the item, `[row][head of the group]`.
#[inline(always)]
fn gather(heads: Heads, item: &Item, q: &[f32], out: &mut [f32]) {
    for (query, out) in out.chunks_exact_mut(heads.stride).enumerate() {
        let at = heads.offset(item, query, heads.dim);
        out[..heads.dim].copy_from_slice(&q[at..at + heads.dim]);
    }
}

/// The query head of a query.
#[inline(always)]
fn head_of(heads: Heads, item: &Item, query: usize) -> usize {
    item.kv_head * heads.group + query % heads.group
}

/// States of one slab for `pair` queries from `query`, into `scratch.slab` (zeros before).
///
/// # Safety
/// The scratch is prepared for these shapes; of `tokens`, the first `pair` are not empty, both ends ascend up to 64, and the slab is widened
/// that far.
#[inline(always)]
unsafe fn compute<S: Simd>(
    s: S,
    heads: Heads,
    scratch: &mut Scratch,
    query: usize,
    pair: usize,
    tokens: &[Range<usize>; 2],
    of: Scores<'_>,
) {
    let (stride, size) = (heads.stride, heads.state());
    let mut weights: [SlabScores; 2] = [[0.0; ATTENTION_SLAB]; 2];
    let keys = scratch.keys.as_ptr();
    let values = if scratch.values.is_empty() { keys } else { scratch.values.as_ptr() };
    let of_values = [stride, heads.value_stride];
    let slab = scratch.slab.as_mut_ptr();
    // SAFETY: the caller's promise: two states, and queries and slab of `stride`.
    unsafe {
        let first = scratch.queries.as_ptr().add(query * stride);
        if pair == 1 {
            scores(s, first, keys, stride, tokens[0].end, &mut weights[0]);
        } else {
            scores_of_two(s, [first, first.add(stride)], keys, stride, tokens[1].end, &mut weights);
        }
        for i in 0..pair {
            let scale = of.cap(&mut weights[i][tokens[i].clone()]);
            let [max, sum] = weigh(s, &mut weights[i], tokens[i].clone(), scale);
            *slab.add(i * size + heads.value_stride) = max;
            *slab.add(i * size + heads.value_stride + 1) = sum;
        }
        let [a, b] = [weights[0].as_ptr(), weights[1].as_ptr()];
        if pair == 1 {
            weighted_values(s, [a], values, of_values, tokens[0].clone(), [slab]);
        } else {
            // The earlier row alone, both together as far as both attend, then the later row alone.
            let both = tokens[1].start.min(tokens[0].end)..tokens[0].end;
            if tokens[0].start < both.start {
                weighted_values(s, [a], values, of_values, tokens[0].start..both.start, [slab]);
            }
            weighted_values(s, [a, b], values, of_values, both.clone(), [slab, slab.add(size)]);
            let later = both.end.max(tokens[1].start)..tokens[1].end;
            if !later.is_empty() {
                weighted_values(s, [b], values, of_values, later, [slab.add(size)]);
            }
        }
    }
}

/// Merges the state of the next slab into the running one.
#[inline(always)]
fn merge<S: Simd>(s: S, state: &mut [f32], slab: &[f32]) {
    let stride = state.len() - 2;
    let max = state[stride].max(slab[stride]);
    let (a, b) = (exp(state[stride] - max), exp(slab[stride] - max));
    for d in (0..stride).step_by(LANES) {
        let (o, part) = (&mut state[d..d + LANES], &slab[d..d + LANES]);
        // SAFETY: one vector each.
        unsafe {
            let scaled = s.mul(s.load(o.as_ptr()), s.splat(a));
            s.store(o.as_mut_ptr(), s.fma(s.load(part.as_ptr()), s.splat(b), scaled));
        }
    }
    state[stride + 1] = slab[stride + 1].mul_add(b, state[stride + 1] * a);
    state[stride] = max;
}

/// Takes the sink of the query's head into the state, divides by the sum and stores.
///
/// # Safety
/// The query's head lies in `out` and nobody else stores it.
#[inline(always)]
unsafe fn finish<S: Simd>(
    _: S,
    heads: Heads,
    item: &Item,
    query: usize,
    scores: Scores<'_>,
    state: &mut [f32],
    out: *mut f32,
) {
    let mut sum = state[heads.value_stride + 1];
    if let Some(sink) = scores.sink(head_of(heads, item, query)) {
        let [a, of_all] = join_sink(state[heads.value_stride], sum, sink);
        state[..heads.value_dim].iter_mut().for_each(|o| *o *= a);
        sum = of_all;
    }
    // SAFETY: the caller's promise.
    let out =
        unsafe { std::slice::from_raw_parts_mut(out.add(heads.offset(item, query, heads.value_dim)), heads.value_dim) };
    for (out, o) in out.iter_mut().zip(state) {
        *out = *o / sum;
    }
}

/// Merges the slabs of a divided item, in order, and finishes it.
pub(super) struct Merge<'a> {
    pub(super) heads: Heads,
    pub(super) item: &'a Item,
    pub(super) scores: Scores<'a>,
    /// Softmax states as `[query][slab]`, each of [`Heads::state`] elements.
    pub(super) states: &'a mut [f32],
    /// The whole output; only this task stores the item's rows and heads.
    pub(super) out: *mut f32,
}

impl Kernel for Merge<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let size = self.heads.state();
        let slabs = self.item.slabs.clone();
        for (query, states) in self.states.chunks_exact_mut(slabs.len() * size).enumerate() {
            let position = self.item.position + query / self.heads.group;
            let first = self.scores.first(position) / ATTENTION_SLAB - slabs.start;
            let end = (position + 1).div_ceil(ATTENTION_SLAB) - slabs.start;
            let (running, later) = states[first * size..end * size].split_at_mut(size);
            for slab in later.chunks_exact(size) {
                merge(s, running, slab);
            }
            // SAFETY: the item's rows and heads lie in the output and belong to this task.
            unsafe { finish(s, self.heads, self.item, query, self.scores, running, self.out) };
        }
    }
}
