//! Paged attention: divides the batch into tasks of (rows of a segment, KV head).
//!
//! A task packs each block of keys and values once for all its queries: its rows times the query heads that share the KV head. Scores are
//! products with the keys of sixteen tokens as lanes, outputs are products with sixteen elements of the values as lanes.

mod block;
mod states;

use super::Arithmetic;
use super::operand::Operand;
use super::products::Products;
use super::step::LANES;
use crate::cpu::Shared;
use crate::cpu::threads::Threads;
use crate::host::{KvStep, Scores};
use crate::numerics::{ATTENTION_BLOCK, ATTENTION_SPLIT};
use crate::step::StepSegment;
use block::Block;
use states::{Cap, States, Weigh};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Queries of a task, if one row has not more: enough to make little of the packing of blocks.
const TASK_QUERIES: usize = 48;

/// Some rows of a segment, and one KV head.
struct Task<'a> {
    segment: &'a StepSegment,
    head: usize,
    /// The first row, counted in the batch.
    row: usize,
    /// Positions of the rows.
    positions: Range<usize>,
}

/// What all tasks share.
struct Attention<'a> {
    arithmetic: Arithmetic,
    step: KvStep<'a>,
    /// Rows of `cols`.
    q: &'a [f32],
    cols: usize,
    /// Elements of a value.
    value_dim: usize,
    scores: Scores<'a>,
    /// Of scores, as a power of two.
    factor: f32,
}

/// Causal attention of `q`, rows of `q.len() / step.rows()`.
///
/// # Panics
/// If the planes k and v are not of the class's type.
pub(super) fn attend(
    threads: &Threads,
    arithmetic: Arithmetic,
    step: KvStep<'_>,
    q: &[f32],
    scores: Scores<'_>,
    out: &mut [f32],
) {
    let rows = step.rows();
    if rows == 0 {
        return;
    }
    for plane in step.kv.planes() {
        assert_eq!(step.kv.dtype(plane), arithmetic.half.dtype(), "the class reads KV of this type");
    }
    let value_dim = step.value_dim(q, out);
    let factor = if scores.soft_cap.is_some() { LOG2_E } else { scores.scale * LOG2_E };
    let attention = Attention { arithmetic, step, q, cols: q.len() / rows, value_dim, scores, factor };
    let tasks = attention.tasks();
    let group_cols = attention.group() * value_dim;
    let cols = group_cols * step.kv.heads();
    let out = Shared(out.as_mut_ptr());
    threads.run(tasks.len(), &|i| {
        let task = &tasks[i];
        let results = attention.run(task);
        for (row, results) in results.chunks_exact(group_cols).enumerate() {
            let at = (task.row + row) * cols + task.head * group_cols;
            assert!(at + group_cols <= rows * cols);
            // SAFETY: the columns of a KV head in a row of the task, which no other task has; `out` has `rows` of `cols`.
            unsafe { std::ptr::copy_nonoverlapping(results.as_ptr(), out.get().add(at), group_cols) };
        }
    });
}

impl Attention<'_> {
    /// Columns of the query heads that share a KV head.
    fn group_cols(&self) -> usize {
        self.cols / self.step.kv.heads()
    }

    /// Query heads that share a KV head.
    fn group(&self) -> usize {
        self.group_cols() / self.step.kv.dim()
    }

    fn tasks(&self) -> Vec<Task<'_>> {
        let each = (TASK_QUERIES / self.group()).max(1);
        let (mut tasks, mut first) = (Vec::new(), 0);
        for segment in self.step.segments {
            for start in (0..segment.rows).step_by(each) {
                let positions = segment.position + start..segment.position + (start + each).min(segment.rows);
                tasks.extend((0..self.step.kv.heads()).map(|head| Task {
                    segment,
                    head,
                    row: first + start,
                    positions: positions.clone(),
                }));
            }
            first += segment.rows;
        }
        tasks
    }

    /// Tokens that the row at `position` attends to.
    fn seen(&self, position: usize) -> Range<usize> {
        self.scores.first(position)..position + 1
    }

    /// `[row][head of the group][value_dim]`
    fn run(&self, task: &Task<'_>) -> Vec<f32> {
        let arithmetic = self.arithmetic;
        let dim = self.step.kv.dim();
        let mut queries = Vec::with_capacity(task.positions.len() * self.group_cols());
        for row in task.row..task.row + task.positions.len() {
            let at = row * self.cols + task.head * self.group_cols();
            queries.extend_from_slice(&self.q[at..at + self.group_cols()]);
        }
        let mut q = Operand::default();
        q.fill(arithmetic, &queries, dim);
        let mut states = States::new(q.rows, self.value_dim);
        let mut block = Block::new(dim, self.value_dim, arithmetic.cores);
        let tokens = self.scores.first(task.positions.start)..task.positions.end;
        let blocks = tokens.start / ATTENTION_BLOCK..tokens.end.div_ceil(ATTENTION_BLOCK);
        for index in blocks.clone() {
            let start = index * ATTENTION_BLOCK;
            block.load(self.step, task, start..start + ATTENTION_BLOCK, tokens.clone());
            self.add_block(task, start, &q, &block, &mut states);
            if (start + ATTENTION_BLOCK).is_multiple_of(ATTENTION_SPLIT) || index + 1 == blocks.end {
                arithmetic.width.run(states.end_split(self.factor));
            }
        }
        if self.scores.sinks.is_some() {
            let first = task.head * self.group();
            arithmetic.width.run(states.join(self.scores, first..first + self.group(), self.factor));
        }
        states.results(self.value_dim)
    }

    /// Adds a block of tokens to the states of all queries that attend to one of them.
    fn add_block(&self, task: &Task<'_>, start: usize, q: &Operand, block: &Block, states: &mut States) {
        let (arithmetic, width) = (self.arithmetic, self.arithmetic.width);
        // What a row attends to, counted in the block.
        let seen = |position: usize| {
            let of_block = |token: usize| token.saturating_sub(start).min(ATTENTION_BLOCK);
            let tokens = self.seen(position);
            of_block(tokens.start)..of_block(tokens.end)
        };
        let group = self.group();
        let each: Vec<Range<usize>> =
            task.positions.clone().flat_map(|p| std::iter::repeat_n(seen(p), group)).collect();
        // They follow one another: the first token of rows ascends, and so does the last one.
        let Some(first) = each.iter().position(|seen| !seen.is_empty()) else { return };
        let each: Vec<_> = each.into_iter().skip(first).take_while(|seen| !seen.is_empty()).collect();

        let mut scores = vec![[0.0; ATTENTION_BLOCK]; each.len()];
        let mut sums = vec![[0.0; LANES]; each.len()];
        for (index, panel) in block.keys().enumerate() {
            sums.fill([0.0; LANES]);
            width.run(Products { arithmetic, x: q, first, panel, live: None, sums: &mut sums });
            for (scores, sums) in scores.iter_mut().zip(&sums) {
                scores[index * LANES..][..LANES].copy_from_slice(sums);
            }
        }
        for (i, (scores, seen)) in scores.iter_mut().zip(&each).enumerate() {
            if self.scores.soft_cap.is_some() {
                width.run(Cap { of: self.scores, scores });
            }
            let (softmax, factor) = (states.softmax(first + i), self.factor);
            let decay = width.run(Weigh { softmax, factor, seen: seen.clone(), scores });
            states.scale(first + i, decay);
        }
        let mut weights = Operand::default();
        weights.fill(arithmetic, scores.as_flattened(), ATTENTION_BLOCK);
        for (index, panel) in block.values().enumerate() {
            let sums = states.outputs(index, first..first + each.len());
            width.run(Products { arithmetic, x: &weights, first: 0, panel, live: Some(&each), sums });
        }
    }
}
