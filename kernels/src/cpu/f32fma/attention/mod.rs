//! Paged attention: divides the batch into tasks of (rows of a segment, KV head, slabs).
//!
//! A task widens each KV slab once for all its queries: its rows times the query heads that share the KV head. Usually a task covers all
//! slabs and merges them in sequence. With fewer tasks than the threads could take (decode of a few long sequences) slabs are divided too,
//! and a second pass merges them in the same order.

mod known;
mod slab;
mod task;

use crate::cpu::simd::LANES;
use crate::cpu::threads::{TASKS_PER_THREAD, Threads};
use crate::cpu::{Level, Shared};
use crate::host::{KvStep, Scores};
use crate::numerics::ATTENTION_SLAB;
use std::cell::Cell;
use std::ops::Range;
use task::{Merge, Scratch, SlabTask};

pub(in crate::cpu) use known::known_answers;

/// Rows of one task: enough to amortize widening a slab, few enough to stay in L2 with queries and states.
const TASK_ROWS: usize = 32;

/// Fewest slabs of one task: with fewer, waking a thread costs more than it saves.
const TASK_SLABS_MIN: usize = 4;

thread_local! {
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch::new()) };
    static PLAN: Cell<Plan> = const { Cell::new(Plan::new()) };
}

/// The tasks of one call, in memory that the next call reuses.
#[derive(Default)]
struct Plan {
    items: Vec<Item>,
    pieces: Vec<Piece>,
    /// Of the states of each item, if items are divided.
    offsets: Vec<usize>,
    /// States of divided items: `[item][query][slab]`.
    states: Vec<f32>,
}

/// Slabs of an item.
struct Piece {
    item: usize,
    slabs: Range<usize>,
}

/// Some rows of one segment and one KV head.
#[derive(Clone, Debug)]
struct Item {
    segment: usize,
    /// First row, counted in the batch.
    row: usize,
    rows: usize,
    /// Position of the first row.
    position: usize,
    kv_head: usize,
    /// The slabs that its rows attend to: from the first slab of the first row to the last slab of the last one.
    slabs: Range<usize>,
}

/// Shapes that all tasks share.
#[derive(Clone, Copy)]
struct Heads {
    /// Elements of a row of q.
    cols: usize,
    dim: usize,
    /// `dim` padded to whole vectors.
    stride: usize,
    /// Elements of a value, and these padded to whole vectors.
    value_dim: usize,
    value_stride: usize,
    /// Query heads per KV head.
    group: usize,
}

impl Heads {
    /// Elements of a softmax state: the padded output, its maximum and its sum.
    fn state(self) -> usize {
        self.value_stride + 2
    }

    /// Where rows of heads of `dim` elements have a query's head.
    fn offset(self, item: &Item, query: usize, dim: usize) -> usize {
        let head = item.kv_head * self.group + query % self.group;
        (item.row + query / self.group) * (self.cols / self.dim * dim) + head * dim
    }
}

/// Causal attention on these threads.
pub(in crate::cpu) fn attend(
    threads: &Threads,
    level: Level,
    step: KvStep<'_>,
    q: &[f32],
    scores: Scores<'_>,
    out: &mut [f32],
) {
    let (kv_heads, dim) = (step.kv.heads(), step.kv.dim());
    let cols = q.len() / step.rows();
    let value_dim = step.value_dim(q, out);
    let [stride, value_stride] = [dim, value_dim].map(|dim| dim.next_multiple_of(LANES));
    let heads = Heads { cols, dim, stride, value_dim, value_stride, group: cols / dim / kv_heads };
    let mut plan = PLAN.take();
    plan.collect_items(step, kv_heads, scores);
    plan.divide(threads.count() * TASKS_PER_THREAD);
    let split = plan.pieces.len() > plan.items.len();
    plan.offsets.clear();
    let mut states = 0;
    if split {
        for item in &plan.items {
            plan.offsets.push(states);
            states += item.rows * heads.group * item.slabs.len() * heads.state();
        }
    }
    plan.states.resize(states.max(plan.states.len()), 0.0);
    let states_at = Shared(plan.states.as_mut_ptr());
    let Plan { items, pieces, offsets, .. } = &plan;
    let out = Shared(out.as_mut_ptr());

    threads.run_in_order(pieces.len(), &|i| {
        let Piece { item: index, ref slabs } = pieces[i];
        let item = &items[index];
        let mut scratch = SCRATCH.take();
        // SAFETY: offsets were counted item by item, so each item has its own part of `states`.
        let keep = split.then(|| unsafe { states_at.get().add(offsets[index]) });
        let slabs = slabs.clone();
        level.run(SlabTask { step, heads, item, slabs, q, scores, keep, out: out.get(), scratch: &mut scratch });
        SCRATCH.set(scratch);
    });
    if split {
        threads.run(items.len(), &|i| {
            let item = &items[i];
            let len = item.rows * heads.group * item.slabs.len() * heads.state();
            // SAFETY: the item's own part, see above.
            let states = unsafe { std::slice::from_raw_parts_mut(states_at.get().add(offsets[i]), len) };
            level.run(Merge { heads, item, scores, states, out: out.get() });
        });
    }
    PLAN.set(plan);
}

impl Plan {
    const fn new() -> Self {
        Self { items: Vec::new(), pieces: Vec::new(), offsets: Vec::new(), states: Vec::new() }
    }

    /// All rows and KV heads, those with the most tokens to read first.
    fn collect_items(&mut self, step: KvStep<'_>, kv_heads: usize, scores: Scores<'_>) {
        self.items.clear();
        let mut first = 0;
        for (segment, s) in step.segments.iter().enumerate() {
            for start in (0..s.rows).step_by(TASK_ROWS) {
                let rows = (s.rows - start).min(TASK_ROWS);
                let position = s.position + start;
                let slabs = scores.first(position) / ATTENTION_SLAB..(position + rows).div_ceil(ATTENTION_SLAB);
                self.items.extend((0..kv_heads).map(|kv_head| Item {
                    segment,
                    row: first + start,
                    rows,
                    position,
                    kv_head,
                    slabs: slabs.clone(),
                }));
            }
            first += s.rows;
        }
        self.items
            .sort_unstable_by_key(|item| (std::cmp::Reverse(item.slabs.len() * item.rows), item.row, item.kv_head));
    }

    /// The tasks: whole items, or items divided by slabs if there are fewer than wanted.
    fn divide(&mut self, wanted: usize) {
        let total: usize = self.items.iter().map(|item| item.slabs.len()).sum();
        let each = if self.items.len() >= wanted { usize::MAX } else { total.div_ceil(wanted).max(TASK_SLABS_MIN) };
        self.pieces.clear();
        for (index, item) in self.items.iter().enumerate() {
            let mut start = item.slabs.start;
            while start < item.slabs.end {
                let end = start.saturating_add(each).min(item.slabs.end);
                self.pieces.push(Piece { item: index, slabs: start..end });
                start = end;
            }
        }
    }
}
