//! Attention of `bf16x32` and `i8x32`: even and odd chains, flushed.

use super::{BlockOf, Merged, Order};
use crate::host::Scores;
use crate::numerics::{exp, flushed, join_sink, lanes, soft_cap};
use half::bf16;

/// Lanes of the sum of a block's weights.
const SUM_LANES: usize = 16;

/// The order, with what makes its scores.
pub(super) struct Chains<'a> {
    pub(super) scores: Scores<'a>,
}

impl Order for Chains<'_> {
    type State = Merged;

    fn empty(&self, dim: usize) -> Merged {
        Merged { max: f32::NEG_INFINITY, sum: 0.0, o: vec![0.0; dim] }
    }

    fn block(&self, state: Merged, q: &[u16], block: &BlockOf<'_>) -> Merged {
        let score = |key: &[u16]| {
            let scaled = flushed::dot(q, key) * self.scores.scale;
            self.scores.soft_cap.map_or(scaled, |cap| soft_cap(scaled, cap))
        };
        let scores: Vec<Option<f32>> = block.places().map(|place| block.key(place).map(score)).collect();
        let max = scores.iter().flatten().copied().fold(state.max, f32::max);
        let a = exp(state.max - max);
        let weights: Vec<bf16> =
            scores.iter().map(|s| s.map_or(bf16::ZERO, |s| bf16::from_f32(exp(s - max)))).collect();
        let mut o = state.o;
        for (d, o) in o.iter_mut().enumerate() {
            let values = block.places().map(|place| bf16::from_bits(block.value(place, d)));
            *o = flushed::add_groups(flushed::mul(*o, a), weights.iter().copied().zip(values));
        }
        Merged { max, sum: state.sum.mul_add(a, sum(&weights)), o }
    }

    fn finish(&self, state: Merged) -> Merged {
        state
    }

    /// Not flushed.
    fn merge(&self, mut earlier: Merged, later: Merged) -> Merged {
        let max = earlier.max.max(later.max);
        let (a, b) = (exp(earlier.max - max), exp(later.max - max));
        earlier.o.iter_mut().zip(&later.o).for_each(|(o, part)| *o = part.mul_add(b, *o * a));
        Merged { max, sum: later.sum.mul_add(b, earlier.sum * a), o: earlier.o }
    }

    fn join(&self, mut merged: Merged, sink: f32) -> Merged {
        let [a, sum] = join_sink(merged.max, merged.sum, sink);
        merged.o.iter_mut().for_each(|o| *o *= a);
        Merged { sum, ..merged }
    }

    fn result(&self, merged: &Merged, out: &mut [f32]) {
        out.iter_mut().zip(&merged.o).for_each(|(out, o)| *out = o / merged.sum);
    }
}

/// Sixteen lanes, halved to eight, which merge as always.
fn sum(weights: &[bf16]) -> f32 {
    let mut of = [0.0f32; SUM_LANES];
    weights.iter().enumerate().for_each(|(i, w)| of[i % SUM_LANES] += w.to_f32());
    lanes::merge(std::array::from_fn(|i| of[i] + of[i + SUM_LANES / 2]))
}
