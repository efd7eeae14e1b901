//! Algorithms of a recorded library: of the kinds that cuBLASLt was measured to have (`docs/gpu.md`).

use super::super::Algorithm;

/// Divides K, and says so.
pub(crate) const DIVIDES: Algorithm = Algorithm { words: [2, 0, 0, 0, 0, 0, 0, 0], id: 24, divides_k: true };

/// Divides K, and does not say so.
pub(crate) const DIVIDES_SILENTLY: Algorithm = Algorithm { words: [2, 0, 0, 0, 0, 0, 0, 0], id: 16, divides_k: false };

/// Divides K of many rows, and does not say so.
#[cfg(test)]
pub(crate) const DIVIDES_MANY: Algorithm = Algorithm { words: [2, 256, 0, 0, 0, 0, 0, 0], id: 56, divides_k: false };

/// Takes k in order.
pub(crate) const EXACT: Algorithm = Algorithm { words: [1, 0, 0, 0, 0, 0, 0, 0], id: 66, divides_k: false };

/// Parts of K that are summed apart, for so many rows.
pub(super) fn parts(of: &Algorithm, rows: usize) -> usize {
    if rows < of.words[1] as usize { 1 } else { of.words[0] as usize }
}
