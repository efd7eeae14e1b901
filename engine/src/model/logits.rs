//! Output of one step.

/// Logits of the requested rows, `[rows, vocab]`, f32.
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
}
