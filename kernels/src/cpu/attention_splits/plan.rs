//! The division of a batch into tasks.

use super::Rows;
use crate::cpu::threads::TASKS_PER_THREAD;
use crate::numerics::ATTENTION_SPLIT;
use crate::numerics::flushed::GROUP;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;

/// Queries of one task: the first of these that gives the threads tasks enough. More amortize packing a block, as long as they stay in L2
/// with their states.
const TASK_QUERIES: [usize; 3] = [192, 96, 48];

/// Most queries of an item that has all KV heads.
const TOGETHER_MAX: usize = 48;

/// Shares of a task from which on an item is divided although there are items enough. Less does not delay the others, which begin later; the
/// last rows of a causal prompt have twice the average.
const LONG: usize = 4;

/// Shapes that all tasks share.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    /// Elements of a row of q.
    pub(super) cols: usize,
    pub(super) dim: usize,
    /// `dim` padded to whole groups.
    pub(super) padded: usize,
    /// Elements of a value.
    pub(super) value_dim: usize,
    /// `value_dim` padded to whole groups.
    pub(super) value_padded: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
}

impl Heads {
    /// Of values of so many elements.
    pub(super) fn new(rows: &Rows<'_>, value_dim: usize) -> Self {
        let (dim, cols) = (rows.step.kv.dim(), rows.q.len() / rows.step.rows());
        let [padded, value_padded] = [dim, value_dim].map(|dim| dim.next_multiple_of(GROUP));
        Self { cols, dim, padded, value_dim, value_padded, group: cols / dim / rows.step.kv.heads() }
    }

    /// Elements of a softmax state: the padded output, its maximum and its sum.
    pub(super) fn state(self) -> usize {
        self.value_padded + 2
    }

    /// Queries of one KV head of an item.
    pub(super) fn queries(self, item: &Item) -> usize {
        item.rows * self.group
    }

    /// The row of a query, counted in its item.
    pub(super) fn row(self, item: &Item, query: usize) -> usize {
        query % self.queries(item) / self.group
    }

    /// The query head of a query of an item.
    pub(super) fn head(self, item: &Item, query: usize) -> usize {
        (item.kv_heads.start + query / self.queries(item)) * self.group + query % self.group
    }

    /// Offset of a query of an item in q.
    pub(super) fn offset(self, item: &Item, query: usize) -> usize {
        (item.row + self.row(item, query)) * self.cols + self.head(item, query) * self.dim
    }

    /// The same in out.
    pub(super) fn offset_out(self, item: &Item, query: usize) -> usize {
        let heads = self.cols / self.dim;
        ((item.row + self.row(item, query)) * heads + self.head(item, query)) * self.value_dim
    }
}

/// Some rows of one segment, and usually one KV head. Its queries are `[KV head][row][head of the group]`.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) segment: usize,
    /// First row, counted in the batch.
    pub(super) row: usize,
    pub(super) rows: usize,
    /// Position of the first row.
    pub(super) position: usize,
    pub(super) kv_heads: Range<usize>,
    /// The splits that its rows attend to: from the first split of the first row to the last split of the last one.
    pub(super) splits: Range<usize>,
}

impl Item {
    /// Rows of all KV heads.
    fn work(&self) -> usize {
        self.rows * self.kv_heads.len()
    }

    /// Tokens up to the last row's own.
    pub(super) fn end(&self) -> usize {
        self.position + self.rows
    }
}

/// The splits that so many rows from `position` on attend to.
fn splits(rows: &Rows<'_>, position: usize, count: usize) -> Range<usize> {
    rows.scores.first(position) / ATTENTION_SPLIT..(position + count).div_ceil(ATTENTION_SPLIT)
}

/// Splits of one item.
pub(super) struct Piece {
    pub(super) item: usize,
    pub(super) splits: Range<usize>,
}

/// The tasks of one call, in memory that the next call reuses.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) items: Vec<Item>,
    pub(super) pieces: Vec<Piece>,
    /// Whether items are divided by splits.
    pub(super) divided: bool,
    /// Pieces of each item that are not done yet, if items are divided.
    pub(super) pending: Vec<AtomicUsize>,
    /// Of the states of each item, if items are divided.
    pub(super) offsets: Vec<usize>,
    /// States of divided items: `[item][query][split]`.
    pub(super) states: Vec<f32>,
}

impl Plan {
    pub(super) const fn new() -> Self {
        Self {
            items: Vec::new(),
            pieces: Vec::new(),
            divided: false,
            pending: Vec::new(),
            offsets: Vec::new(),
            states: Vec::new(),
        }
    }

    /// Plans tasks for so many threads, those with the most to read first; items stay `whole`, or may be divided.
    ///
    /// `together`: items of few queries, as in decode, may have all KV heads, where these are tasks enough. A row has the keys of all heads side by
    /// side, and memory is read faster in its order.
    pub(super) fn fill(&mut self, rows: &Rows<'_>, heads: Heads, threads: usize, whole: bool, together: bool) {
        let wanted = threads * TASKS_PER_THREAD;
        let splits = rows.step.segments.iter().map(|s| splits(rows, s.position, s.rows).len());
        let together = together && splits.sum::<usize>() >= wanted;
        for queries in TASK_QUERIES {
            self.collect_items(rows, heads, (queries / heads.group).max(1), together);
            if self.items.len() >= wanted {
                break;
            }
        }
        self.items
            .sort_unstable_by_key(|item| (std::cmp::Reverse(item.end() * item.work()), item.row, item.kv_heads.start));
        self.divide(if whole { None } else { Some(wanted) });
        self.divided = self.pieces.len() > self.items.len();
        self.offsets.clear();
        self.pending.clear();
        let mut states = 0;
        if self.divided {
            for item in &self.items {
                self.offsets.push(states);
                states += item.kv_heads.len() * heads.queries(item) * item.splits.len() * heads.state();
            }
        }
        if self.divided {
            self.pending.resize_with(self.items.len(), AtomicUsize::default);
            self.pieces.iter().for_each(|piece| *self.pending[piece.item].get_mut() += 1);
        }
        self.states.resize(states.max(self.states.len()), 0.0);
    }

    /// All rows and KV heads.
    fn collect_items(&mut self, rows: &Rows<'_>, heads: Heads, rows_each: usize, together: bool) {
        let all = rows.step.kv.heads();
        self.items.clear();
        let mut first = 0;
        for (segment, s) in rows.step.segments.iter().enumerate() {
            for start in (0..s.rows).step_by(rows_each) {
                let count = (s.rows - start).min(rows_each);
                let position = s.position + start;
                let splits = splits(rows, position, count);
                let few = count * heads.group * all <= TOGETHER_MAX;
                let each = if together && few { all } else { 1 };
                self.items.extend((0..all).step_by(each).map(|kv_head| Item {
                    segment,
                    row: first + start,
                    rows: count,
                    position,
                    kv_heads: kv_head..kv_head + each,
                    splits: splits.clone(),
                }));
            }
            first += s.rows;
        }
    }

    /// The tasks: whole items, or items divided by splits where there are too few of them, or one is as long as several tasks should be.
    fn divide(&mut self, wanted: Option<usize>) {
        self.pieces.clear();
        let work = |item: &Item| item.splits.len() * item.work();
        let each = wanted.map_or(usize::MAX, |wanted| self.items.iter().map(work).sum::<usize>().div_ceil(wanted));
        let few = wanted.is_some_and(|wanted| self.items.len() < wanted);
        let limit = if few { each } else { each.saturating_mul(LONG) };
        for (index, item) in self.items.iter().enumerate() {
            let splits = if work(item) > limit { (each / item.work()).max(1) } else { item.splits.len() };
            for start in item.splits.clone().step_by(splits) {
                self.pieces.push(Piece { item: index, splits: start..(start + splits).min(item.splits.end) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::buffer;
    use crate::host::{KvStep, Scores};
    use crate::kv::KvBinding;
    use crate::step::{StepSegment, rows_of};
    use baton_types::{BlockTable, Dtype, KvLayout, KvPoolMap};

    const THREADS: usize = 4;
    const WANTED: usize = THREADS * TASKS_PER_THREAD;
    /// Query heads per KV head.
    const GROUP_HEADS: usize = 3;
    const DIM: usize = 16;

    /// The plan of segments of (cached tokens, rows), whose pieces have each split of each item once.
    fn plan(segments: &[(usize, usize)], kv_heads: usize, whole: bool, together: bool) -> Plan {
        let layout = KvLayout::llama(16, 1, kv_heads as u32, DIM as u32, Dtype::Bf16).unwrap();
        let map = KvPoolMap::try_new(layout, 1).unwrap();
        let kv = KvBinding::try_new(buffer::pool_of(map.bytes()).unwrap(), &map, 0).unwrap();
        let segment = |&(position, rows)| StepSegment { position, rows, table: BlockTable::default() };
        let segments: Vec<_> = segments.iter().map(segment).collect();
        let q = vec![0.0; rows_of(&segments) * kv_heads * GROUP_HEADS * DIM];
        let step = KvStep { kv: &kv, layer: 0, segments: &segments };
        let rows = Rows { step, q: &q, scores: Scores { scale: 1.0, window: None, soft_cap: None, sinks: None } };
        let mut plan = Plan::new();
        plan.fill(&rows, Heads::new(&rows, DIM), THREADS, whole, together);
        for (index, item) in plan.items.iter().enumerate() {
            let pieces = plan.pieces.iter().filter(|piece| piece.item == index);
            assert!(pieces.flat_map(|piece| piece.splits.clone()).eq(item.splits.clone()), "{item:?}");
        }
        plan
    }

    #[test]
    fn a_long_sequence_is_divided_between_threads() {
        let long = (4096, 1);
        let divided = plan(&[long], 1, false, false);
        assert!(divided.divided && divided.pieces.len() >= 2 * THREADS, "{} pieces", divided.pieces.len());
        assert_eq!(divided.items.len(), 1);
        let whole = plan(&[long], 1, true, false);
        assert!(!whole.divided && whole.pieces.len() == 1);
        // Beside items enough, it alone.
        let beside = plan(&[&[(16384, 1)][..], &[(100, 1); 32]].concat(), 1, false, false);
        assert!(beside.divided && beside.pieces.len() > beside.items.len());
        assert!(beside.pieces[1].item == 0 && beside.items[0].segment == 0, "the longest comes first");
    }

    #[test]
    fn many_short_sequences_have_all_kv_heads_together() {
        const KV_HEADS: usize = 4;
        let items = |segments: &[(usize, usize)], together| {
            let plan = plan(segments, KV_HEADS, false, together);
            (plan.items.len(), plan.items[0].kv_heads.len())
        };
        let many = [(100, 1); 2 * WANTED];
        assert_eq!(items(&many, true), (many.len(), KV_HEADS));
        assert_eq!(items(&many, false), (many.len() * KV_HEADS, 1), "levels without tiles");
        let few = [(100, 1); WANTED - 1];
        assert_eq!(items(&few, true), (few.len() * KV_HEADS, 1), "they would be too few tasks");
        let prompts = [(100, TOGETHER_MAX / (GROUP_HEADS * KV_HEADS) + 1); 2 * WANTED];
        assert_eq!(items(&prompts, true), (prompts.len() * KV_HEADS, 1), "too many queries");
    }
}
