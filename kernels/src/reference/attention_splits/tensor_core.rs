//! Attention of the tensor-core classes.

use super::{BlockOf, Merged, Order};
use crate::host::Scores;
use crate::numerics::lanes::{LANES, merge};
use crate::numerics::{Half, TensorCore, exp2, join_sink_by_exp2, soft_cap_by_exp2};
use std::f32::consts::LOG2_E;

/// The order, with the factor of its scores as a power of two.
pub(super) struct Tensor {
    cores: TensorCore,
    half: Half,
    factor: f32,
    /// Factor and bound of the products, if they have a bound. [`Self::factor`] is then of what it leaves.
    cap: Option<(f32, f32)>,
}

impl Tensor {
    pub(super) fn new(cores: TensorCore, half: Half, scores: Scores<'_>) -> Self {
        let Scores { scale, soft_cap, .. } = scores;
        let factor = if soft_cap.is_some() { LOG2_E } else { scale * LOG2_E };
        Self { cap: soft_cap.map(|cap| (scale, cap)), ..Self::with_factor(cores, half, factor) }
    }

    pub(super) fn with_factor(cores: TensorCore, half: Half, factor: f32) -> Self {
        Self { cores, half, factor, cap: None }
    }

    /// What values of a smaller maximum are multiplied with.
    fn decay(&self, max: f32, of_all: f32) -> f32 {
        exp2((max - of_all) * self.factor)
    }
}

/// The state within a split.
pub(super) struct State {
    max: f32,
    sum: [f32; LANES],
    o: Vec<f32>,
}

impl Order for Tensor {
    type State = State;

    fn empty(&self, dim: usize) -> State {
        State { max: f32::NEG_INFINITY, sum: [0.0; LANES], o: vec![0.0; dim] }
    }

    fn block(&self, state: State, q: &[u16], block: &BlockOf<'_>) -> State {
        let score = |key: &[u16]| {
            let dot = self.cores.dot(self.half, 0.0, q, key);
            self.cap.map_or(dot, |(scale, cap)| soft_cap_by_exp2(dot * scale, cap))
        };
        let scores: Vec<Option<f32>> = block.places().map(|place| block.key(place).map(score)).collect();
        let max = scores.iter().flatten().copied().fold(state.max, max_or_nan);
        let a = self.decay(state.max, max);
        let top = -(max * self.factor);
        let weights: Vec<f32> = scores.iter().map(|s| s.map_or(0.0, |s| exp2(s.mul_add(self.factor, top)))).collect();
        let mut sum = state.sum;
        for (first, weights) in weights.chunks_exact(LANES).enumerate() {
            for (lane, w) in sum.iter_mut().zip(weights) {
                *lane = if first == 0 { lane.mul_add(a, *w) } else { *lane + w };
            }
        }
        let rounded: Vec<u16> = weights.iter().map(|w| self.half.from_f32(*w)).collect();
        let mut o = state.o;
        for (d, o) in o.iter_mut().enumerate() {
            let values: Vec<u16> = block.places().map(|place| block.value(place, d)).collect();
            *o = self.cores.dot(self.half, *o * a, &rounded, &values);
        }
        State { max, sum, o }
    }

    fn finish(&self, state: State) -> Merged {
        Merged { max: state.max, sum: merge(state.sum), o: state.o }
    }

    fn merge(&self, mut earlier: Merged, later: Merged) -> Merged {
        let max = max_or_nan(earlier.max, later.max);
        let (a, b) = (self.decay(earlier.max, max), self.decay(later.max, max));
        earlier.o.iter_mut().zip(&later.o).for_each(|(o, part)| *o = part.mul_add(b, *o * a));
        Merged { max, sum: later.sum.mul_add(b, earlier.sum * a), o: earlier.o }
    }

    fn join(&self, mut merged: Merged, sink: f32) -> Merged {
        let [a, sum] = join_sink_by_exp2(merged.max, self.factor, merged.sum, sink);
        merged.o.iter_mut().for_each(|o| *o *= a);
        Merged { sum, ..merged }
    }

    fn result(&self, merged: &Merged, out: &mut [f32]) {
        let r = 1.0 / merged.sum;
        out.iter_mut().zip(&merged.o).for_each(|(out, o)| *out = o * r);
    }
}

/// The larger one; NaN if either is.
fn max_or_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}
