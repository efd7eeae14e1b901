//! The buffers of a program: activations of one step, and what a step tells the device. Their addresses never change.

use super::driver::{Address, Buffer, Driver};
use crate::device::{Bounds, DeviceError};
use crate::program::check::Sizes;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a number of 16 bits, and of one of 32.
pub(super) const HALF: usize = 2;
pub(super) const WORD: usize = 4;

/// Boundary at which buffers and their parts begin: the widest load of a kernel, and a whole line of the second-level cache.
const ALIGNED: usize = 256;

/// Activations of one step.
#[derive(Debug)]
pub(super) struct Activations {
    /// Columns of the residual stream.
    pub(super) hidden: usize,
    /// f32 `[rows, hidden]`
    pub(super) residual: Buffer,
    /// Of the selected rows, f32 `[logit rows, hidden]`.
    pub(super) selected: Buffer,
    /// T `[rows, hidden]`
    pub(super) normed: Buffer,
    /// T `[rows, query + 2 * kv]`
    pub(super) qkv: Buffer,
    /// Queries of the selected rows, T `[logit rows, query]`.
    pub(super) query: Buffer,
    /// T `[rows, query]`
    pub(super) attended: Buffer,
    /// T `[rows, 2 * ffn]`
    pub(super) gate_up: Buffer,
    /// T `[rows, ffn]`
    pub(super) inner: Buffer,
    /// f32 `[logit rows, vocab]`
    pub(super) logits: Buffer,
    /// Logits of rows with bias, penalties or allowed tokens, likewise.
    pub(super) adjusted: Buffer,
    /// Partial states of decode attention, f32.
    pub(super) partials: Buffer,
}

impl Activations {
    /// Allocates them. `partials` is in f32.
    pub(super) fn alloc(
        driver: &Arc<dyn Driver>,
        sizes: &Sizes,
        bounds: &Bounds,
        partials: usize,
    ) -> Result<Self, DeviceError> {
        let rows = bounds.rows_max;
        let logit_rows = bounds.logit_rows_max.min(rows);
        let alloc = |rows: usize, cols: usize, bytes: usize, what| Buffer::new(driver, rows * cols * bytes, what);
        Ok(Self {
            hidden: sizes.hidden,
            residual: alloc(rows, sizes.hidden, WORD, "the residual stream")?,
            selected: alloc(logit_rows, sizes.hidden, WORD, "selected rows")?,
            normed: alloc(rows, sizes.hidden, HALF, "norms")?,
            qkv: alloc(rows, sizes.query + 2 * sizes.kv, HALF, "queries, keys and values")?,
            query: alloc(logit_rows, sizes.query, HALF, "selected queries")?,
            attended: alloc(rows, sizes.query, HALF, "attention")?,
            gate_up: alloc(rows, 2 * sizes.ffn, HALF, "gates")?,
            inner: alloc(rows, sizes.ffn, HALF, "the MLP")?,
            logits: alloc(logit_rows, sizes.vocab, WORD, "logits")?,
            adjusted: alloc(logit_rows, sizes.vocab, WORD, "adjusted logits")?,
            partials: alloc(1, partials, WORD, "splits of attention")?,
        })
    }
}

/// What a step tells the device, in one array of i32 that is uploaded at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepLayout {
    pub(super) ids: Range<usize>,
    pub(super) slots: Range<usize>,
    pub(super) positions: Range<usize>,
    pub(super) chosen: Range<usize>,
    pub(super) chosen_slots: Range<usize>,
    pub(super) chosen_positions: Range<usize>,
    /// Of the first selected rows, which sample: the row's number within its slot's, its own token, and its mask.
    pub(super) depths: Range<usize>,
    pub(super) drafts: Range<usize>,
    pub(super) masks: Range<usize>,
    /// Four for each tile.
    pub(super) tiles: Range<usize>,
}

impl StepLayout {
    /// For steps within these bounds, whose prefill rows make at most `tiles` tiles.
    pub(super) fn new(bounds: &Bounds, tiles: usize) -> Self {
        let (rows, logit_rows) = (bounds.rows_max, bounds.logit_rows_max.min(bounds.rows_max));
        let mut end = 0;
        let mut next = |len: usize| {
            let first = end;
            end = (first + len).next_multiple_of(ALIGNED / WORD);
            first..first + len
        };
        Self {
            ids: next(rows),
            slots: next(rows),
            positions: next(rows),
            chosen: next(logit_rows),
            chosen_slots: next(logit_rows),
            chosen_positions: next(logit_rows),
            depths: next(logit_rows),
            drafts: next(logit_rows),
            masks: next(logit_rows),
            tiles: next(4 * tiles),
        }
    }

    /// Bytes of all of it.
    pub(super) fn bytes(&self) -> usize {
        self.tiles.end * WORD
    }

    /// Where a part begins on the device, in an array at `base`.
    pub(super) fn at(base: Address, part: &Range<usize>) -> Address {
        base.plus(part.start * WORD)
    }
}
