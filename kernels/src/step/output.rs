//! Output of one step.

use crate::sampling::{SampleError, Sampled};

/// What the rows of one slot sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotOutput {
    /// The slot that sampled.
    pub slot: usize,
    /// One per accepted draft, and one more; the last may be an error, e.g. where the logits of its row are not finite.
    /// From then on every row of the slot yields this error, until the sequence leaves.
    pub rows: Vec<Result<Sampled, SampleError>>,
    /// Drafted tokens that were sampled too. The KV of the drafts after them must be stored again.
    pub accepted: usize,
}

/// What a step yields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One per segment that samples, in their order.
    pub sampled: Vec<SlotOutput>,
    /// Of the requested rows.
    pub logits: Logits,
}

/// Logits of some rows, `[rows, vocab]`, f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logits {
    vocab: usize,
    data: Vec<f32>,
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

    /// All rows, one after another.
    pub fn data(&self) -> &[f32] {
        &self.data
    }
}
