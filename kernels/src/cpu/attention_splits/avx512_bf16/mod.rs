//! Attention by VDPBF16PS: each block of keys and values is packed once for all queries of a task, and every tile of queries then goes
//! through scores, weights and weighted values while they are in the first-level cache.

mod lines;
mod pack;
mod softmax;
mod tile;

use super::plan::{Heads, Item};
use super::{Rows, Task};
use crate::cpu::pool_memory::{HeadRows, HeadSource};
use crate::numerics::flushed::GROUP;
use crate::numerics::{ATTENTION_BLOCK, ATTENTION_SPLIT, exp};
use lines::Lines;
use softmax::{Softmax, WEIGHTS, weigh};
use std::cell::Cell;
use std::ops::Range;
use tile::{PANEL, QUERIES_MAX, QUERY_GROUP, Tile};

thread_local! {
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch::new()) };
}

/// Buffers that a thread keeps between tasks.
#[derive(Default)]
struct Scratch {
    /// `[query][groups][QUERY_GROUP]` words.
    queries: Lines,
    keys: Lines,
    values: Lines,
    /// Of a tile: `[query][ATTENTION_BLOCK]`.
    dots: Lines,
    /// Of a tile: `[query][WEIGHTS]` words.
    weights: Lines,
    /// A row of zeros, for tokens that no row attends to.
    zeros: Lines,
    /// `[query][padded]` of the split, and of the splits before.
    outputs: [Lines; 2],
    /// `[query]` of the split, and of the splits before.
    softmax: [Vec<Softmax>; 2],
}

impl Scratch {
    const fn new() -> Self {
        Self {
            queries: Lines::new(),
            keys: Lines::new(),
            values: Lines::new(),
            dots: Lines::new(),
            weights: Lines::new(),
            zeros: Lines::new(),
            outputs: [const { Lines::new() }; 2],
            softmax: [const { Vec::new() }; 2],
        }
    }
}

/// Computes the splits of a task.
///
/// # Safety
/// [`available`]; the item's rows and heads lie in the output and nobody else uses them; `keep`, if any, has room for the states of the item.
pub(super) unsafe fn run(task: &Task<'_>) {
    let mut scratch = SCRATCH.take();
    // SAFETY: the caller's promise.
    unsafe { Work::new(task, &mut scratch).run() };
    SCRATCH.set(scratch);
}

/// A task and what it works with.
struct Work<'a> {
    task: &'a Task<'a>,
    scratch: &'a mut Scratch,
    queries: usize,
    k: HeadRows<'a>,
    v: HeadRows<'a>,
    /// A row of zeros.
    zeros: *const u8,
}

/// Rows of keys and values of a block.
struct Block {
    start: usize,
    k: pack::Rows,
    v: pack::Rows,
}

impl<'a> Work<'a> {
    fn new(task: &'a Task<'a>, scratch: &'a mut Scratch) -> Self {
        let step = task.rows.step;
        let [k, v] = step.kv.planes();
        let (head, blocks) = (task.item.kv_head, &step.segments[task.item.segment].blocks);
        let rows = |plane| HeadRows::new(HeadSource { pool: step.kv, layer: step.layer, plane, head, blocks });
        let zeros = scratch.zeros.room::<u16>(task.heads.dim).cast_const().cast();
        Self { task, scratch, queries: task.item.rows * task.heads.group, k: rows(k), v: rows(v), zeros }
    }

    /// # Safety
    /// As [`run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,fma")]
    unsafe fn run(mut self) {
        let (heads, item, rows) = (self.task.heads, self.task.item, &self.task.rows);
        let words = heads.padded / GROUP * QUERY_GROUP;
        let packed = self.scratch.queries.room::<u32>(self.queries * words);
        for query in 0..self.queries {
            let at = heads.offset(item, query);
            // SAFETY: room for all queries.
            unsafe { pack::query(&rows.q[at..at + heads.dim], packed.add(query * words)) };
        }
        let first = rows.scores.first(item.position).max(self.task.splits.start * ATTENTION_SPLIT);
        let mut blocks = [const { Block { start: 0, k: [std::ptr::null(); _], v: [std::ptr::null(); _] } }; 2];
        self.locate(first / ATTENTION_BLOCK * ATTENTION_BLOCK, &mut blocks[0]);
        for split in self.task.splits.clone() {
            let split_start = split * ATTENTION_SPLIT;
            let tokens =
                rows.scores.first(item.position).max(split_start)..item.end().min(split_start + ATTENTION_SPLIT);
            self.start_split();
            while blocks[0].start < tokens.end {
                let [block, next] = &mut blocks;
                self.locate(block.start + ATTENTION_BLOCK, next);
                // SAFETY: the caller's promise.
                unsafe { self.block(block, next) };
                blocks.swap(0, 1);
            }
            // SAFETY: the caller's promise.
            unsafe { self.end_split(split) };
        }
    }

    /// The position of a query's row.
    fn position(&self, query: usize) -> usize {
        self.task.item.position + query / self.task.heads.group
    }

    /// Queries whose rows attend to any of `len` tokens from `start`.
    fn seeing(&self, start: usize, len: usize) -> Range<usize> {
        let (item, group) = (self.task.item, self.task.heads.group);
        let first = start.saturating_sub(item.position).min(item.rows);
        // Both ends of what a row attends to ascend with the row.
        let sees = |row: usize| self.task.rows.scores.first(item.position + row) < start + len;
        let mut end = item.rows;
        while end > first && !sees(end - 1) {
            end -= 1;
        }
        first * group..end * group
    }

    /// What a query's row attends to of the block at `start`, counted from there.
    fn seen(&self, query: usize, start: usize) -> Range<usize> {
        let seen = self.task.rows.seen(self.position(query), start, ATTENTION_BLOCK);
        seen.start - start..seen.end - start
    }

    fn start_split(&mut self) {
        let len = self.queries * self.task.heads.padded;
        let output = self.scratch.outputs[0].room::<f32>(len);
        // SAFETY: as much room.
        unsafe { std::slice::from_raw_parts_mut(output, len) }.fill(0.0);
        self.scratch.softmax[0].clear();
        self.scratch.softmax[0].resize(self.queries, Softmax::START);
        if self.scratch.softmax[1].len() < self.queries {
            self.scratch.softmax[1].resize(self.queries, Softmax::START);
        }
    }

    /// Finds the rows of the block at `start` that any row of the item attends to; zeros for the others.
    fn locate(&self, start: usize, block: &mut Block) {
        let item = self.task.item;
        let first = self.task.rows.scores.first(item.position);
        let tokens = first.clamp(start, start + ATTENTION_BLOCK)..item.end().clamp(start, start + ATTENTION_BLOCK);
        let within = tokens.start - start..tokens.end - start;
        block.start = start;
        for (rows, of) in [(&mut block.k, &self.k), (&mut block.v, &self.v)] {
            rows[..within.start].fill(self.zeros);
            rows[within.end..].fill(self.zeros);
            of.addresses(tokens.clone(), &mut rows[within.clone()]);
        }
    }

    /// # Safety
    /// As [`run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,fma")]
    unsafe fn block(&mut self, block: &Block, next: &Block) {
        let dim = self.task.heads.dim;
        let queries = self.seeing(block.start, ATTENTION_BLOCK);
        if queries.is_empty() {
            return;
        }
        let alike = self.seen(queries.start, block.start) == self.seen(queries.end - 1, block.start);
        // SAFETY: addresses were checked, and their tokens belong to the sequence.
        let by_row = unsafe {
            pack::keys([&block.k, &next.k], dim, &mut self.scratch.keys);
            pack::values([&block.v, &next.v], dim, &mut self.scratch.values);
            !alike && !pack::finite(&block.v, dim)
        };
        if by_row {
            // A weight of zero does not hide what is not finite: values of each row alone.
            let group = self.task.heads.group;
            for first in queries.step_by(group) {
                // SAFETY: as above.
                unsafe {
                    let seen = self.seen(first, block.start);
                    let mut rows = [self.zeros; ATTENTION_BLOCK];
                    rows[seen.clone()].copy_from_slice(&block.v[seen]);
                    pack::values([&rows, &next.v], dim, &mut self.scratch.values);
                    self.tiles(first..first + group, block.start);
                }
            }
        } else {
            // SAFETY: as above.
            unsafe { self.tiles(queries, block.start) };
        }
    }

    /// Tiles of about equal size.
    ///
    /// # Safety
    /// As [`run`]; keys and values are packed.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,fma")]
    unsafe fn tiles(&mut self, queries: Range<usize>, start: usize) {
        let mut left = queries.len().div_ceil(QUERIES_MAX);
        let mut first = queries.start;
        while left > 0 {
            let count = (queries.end - first).div_ceil(left);
            // SAFETY: the caller's promise.
            unsafe { self.tile(first, count, start) };
            first += count;
            left -= 1;
        }
    }

    /// # Safety
    /// As [`Work::tiles`]; `count` queries from `first`, 1 to [`QUERIES_MAX`], attend to the block at `start`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,fma")]
    unsafe fn tile(&mut self, first: usize, count: usize, start: usize) {
        let padded = self.task.heads.padded;
        let groups = padded / GROUP;
        let words = groups * QUERY_GROUP;
        let dots = self.scratch.dots.room::<f32>(QUERIES_MAX * ATTENTION_BLOCK);
        let weights = self.scratch.weights.room::<u32>(QUERIES_MAX * WEIGHTS);
        // Ends ascend with the row: no query needs more panels than the last.
        let tokens = self.seen(first + count - 1, start).end;
        // SAFETY: queries, keys, values and outputs were packed and sized for these shapes.
        unsafe {
            let scores = Tile {
                queries: self.scratch.queries.room::<u32>(self.queries * words).add(first * words),
                query_stride: words * 4,
                panels: self.scratch.keys.room::<u32>(0),
                count: tokens.div_ceil(PANEL),
                groups,
                out: dots,
                out_stride: ATTENTION_BLOCK * 4,
            };
            tile::sums(count, scores);
            let mut factors = [0.0f32; QUERIES_MAX];
            for (query, factor) in factors[..count].iter_mut().enumerate() {
                let (dots, weights) = (dots.add(query * ATTENTION_BLOCK), weights.add(query * WEIGHTS));
                let seen = self.seen(first + query, start);
                let state = &mut self.scratch.softmax[0][first + query];
                *factor = weigh(dots, seen, self.task.rows.scores.scale, state, weights);
            }
            let weighted = Tile {
                queries: weights,
                query_stride: WEIGHTS * 4,
                panels: self.scratch.values.room::<u32>(0),
                count: padded / PANEL,
                groups: ATTENTION_BLOCK / GROUP,
                out: self.scratch.outputs[0].room::<f32>(self.queries * padded).add(first * padded),
                out_stride: padded * 4,
            };
            tile::scaled_sums(count, weighted, factors.as_ptr());
        }
    }

    /// Keeps the states of the split, or merges them with those before, and finishes rows that end with it.
    ///
    /// # Safety
    /// As [`run`].
    #[target_feature(enable = "avx512f,fma")]
    unsafe fn end_split(&mut self, split: usize) {
        let (heads, item, padded) = (self.task.heads, self.task.item, self.task.heads.padded);
        let [now, before] = &mut self.scratch.outputs;
        let (now, before) = (now.room::<f32>(self.queries * padded), before.room::<f32>(self.queries * padded));
        let start = split * ATTENTION_SPLIT;
        for query in self.seeing(start, ATTENTION_SPLIT) {
            let softmax = self.scratch.softmax[0][query];
            let position = self.position(query);
            // SAFETY: room for all queries, and for all states; the output is the task's.
            unsafe {
                let o = std::slice::from_raw_parts_mut(now.add(query * padded), padded);
                if let Some(keep) = self.task.keep {
                    let at = (query * item.splits.len() + split - item.splits.start) * heads.state();
                    let to = std::slice::from_raw_parts_mut(keep.add(at), heads.state());
                    to[..padded].copy_from_slice(o);
                    to[padded..].copy_from_slice(&[softmax.max, softmax.sum]);
                    continue;
                }
                let last = position < start + ATTENTION_SPLIT;
                let starts_here = self.task.rows.scores.first(position) >= start;
                if starts_here && last {
                    finish(o, softmax.sum, self.task.out.add(heads.offset(item, query)), heads.dim);
                    continue;
                }
                let total = std::slice::from_raw_parts_mut(before.add(query * padded), padded);
                let total_softmax = &mut self.scratch.softmax[1][query];
                if starts_here {
                    total.copy_from_slice(o);
                    *total_softmax = softmax;
                    continue;
                }
                merge(total, total_softmax, o, softmax);
                if last {
                    finish(total, total_softmax.sum, self.task.out.add(heads.offset(item, query)), heads.dim);
                }
            }
        }
    }
}

/// Merges the state of the next split into the running one.
#[inline]
#[target_feature(enable = "avx512f,fma")]
fn merge(o: &mut [f32], state: &mut Softmax, later: &[f32], part: Softmax) {
    let max = state.max.max(part.max);
    let (a, b) = (exp(state.max - max), exp(part.max - max));
    for (o, part) in o.iter_mut().zip(later) {
        *o = part.mul_add(b, *o * a);
    }
    *state = Softmax { max, sum: part.sum.mul_add(b, state.sum * a) };
}

/// Divides by the sum and stores.
///
/// # Safety
/// `out` is writable for `dim` f32.
#[inline]
#[target_feature(enable = "avx512f,fma")]
unsafe fn finish(o: &[f32], sum: f32, out: *mut f32, dim: usize) {
    // SAFETY: the caller's promise.
    let out = unsafe { std::slice::from_raw_parts_mut(out, dim) };
    for (out, o) in out.iter_mut().zip(o) {
        *out = o / sum;
    }
}

/// Merges the splits of a divided item, in order, and finishes it.
///
/// # Safety
/// [`available`]; `states` are those of the item, `[query][split]`; the item's rows and heads lie in the output and nobody else uses them.
#[target_feature(enable = "avx512f,fma")]
pub(super) unsafe fn merge_item(rows: &Rows<'_>, heads: Heads, item: &Item, states: *mut f32, out: *mut f32) {
    let (size, padded) = (heads.state(), heads.padded);
    for query in 0..item.rows * heads.group {
        let position = item.position + query / heads.group;
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
            finish(o, state.sum, out.add(heads.offset(item, query)), heads.dim);
        }
    }
}
