//! The division of a batch into tasks.

use super::Rows;
use crate::numerics::ATTENTION_SPLIT;
use crate::numerics::flushed::GROUP;
use std::ops::Range;

/// Queries of one task: enough to amortize packing a block, few enough to stay in L2 with their states.
const TASK_QUERIES: usize = 96;

/// Tasks per thread, so that uneven tasks balance out.
const TASKS_PER_THREAD: usize = 4;

/// Shapes that all tasks share.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    /// Elements of a row of q and out.
    pub(super) cols: usize,
    pub(super) dim: usize,
    /// `dim` padded to whole groups.
    pub(super) padded: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
}

impl Heads {
    pub(super) fn new(rows: &Rows<'_>) -> Self {
        let (dim, cols) = (rows.step.kv.dim(), rows.q.len() / rows.step.rows());
        Self { cols, dim, padded: dim.next_multiple_of(GROUP), group: cols / dim / rows.step.kv.heads() }
    }

    /// Elements of a softmax state: the padded output, its maximum and its sum.
    pub(super) fn state(self) -> usize {
        self.padded + 2
    }

    /// Offset of a query of an item in q and out.
    pub(super) fn offset(self, item: &Item, query: usize) -> usize {
        let head = item.kv_head * self.group + query % self.group;
        (item.row + query / self.group) * self.cols + head * self.dim
    }
}

/// Some rows of one segment and one KV head. Its queries are `[row][head of the group]`.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) segment: usize,
    /// First row, counted in the batch.
    pub(super) row: usize,
    pub(super) rows: usize,
    /// Position of the first row.
    pub(super) position: usize,
    pub(super) kv_head: usize,
    /// The splits that its rows attend to: from the first split of the first row to the last split of the last one.
    pub(super) splits: Range<usize>,
}

impl Item {
    /// Tokens up to the last row's own.
    pub(super) fn end(&self) -> usize {
        self.position + self.rows
    }
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
    /// Of the states of each item, if items are divided.
    pub(super) offsets: Vec<usize>,
    /// States of divided items: `[item][query][split]`.
    pub(super) states: Vec<f32>,
}

impl Plan {
    pub(super) const fn new() -> Self {
        Self { items: Vec::new(), pieces: Vec::new(), divided: false, offsets: Vec::new(), states: Vec::new() }
    }

    /// Plans tasks for so many threads; with 0, items stay whole.
    pub(super) fn fill(&mut self, rows: &Rows<'_>, heads: Heads, threads: usize) {
        self.collect_items(rows, heads);
        self.divide(threads * TASKS_PER_THREAD);
        self.divided = self.pieces.len() > self.items.len();
        self.offsets.clear();
        let mut states = 0;
        if self.divided {
            for item in &self.items {
                self.offsets.push(states);
                states += item.rows * heads.group * item.splits.len() * heads.state();
            }
        }
        self.states.resize(states.max(self.states.len()), 0.0);
    }

    /// All rows and KV heads, those with the most tokens to read first.
    fn collect_items(&mut self, rows: &Rows<'_>, heads: Heads) {
        self.items.clear();
        let rows_each = (TASK_QUERIES / heads.group).max(1);
        let mut first = 0;
        for (segment, s) in rows.step.segments.iter().enumerate() {
            for start in (0..s.rows).step_by(rows_each) {
                let count = (s.rows - start).min(rows_each);
                let position = s.position + start;
                let splits =
                    rows.scores.first(position) / ATTENTION_SPLIT..(position + count).div_ceil(ATTENTION_SPLIT);
                self.items.extend((0..rows.step.kv.heads()).map(|kv_head| Item {
                    segment,
                    row: first + start,
                    rows: count,
                    position,
                    kv_head,
                    splits: splits.clone(),
                }));
            }
            first += s.rows;
        }
        self.items.sort_unstable_by_key(|item| (std::cmp::Reverse(item.end() * item.rows), item.row, item.kv_head));
    }

    /// The tasks: whole items, or items divided by splits if there are too few items.
    fn divide(&mut self, wanted: usize) {
        self.pieces.clear();
        let total: usize = self.items.iter().map(|item| item.splits.len()).sum();
        let each = if self.items.len() >= wanted { usize::MAX } else { total.div_ceil(wanted) };
        for (index, item) in self.items.iter().enumerate() {
            let mut start = item.splits.start;
            while start < item.splits.end {
                let end = start.saturating_add(each).min(item.splits.end);
                self.pieces.push(Piece { item: index, splits: start..end });
                start = end;
            }
        }
    }
}
