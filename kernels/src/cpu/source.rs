//! Rows on their way into the packed input of a product.

use super::Level;
use super::elementwise::{RmsNorm, Rows};
use crate::host::NormOf;

/// Dense rows, or rows that a norm makes of them. A packed input takes them a tile at a time, while they are in the first-level cache.
pub(super) struct Source<'a> {
    /// `[rows, k]`
    x: &'a [f32],
    k: usize,
    norm: Option<Normed<'a>>,
}

struct Normed<'a> {
    norm: NormOf<'a>,
    level: Level,
    /// The last rows.
    out: &'a mut Vec<f32>,
}

impl<'a> Source<'a> {
    /// Rows as they are.
    pub(super) fn dense(x: &'a [f32], k: usize) -> Self {
        Self { x, k, norm: None }
    }

    /// Rows after a norm, by way of `out`.
    pub(super) fn normed(x: &'a [f32], norm: NormOf<'a>, level: Level, out: &'a mut Vec<f32>) -> Self {
        Self { x, k: norm.gain.len(), norm: Some(Normed { norm, level, out }) }
    }

    /// These rows, `[rows, k]`.
    pub(super) fn rows(&mut self, rows: std::ops::Range<usize>) -> &[f32] {
        let x = &self.x[rows.start * self.k..rows.end * self.k];
        let Some(Normed { norm, level, out }) = &mut self.norm else { return x };
        if out.len() < x.len() {
            out.resize(x.len(), 0.0);
        }
        let out = &mut out[..x.len()];
        level.run(RmsNorm { rows: Rows::From { x, out }, norm: *norm });
        out
    }
}
