//! The work of a task: each block of keys and values is prepared once for all its queries, and every tile of queries then goes through
//! scores, weights and weighted values while they are in the first-level cache. A [`Kernels`] has the loops for some instructions.

use super::Task;
use super::states::{Softmax, finish, merge};
use crate::cpu::fused::share;
use crate::cpu::lines::Lines;
use crate::cpu::pool_memory::{HeadRows, HeadSource};
use crate::numerics::flushed::GROUP;
use crate::numerics::{ATTENTION_BLOCK, ATTENTION_SPLIT};
use std::cell::Cell;
use std::ops::Range;

/// Most queries of a tile of any kernels.
pub(super) const QUERIES_MAX: usize = 16;

/// Groups of a block.
const GROUPS: usize = ATTENTION_BLOCK / GROUP;

/// Addresses of the rows of a block of keys or values.
pub(super) type BlockRows = [*const u8; ATTENTION_BLOCK];

thread_local! {
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch::new()) };
}

/// Scores of a tile's queries in one block.
pub(super) struct Scores<'a> {
    /// `[query][ATTENTION_BLOCK]` dot products, aligned to 64 bytes; overwritten.
    pub(super) dots: *mut f32,
    /// Tokens that each query attends to: at least one.
    pub(super) seen: &'a [Range<usize>],
    pub(super) scale: f32,
}

/// Operands of the sums of products of a tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Words of the first query, `[groups][Kernels::QUERY_GROUP]`.
    pub(super) queries: *const u32,
    /// Bytes from one query to the next.
    pub(super) query_stride: usize,
    /// What [`Kernels::keys`] or [`Kernels::values`] made, aligned to 64 bytes.
    pub(super) panels: *const u32,
    /// Whether these are keys where they are, see [`Kernels::keys`].
    pub(super) in_place: bool,
    /// What to prefetch of the next block: the first of some of its [`BlockRows`], or null.
    pub(super) next: *const *const u8,
    /// How many of them; all but where keys are in their place.
    pub(super) next_rows: usize,
    /// Cache lines of its rows.
    pub(super) lines: usize,
    pub(super) count: usize,
    pub(super) groups: usize,
    /// `[Kernels::PANEL]` lanes of the first query and panel, aligned to 64 bytes; panels follow one another.
    pub(super) out: *mut f32,
    /// Bytes from one query to the next.
    pub(super) out_stride: usize,
}

/// Rows of the next block that are to be prefetched.
struct Next<'a> {
    block: &'a Block,
    rows: Range<usize>,
}

/// Keys of one KV head, as [`Kernels::keys`] left them.
#[derive(Clone, Copy)]
struct Keys {
    /// Of the block.
    start: usize,
    words: *const u32,
    few: bool,
}

/// What is added to the even and the odd chain of a group behind the first `seen` of its elements.
///
/// Elements that a row does not attend to have weight and value `+0`. Their product `+0` changes nothing but a chain of `-0` (a flushed
/// result), which it makes `+0`. The values of a block serve rows that attend to more, and their product with a weight of `+0` may be `-0`.
/// So a chain that ends with such elements gets `+0` added at its end, and every other chain `-0`, which never changes anything. Elements
/// before the first that the row attends to need nothing: a chain starts at `+0`, and `+0` with either zero stays `+0`.
pub(super) fn chain_ends(seen: usize) -> [f32; 2] {
    [GROUP - 1, GROUP].map(|all| if seen < all { 0.0 } else { -0.0 })
}

/// Loops for some instructions, and what they keep during a task.
///
/// Every function needs a processor with these instructions, and memory for the shapes that it is given: rows are readable for `dim` bf16,
/// `to` has room for what is packed.
#[allow(clippy::missing_safety_doc, reason = "the same for all, see above")]
pub(super) trait Kernels: Default {
    /// Words of one query in one group: its elements, and the [`chain_ends`] where [`Kernels::scaled_sums`] needs them.
    const QUERY_GROUP: usize;
    /// Lanes of a panel.
    const PANEL: usize;
    /// Most queries of a tile, up to [`QUERIES_MAX`].
    const TILE: usize;
    /// Most queries for which keys stay where they are; 0: for none.
    const FEW: usize;

    /// Words that [`Kernels::keys`] needs for a head of `padded` elements.
    fn key_words(padded: usize) -> usize;

    /// Words that [`Kernels::values`] needs for a head of `padded` elements.
    fn value_words(padded: usize) -> usize;

    /// Rounds a query to bf16 and packs it, `[groups][QUERY_GROUP]`.
    unsafe fn query(q: &[f32], to: *mut u32);

    /// Packs a block of keys of some heads, which lie side by side in each row, `[heads][Kernels::key_words]`, with tokens in the
    /// lanes. For `few` queries they may stay where they are.
    unsafe fn keys(rows: &BlockRows, heads: usize, dim: usize, few: bool, to: *mut u32);

    /// What [`Kernels::scaled_sums`] reads of a block of values, for so many tiles of each head: `[heads][Kernels::value_words]` in `to`, or
    /// of one head where the values are.
    unsafe fn values(rows: &BlockRows, heads: usize, dim: usize, tiles: usize, to: *mut u32) -> *const u32;

    /// Whether all elements of all rows are finite.
    unsafe fn finite(rows: &BlockRows, dim: usize) -> bool;

    /// Takes one more block into the states: its weights, packed as `[query][groups][QUERY_GROUP]`, and the factors of what was before. As
    /// many queries as `seen`, `states` and `factors` have, at most [`QUERIES_MAX`].
    unsafe fn weigh(block: &Scores<'_>, states: &mut [Softmax], weights: *mut u32, factors: &mut [f32]);

    /// `out = sums`, for 1 to [`Kernels::TILE`] queries.
    unsafe fn sums(&mut self, queries: usize, tile: Tile);

    /// `out = out * factor + sums`, with a factor for each query; they attend to the tokens `seen` of the block.
    unsafe fn scaled_sums(&mut self, seen: &[Range<usize>], tile: Tile, factors: &[f32]);

    /// Divides what [`Kernels::scaled_sums`] left by the sum of the weights.
    fn finish(o: &[f32], sum: f32, out: &mut [f32]);
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
    /// `[query][value_padded]` of the split, and of the splits before.
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

/// Computes the splits of a task. Inlined, so that it is compiled for the instructions of its caller.
///
/// # Safety
/// The processor has the instructions of `K`; the item's rows and heads lie in the output and nobody else uses them; `keep`, if any, has
/// room for the states of the item.
#[inline(always)]
pub(super) unsafe fn run<K: Kernels>(task: &Task<'_>) {
    let mut scratch = SCRATCH.take();
    // SAFETY: the caller's promise.
    unsafe { Work::<K>::new(task, &mut scratch).run() };
    SCRATCH.set(scratch);
}

/// A task and what it works with.
struct Work<'a, K> {
    task: &'a Task<'a>,
    scratch: &'a mut Scratch,
    queries: usize,
    k: HeadRows<'a>,
    v: HeadRows<'a>,
    /// A row of zeros.
    zeros: *const u8,
    kernels: K,
}

/// Rows of keys and values of a block.
struct Block {
    start: usize,
    k: BlockRows,
    v: BlockRows,
}

impl<'a, K: Kernels> Work<'a, K> {
    fn new(task: &'a Task<'a>, scratch: &'a mut Scratch) -> Self {
        let step = task.rows.step;
        let [k, v] = step.kv.planes();
        let (head, table) = (task.item.kv_heads.start, &step.segments[task.item.segment].table);
        let rows = |plane| HeadRows::new(HeadSource { pool: step.kv, layer: step.layer, plane, head, table });
        let kv_heads = task.item.kv_heads.len();
        let zeros = scratch.zeros.room::<u16>(kv_heads * task.heads.dim).cast_const().cast();
        let queries = kv_heads * task.heads.queries(task.item);
        Self { task, scratch, queries, k: rows(k), v: rows(v), zeros, kernels: K::default() }
    }

    /// # Safety
    /// As [`run`].
    #[inline(always)]
    unsafe fn run(mut self) {
        let (heads, item, rows) = (self.task.heads, self.task.item, &self.task.rows);
        let words = heads.padded / GROUP * K::QUERY_GROUP;
        let packed = self.scratch.queries.room::<u32>(self.queries * words);
        for query in 0..self.queries {
            let at = heads.offset(item, query);
            // SAFETY: room for all queries.
            unsafe { K::query(&rows.q[at..at + heads.dim], packed.add(query * words)) };
        }
        let first = rows.scores.first(item.position).max(self.task.splits.start * ATTENTION_SPLIT);
        let mut blocks = [const { Block { start: 0, k: [std::ptr::null(); _], v: [std::ptr::null(); _] } }; 2];
        let [mut block, mut next] = blocks.each_mut();
        self.locate(first / ATTENTION_BLOCK * ATTENTION_BLOCK, block);
        for split in self.task.splits.clone() {
            let split_start = split * ATTENTION_SPLIT;
            let tokens =
                rows.scores.first(item.position).max(split_start)..item.end().min(split_start + ATTENTION_SPLIT);
            self.start_split();
            while block.start < tokens.end {
                self.locate(block.start + ATTENTION_BLOCK, next);
                // SAFETY: the caller's promise.
                unsafe { self.block(block, next) };
                std::mem::swap(&mut block, &mut next);
            }
            // SAFETY: the caller's promise.
            unsafe { self.end_split(split) };
        }
    }

    /// The position of a query's row.
    fn position(&self, query: usize) -> usize {
        self.task.item.position + self.task.heads.row(self.task.item, query)
    }

    /// Queries of the first KV head whose rows attend to any of `len` tokens from `start`.
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
        let len = self.queries * self.task.heads.value_padded;
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
    #[inline(always)]
    unsafe fn block(&mut self, block: &Block, next: &Block) {
        let (heads, item) = (self.task.heads, self.task.item);
        let queries = self.seeing(block.start, ATTENTION_BLOCK);
        if queries.is_empty() {
            return;
        }
        let (all, dim, value_dim) = (item.kv_heads.len(), heads.dim, heads.value_dim);
        let few = queries.len() <= K::FEW;
        let alike = self.seen(queries.start, block.start) == self.seen(queries.end - 1, block.start);
        // SAFETY: addresses were checked, and their tokens belong to the sequence; a row has the heads of the item side by side.
        let values = unsafe {
            K::keys(&block.k, all, dim, few, self.keys());
            // A weight of zero does not hide what is not finite.
            let together = alike || K::finite(&block.v, all * value_dim);
            together.then(|| K::values(&block.v, all, value_dim, queries.len().div_ceil(K::TILE), self.values()))
        };
        for head in 0..all {
            let first = head * heads.queries(item);
            let queries = first + queries.start..first + queries.end;
            // The first head fetches the rows of all; few queries take so little time that each head fetches a part.
            let rows = match head {
                _ if few => share(ATTENTION_BLOCK, head, all),
                0 => 0..ATTENTION_BLOCK,
                _ => 0..0,
            };
            let next = Some(Next { block: next, rows }).filter(|next| !next.rows.is_empty());
            // SAFETY: the caller's promise; keys and values of all heads were packed.
            unsafe {
                let words = self.keys().add(head * K::key_words(heads.padded));
                let keys = Keys { start: block.start, words, few };
                if let Some(values) = values {
                    self.tiles(queries, keys, values.add(head * K::value_words(heads.value_padded)), next);
                } else {
                    let rows = block.v.map(|row| row.wrapping_add(head * value_dim * size_of::<u16>()));
                    self.by_row(queries, keys, &rows);
                }
            }
        }
    }

    /// The queries of one KV head, with values of each row alone.
    ///
    /// # Safety
    /// As [`run`]; keys are packed, and `v` are the head's elements in the rows of the block.
    #[inline(always)]
    unsafe fn by_row(&mut self, queries: Range<usize>, keys: Keys, v: &BlockRows) {
        let heads = self.task.heads;
        for first in queries.step_by(heads.group) {
            // SAFETY: the caller's promise.
            unsafe {
                let seen = self.seen(first, keys.start);
                let mut rows = [self.zeros; ATTENTION_BLOCK];
                rows[seen.clone()].copy_from_slice(&v[seen]);
                let values = K::values(&rows, 1, heads.value_dim, heads.group.div_ceil(K::TILE), self.values());
                self.tiles(first..first + heads.group, keys, values, None);
            }
        }
    }

    /// Memory of the packed keys.
    fn keys(&mut self) -> *mut u32 {
        self.scratch.keys.room(self.task.item.kv_heads.len() * K::key_words(self.task.heads.padded))
    }

    /// Memory of the prepared values.
    fn values(&mut self) -> *mut u32 {
        self.scratch.values.room(self.task.item.kv_heads.len() * K::value_words(self.task.heads.value_padded))
    }

    /// Tiles of about equal size. The first one prefetches the next block.
    ///
    /// # Safety
    /// As [`run`]; keys are packed, and values are what [`Kernels::values`] yielded.
    #[inline(always)]
    unsafe fn tiles(&mut self, queries: Range<usize>, keys: Keys, values: *const u32, mut next: Option<Next<'_>>) {
        let mut left = queries.len().div_ceil(K::TILE);
        let mut first = queries.start;
        while left > 0 {
            let count = (queries.end - first).div_ceil(left);
            // SAFETY: the caller's promise.
            unsafe { self.tile(first..first + count, keys, values, next.take()) };
            first += count;
            left -= 1;
        }
    }

    /// # Safety
    /// As [`Work::tiles`]; the queries, 1 to [`Kernels::TILE`], attend to the block.
    #[inline(always)]
    unsafe fn tile(&mut self, queries: Range<usize>, keys: Keys, values: *const u32, next: Option<Next<'_>>) {
        let Keys { start, words: keys, few } = keys;
        // Whoever packs values for few queries fetches them. In a latent group they are the keys.
        let values_next = next.as_ref().filter(|_| !few && !self.task.rows.step.kv.is_latent());
        let (first, count) = (queries.start, queries.len());
        let (padded, groups) = (self.task.heads.value_padded, self.task.heads.padded / GROUP);
        let words = groups * K::QUERY_GROUP;
        let elements = self.task.item.kv_heads.len() * self.task.heads.dim;
        let lines = (elements * size_of::<u16>()).div_ceil(64);
        let dots = self.scratch.dots.room::<f32>(QUERIES_MAX * ATTENTION_BLOCK);
        let weights = self.scratch.weights.room::<u32>(QUERIES_MAX * GROUPS * K::QUERY_GROUP);
        // Ends ascend with the row: no query needs more panels than the last.
        let tokens = self.seen(first + count - 1, start).end;
        // SAFETY: queries, keys, values and outputs were packed and sized for these shapes.
        unsafe {
            let scores = Tile {
                queries: self.scratch.queries.room::<u32>(self.queries * words).add(first * words),
                query_stride: words * 4,
                panels: keys,
                in_place: few,
                next: next.as_ref().map_or(std::ptr::null(), |next| &raw const next.block.k[next.rows.start]),
                next_rows: next.as_ref().map_or(0, |next| next.rows.len()),
                lines,
                count: tokens.div_ceil(K::PANEL),
                groups,
                out: dots,
                out_stride: ATTENTION_BLOCK * 4,
            };
            self.kernels.sums(count, scores);
            let mut seen = [const { 0..0 }; QUERIES_MAX];
            for (query, seen) in seen[..count].iter_mut().enumerate() {
                *seen = self.seen(first + query, start);
            }
            let mut factors = [0.0f32; QUERIES_MAX];
            // The dot products of all queries; those that are not seen may be anything.
            let all = std::slice::from_raw_parts_mut(dots, count * ATTENTION_BLOCK);
            let scores = Scores { dots, seen: &seen[..count], scale: self.task.rows.scores.cap(all) };
            let states = &mut self.scratch.softmax[0][first..first + count];
            K::weigh(&scores, states, weights, &mut factors[..count]);
            let weighted = Tile {
                queries: weights,
                query_stride: GROUPS * K::QUERY_GROUP * 4,
                panels: values,
                in_place: false,
                next: values_next.map_or(std::ptr::null(), |next| &raw const next.block.v[next.rows.start]),
                next_rows: values_next.map_or(0, |next| next.rows.len()),
                lines,
                count: self.task.heads.value_dim.div_ceil(K::PANEL),
                groups: GROUPS,
                out: self.scratch.outputs[0].room::<f32>(self.queries * padded).add(first * padded),
                out_stride: padded * 4,
            };
            self.kernels.scaled_sums(&seen[..count], weighted, &factors[..count]);
        }
    }

    /// Keeps the states of the split, or merges them with those before, and finishes rows that end with it.
    ///
    /// # Safety
    /// As [`run`].
    #[inline(always)]
    unsafe fn end_split(&mut self, split: usize) {
        let (heads, item, padded) = (self.task.heads, self.task.item, self.task.heads.value_padded);
        let [now, before] = &mut self.scratch.outputs;
        let (now, before) = (now.room::<f32>(self.queries * padded), before.room::<f32>(self.queries * padded));
        let start = split * ATTENTION_SPLIT;
        let (seeing, each) = (self.seeing(start, ATTENTION_SPLIT), heads.queries(item));
        for query in (0..item.kv_heads.len()).flat_map(|head| head * each + seeing.start..head * each + seeing.end) {
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
                    finish::<K>(&self.task.rows, heads, item, query, o, softmax, self.task.out);
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
                    finish::<K>(&self.task.rows, heads, item, query, total, *total_softmax, self.task.out);
                }
            }
        }
    }
}
