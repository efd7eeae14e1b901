//! Input and output of one step.

use super::{ModelConfig, ModelError};
use baton_kernels::ops::PlanSegment;
use baton_types::{KvPoolMap, TokenId};

/// The rows of one step: any mix of prefill chunks and single decode rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// Token of each row, segments in order.
    pub ids: Vec<TokenId>,
    /// One segment per sequence; together they cover the rows `0 .. ids.len()`. Two segments never share a block they write.
    pub segments: Vec<PlanSegment>,
    /// Rows whose logits are needed, in the order in which they are returned; may be empty.
    pub logit_rows: Vec<usize>,
}

impl StepBatch {
    /// Checks every bound, so that no operation gets an index out of range.
    pub(super) fn check(&self, config: &ModelConfig, vocab: usize, map: &KvPoolMap) -> Result<(), ModelError> {
        let rows = self.ids.len();
        let refuse = |message: String| Err(ModelError::Batch(message));
        if rows == 0 || rows > config.rows_max {
            return refuse(format!("{rows} rows, 1 to {} fit", config.rows_max));
        }
        let owned: usize = self.segments.iter().map(|s| s.rows).sum();
        if owned != rows {
            return refuse(format!("segments own {owned} rows of {rows}"));
        }
        if self.logit_rows.len() > config.logit_rows_max.min(rows) {
            return refuse(format!("{} logit rows, {} fit", self.logit_rows.len(), config.logit_rows_max.min(rows)));
        }
        if let Some(row) = self.logit_rows.iter().find(|&&row| row >= rows) {
            return refuse(format!("logit row {row} of {rows}"));
        }
        if let Some(id) = self.ids.iter().find(|&&id| id as usize >= vocab) {
            return refuse(format!("token {id} of a vocabulary of {vocab}"));
        }
        self.segments.iter().try_for_each(|segment| check_segment(segment, config, map))
    }
}

fn check_segment(segment: &PlanSegment, config: &ModelConfig, map: &KvPoolMap) -> Result<(), ModelError> {
    let PlanSegment { position, rows, blocks } = segment;
    let refuse = |message: String| Err(ModelError::Batch(message));
    let end = position.saturating_add(*rows);
    if *rows == 0 || end > config.model_len_max {
        return refuse(format!("{rows} rows from position {position}, sequences hold {}", config.model_len_max));
    }
    if blocks.len() < map.layout().blocks_for(end) {
        return refuse(format!("{} blocks for {end} positions", blocks.len()));
    }
    match blocks.iter().find(|block| block.0 >= map.blocks()) {
        Some(block) => refuse(format!("block {block} of a pool of {}", map.blocks())),
        None => Ok(()),
    }
}

/// Logits of the requested rows, `[rows, vocab]`, f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logits {
    pub(super) vocab: usize,
    pub(super) data: Vec<f32>,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl Logits {
    /// Rows of `vocab` logits each.
    ///
    /// # Panics
    /// If `data` does not hold whole rows.
    pub fn new(vocab: usize, data: Vec<f32>) -> Self {
        assert!(vocab > 0 && data.len().is_multiple_of(vocab), "{} logits are no rows of {vocab}", data.len());
        Self { vocab, data }
    }

    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.vocab).unwrap_or(0)
    }

    /// Logits of the `i`-th requested row, `[vocab]`.
    ///
    /// # Panics
    /// If `i` is not below [`Logits::rows`].
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }
}
