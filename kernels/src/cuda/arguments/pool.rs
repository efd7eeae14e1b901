//! Arguments of operations on pool memory, which see bytes.

use super::{Element, In, Out, arguments};
use baton_memory::Rows;

/// What the header says first.
#[cfg(any(test, feature = "testing"))]
pub(crate) const INTRO: &str = "Operations on pool memory, which see bytes.";

arguments! {
    /// `rows` rows of `row_bytes` bytes, one every `stride` bytes. Their bytes count as one sequence, row after row.
    struct StridedRows {
        start: u64,
        row_bytes: u64,
        stride: u64,
        rows: u64,
    }

    /// The bytes of rows, copied to other rows of as many bytes that do not overlap them. The shapes may differ.
    struct RowsCopy {
        from: StridedRows,
        to: StridedRows,
    }

    /// Copies rows: within the pool, from the pool to dense memory, or back.
    struct CopyRows {
        from: In<u8>,
        to: Out<u8>,
        /// [count]
        copies: In<RowsCopy>,
        count: i32,
        reserved: i32,
    }

    /// Checksums by algorithm 1 of memory/src/checksum.rs.
    struct SumRows {
        pool: In<u8>,
        /// [count]
        lists: In<StridedRows>,
        /// [count]
        sums: Out<u64>,
        count: i32,
        reserved: i32,
    }
}

impl Element for StridedRows {
    #[cfg(any(test, feature = "testing"))]
    const C: &'static str = "StridedRows";
}

impl From<&Rows> for StridedRows {
    fn from(rows: &Rows) -> Self {
        let Rows { start, row_bytes, stride, rows } = *rows;
        let [start, row_bytes, stride, rows] = [start, row_bytes, stride, rows].map(|x| x as u64);
        Self { start, row_bytes, stride, rows }
    }
}

impl Element for RowsCopy {
    #[cfg(any(test, feature = "testing"))]
    const C: &'static str = "RowsCopy";
}
