//! Arguments of known answers.

use super::{Element, In, Out, arguments};

/// What the header says first.
#[cfg(any(test, feature = "testing"))]
pub(crate) const INTRO: &str =
    "Known answers: what the instructions under the numerics classes return, for the host to compare.";

arguments! {
    /// An operation with its operands. Numbers of 32 bits are in the lower halves of a and b.
    struct KnownCase {
        a: u64,
        b: u64,
        c: u32,
        operation: u32,
    }

    /// answers[i] = the bits of cases[i]
    struct KnownCases {
        /// [count]
        cases: In<KnownCase>,
        /// [count]
        answers: Out<u64>,
        count: i32,
        reserved: i32,
    }

    /// d[m][n] = c[m][n] + dot(a[m], b[n]) for each tile, k ascending by 16.
    struct KnownTiles {
        /// T [tiles, 16, k]
        a: In<u16>,
        /// T [tiles, 8, k]
        b: In<u16>,
        /// [tiles, 16, 8]
        c: In<f32>,
        /// [tiles, 16, 8]
        d: Out<f32>,
        tiles: i32,
        k: i32,
    }
}

impl Element for KnownCase {
    #[cfg(any(test, feature = "testing"))]
    const C: &'static str = "KnownCase";
}
