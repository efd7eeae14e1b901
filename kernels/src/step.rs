//! The input of one step, and its checks against the bounds of a program.

use crate::device::{Bounds, DeviceError, STEPS_MAX};
use crate::kv::KvBinding;
use baton_types::BlockId;

/// Rows of one sequence in a step: `rows` consecutive rows of the batch at positions `position ..`.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSegment {
    /// First position of this segment in its sequence (= tokens whose KV is already in the pool).
    pub position: usize,
    pub rows: usize,
    /// Block table of the group, covering at least `position + rows` tokens.
    pub blocks: Vec<BlockId>,
}

impl StepSegment {
    /// Tokens of the sequence after this segment.
    pub(crate) fn end(&self) -> usize {
        self.position + self.rows
    }
}

/// The rows of one step: any mix of prefill chunks and single decode rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepInput {
    /// Token of each row, segments in order.
    pub ids: Vec<u32>,
    /// One segment per sequence; together they cover the rows `0 .. ids.len()`. Two segments never share a block that one of them stores to.
    pub segments: Vec<StepSegment>,
    /// Rows whose logits are needed, in the order in which they are returned; may be empty.
    pub logit_rows: Vec<usize>,
}

/// The rows of all segments.
pub(crate) fn rows_of(segments: &[StepSegment]) -> usize {
    segments.iter().map(|s| s.rows).sum()
}

impl StepInput {
    /// Checks every bound, so that no operation gets an index out of range. `launched` steps are not finished.
    pub(crate) fn check(
        &self,
        bounds: &Bounds,
        vocab: usize,
        pool: &KvBinding,
        launched: usize,
    ) -> Result<(), DeviceError> {
        let rows = self.ids.len();
        let refuse = |message: String| Err(DeviceError::Step(message));
        if launched >= STEPS_MAX {
            return refuse(format!("{launched} steps are not finished: finish one first"));
        }
        if rows == 0 || rows > bounds.rows_max {
            return refuse(format!("{rows} rows, 1 to {} fit", bounds.rows_max));
        }
        let owned = self.segments.iter().fold(0usize, |sum, s| sum.saturating_add(s.rows));
        if owned != rows {
            return refuse(format!("segments own {owned} rows of {rows}"));
        }
        let logit_rows_max = bounds.logit_rows_max.min(rows);
        if self.logit_rows.len() > logit_rows_max {
            return refuse(format!("{} logit rows, {logit_rows_max} fit", self.logit_rows.len()));
        }
        if let Some(row) = self.logit_rows.iter().find(|&&row| row >= rows) {
            return refuse(format!("logit row {row} of {rows}"));
        }
        if let Some(id) = self.ids.iter().find(|&&id| id as usize >= vocab) {
            return refuse(format!("token {id} of a vocabulary of {vocab}"));
        }
        self.segments.iter().try_for_each(|segment| check_segment(segment, bounds, pool))?;
        self.check_stores(pool)
    }

    /// Checks that no segment's table has a block that another one stores to: rows of one step are not ordered.
    fn check_stores(&self, pool: &KvBinding) -> Result<(), DeviceError> {
        let size = pool.block_tokens();
        let mut stored: Vec<(BlockId, usize)> = Vec::new();
        for (index, s) in self.segments.iter().enumerate() {
            stored.extend(s.blocks[s.position / size..s.end().div_ceil(size)].iter().map(|block| (*block, index)));
        }
        stored.sort_unstable();
        for (index, s) in self.segments.iter().enumerate() {
            for block in &s.blocks[..s.end().div_ceil(size)] {
                let at = stored.partition_point(|(other, _)| other < block);
                let writers = stored[at..].iter().take_while(|(other, _)| other == block);
                if let Some((_, other)) = writers.into_iter().find(|(_, writer)| *writer != index) {
                    return Err(DeviceError::Step(format!(
                        "segment {other} stores to block {block}, which segment {index} uses too"
                    )));
                }
            }
        }
        Ok(())
    }
}

fn check_segment(segment: &StepSegment, bounds: &Bounds, pool: &KvBinding) -> Result<(), DeviceError> {
    let StepSegment { position, rows, blocks } = segment;
    let refuse = |message: String| Err(DeviceError::Step(message));
    let end = position.saturating_add(*rows);
    if *rows == 0 || end > bounds.positions_max {
        return refuse(format!("{rows} rows from position {position}, sequences hold {}", bounds.positions_max));
    }
    if blocks.len() < end.div_ceil(pool.block_tokens()) {
        return refuse(format!("{} blocks for {end} positions", blocks.len()));
    }
    match blocks.iter().find(|block| block.0 >= pool.map.blocks()) {
        Some(block) => refuse(format!("block {block} of a pool of {}", pool.map.blocks())),
        None => Ok(()),
    }
}
