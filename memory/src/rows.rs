//! Which bytes of a pool an operation concerns.

use crate::MemoryError;
use std::ops::Range;

/// `rows` rows of `row_bytes` bytes, one every `stride` bytes from `start` on. Their bytes count as one sequence, row after row. So the KV
/// heads of one shard, out of tokens that hold more heads, are the rows of one operation.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub start: usize,
    pub row_bytes: usize,
    pub stride: usize,
    pub rows: usize,
}

impl Rows {
    /// Contiguous bytes.
    pub const fn run(start: usize, bytes: usize) -> Self {
        Self { start, row_bytes: bytes, stride: bytes, rows: 1 }
    }

    /// Bytes of all rows; saturates where no pool could hold them.
    pub const fn len(&self) -> usize {
        self.row_bytes.saturating_mul(self.rows)
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that all rows lie within a pool of `bytes` bytes.
    ///
    /// # Errors
    /// [`MemoryError::Outside`].
    pub fn check(&self, bytes: usize) -> Result<(), MemoryError> {
        let last = self.rows.saturating_sub(1).checked_mul(self.stride);
        let end = last.and_then(|last| self.start.checked_add(last)?.checked_add(self.row_bytes));
        match end {
            Some(end) if end <= bytes => Ok(()),
            _ => Err(MemoryError::Outside { start: self.start, bytes }),
        }
    }

    /// Where the bytes from `at` on lie, as far as they are contiguous in the pool; `at` is less than [`Rows::len`].
    pub fn place(&self, at: usize) -> Range<usize> {
        if self.stride == self.row_bytes {
            return self.start + at..self.start + self.len();
        }
        let row = self.start + at / self.row_bytes * self.stride;
        row + at % self.row_bytes..row + self.row_bytes
    }

    /// The places of `len` bytes from `at` on, in order; `at + len` is at most [`Rows::len`].
    pub fn places(&self, at: usize, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (rows, end, mut at) = (*self, at + len, at);
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let place = rows.place(at);
                let place = place.start..place.end.min(place.start + (end - at));
                at += place.len();
                place
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_where_their_stride_says() {
        let rows = Rows { start: 100, row_bytes: 4, stride: 10, rows: 3 };
        assert_eq!(rows.len(), 12);
        assert_eq!(rows.places(0, 12).collect::<Vec<_>>(), [100..104, 110..114, 120..124]);
        assert_eq!(rows.places(3, 6).collect::<Vec<_>>(), [103..104, 110..114, 120..121]);
        assert_eq!(rows.places(5, 0).count(), 0);
        let dense = Rows { stride: 4, ..rows };
        assert_eq!((dense.places(3, 6).next(), dense.places(3, 6).count()), (Some(103..109), 1));
        assert_eq!(Rows::run(7, 0).places(0, 0).count(), 0);
    }

    #[test]
    fn rows_outside_are_refused() {
        let rows = Rows { start: 100, row_bytes: 4, stride: 10, rows: 3 };
        assert_eq!(rows.check(124), Ok(()));
        assert_eq!(rows.check(123), Err(MemoryError::Outside { start: 100, bytes: 123 }));
        for rows in [
            Rows { rows: usize::MAX, ..rows },
            Rows { stride: usize::MAX, ..rows },
            Rows { start: usize::MAX, ..rows },
            Rows { row_bytes: usize::MAX, ..rows },
        ] {
            assert!(rows.check(1 << 40).is_err(), "{rows:?}");
        }
        assert_eq!(Rows::run(10, 0).check(10), Ok(()));
    }
}
