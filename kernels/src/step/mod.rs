//! The input and the output of one step.
//!
//! A program has a fixed number of *slots*. A slot holds what a device keeps of one sequence between steps: block tables, sampling
//! parameters, token counts and the token sampled last. A step changes slots by [`Delta`]s and names them in its [`SlotRows`], so that a
//! step costs what changed, and its tokens need not be known when it is launched.

mod mask;
mod output;
mod samplers;
mod segments;
mod table;
mod tables;

pub use mask::LateMask;
pub use output::{Logits, SlotOutput, StepOutput};
pub use samplers::{RowSampler, SlotSamplers};
pub use segments::{Launched, Segments};
pub use table::{GroupLimits, SlotTable, StepLimits};
pub use tables::TableSteps;

use crate::sampling::TokenSet;
use baton_types::{BlockId, BlockTable, BlockTables, SamplingParams, TokenId};
use std::ops::Range;
use std::sync::Arc;

/// Rows of one sequence in a step, with its block table of one group: `rows` consecutive rows of the batch at positions `position ..`.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSegment {
    /// First position of this segment in its sequence (= tokens whose KV is already in the pool).
    pub position: usize,
    pub rows: usize,
    /// It has the blocks of all tokens that the rows attend to, and of the rows; of states, the block that the step reads, unless it begins the
    /// sequence, and the one that it writes, which may be the same.
    pub table: BlockTable,
}

impl StepSegment {
    /// Tokens of the sequence after this segment.
    pub(crate) fn end(&self) -> usize {
        self.position + self.rows
    }

    /// Of a group of states: the block of the state before the segment, which a first segment does not have, and that of the state behind it.
    pub(crate) fn states(&self) -> (Option<BlockId>, BlockId) {
        let blocks = &self.table.blocks;
        ((self.position > 0).then(|| blocks[0]), blocks[blocks.len() - 1])
    }
}

/// The rows of all segments.
pub(crate) fn rows_of(segments: &[StepSegment]) -> usize {
    segments.iter().map(|s| s.rows).sum()
}

/// The number of an adapter, which is loaded after the program was compiled ([`crate::device::Executable::load_adapter`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterSlot(pub u32);

/// A sequence that joins a free slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Join {
    /// Slot that it takes.
    pub slot: usize,
    /// Its block table of each group.
    pub tables: BlockTables,
    /// Its tokens so far; the counts for the penalties are made from them.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt.
    pub prompt_len: usize,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Sequence index among the samples of one request, for the random numbers.
    pub sample_index: u32,
    /// Added to the logits of these tokens, each at most once.
    pub bias: Vec<(TokenId, f32)>,
    /// Tokens that may be sampled; `None` is every token.
    pub allowed: Option<Arc<TokenSet>>,
    /// The adapter whose linears all rows of the slot use.
    pub adapter: Option<AdapterSlot>,
}

/// A change of one slot. The deltas of a step take effect in order, before its rows.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq)]
pub enum Delta {
    /// A sequence takes a free slot.
    Join(Box<Join>),
    /// The table of a group keeps its blocks at the indices `first .. keep`, and goes on with these. Those before `first` left a window. A table of
    /// states that keeps none may begin at any index: a state's index changes as the sequence grows.
    Blocks { slot: usize, group: usize, first: usize, keep: usize, blocks: Vec<BlockId> },
    /// The slot is free again. Steps before this one may still be running.
    Leave { slot: usize },
}

/// Token of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowId {
    /// A known token.
    Token(TokenId),
    /// What the slot of the row sampled last, in a step that may still be running.
    LastSampled,
}

impl From<TokenId> for RowId {
    fn from(token: TokenId) -> Self {
        Self::Token(token)
    }
}

/// Consecutive rows of one slot.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SlotRows {
    pub slot: usize,
    /// Position of the first row in its sequence (= tokens whose KV is already in the pool).
    pub position: usize,
    pub rows: usize,
    /// How many of the last rows sample. With more than one, the ids after the first of these are drafted tokens: each is accepted if it
    /// equals what was sampled at the row before, and the first that does not ends the slot's output.
    pub samples: usize,
    /// Allowed tokens of the rows that sample, one each, or none at all. Only sampling waits for them.
    pub masks: Vec<LateMask>,
}

/// One step: any mix of prefill chunks and decode rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInput {
    /// Changes of slots since the step before.
    pub deltas: Vec<Delta>,
    /// Token of each row, segments in order.
    pub ids: Vec<RowId>,
    /// At most one per slot; together they cover the rows `0 .. ids.len()`. Two segments never share a block that one of them stores to.
    pub segments: Vec<SlotRows>,
    /// Rows whose logits come back, in the order in which they are returned; usually none.
    pub logit_rows: Vec<usize>,
    /// Layers whose KV somebody waits for: only they get a fence.
    pub observed: Range<u32>,
}

impl StepInput {
    /// The rows that sample, in order.
    pub fn sampling_rows(&self) -> impl Iterator<Item = usize> + '_ {
        let mut end = 0;
        self.segments.iter().flat_map(move |segment| {
            end += segment.rows;
            end - segment.samples..end
        })
    }

    /// The rows whose logits are computed: those that sample, then those whose logits come back, each once.
    pub fn selected_rows(&self) -> Vec<usize> {
        let mut rows = Vec::new();
        self.select_into(&mut rows);
        rows
    }

    /// The same, into memory that is reused.
    pub(crate) fn select_into(&self, rows: &mut Vec<usize>) {
        rows.clear();
        rows.extend(self.sampling_rows());
        debug_assert!(rows.is_sorted(), "segments are in order of their rows");
        if self.logit_rows.is_empty() {
            return;
        }
        let sampling = rows.len();
        let samples = |rows: &[usize], row| rows[..sampling].binary_search(&row).is_ok();
        for &row in &self.logit_rows {
            if !samples(rows, row) {
                rows.push(row);
            }
        }
        rows[sampling..].sort_unstable();
        rows.dedup();
    }
}
