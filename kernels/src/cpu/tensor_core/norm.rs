//! RMSNorm with the lanes of these classes.

use crate::cpu::simd::{Pass, Wide};
use crate::host::NormOf;
use crate::numerics::lanes::WIDE_LANES;

/// Lanes that are merged first, as in [`crate::numerics::lanes::wide_dot`].
const WARP: usize = 32;

/// Norms rows.
pub(super) struct RmsNorm<'a> {
    pub(super) x: &'a [f32],
    pub(super) norm: NormOf<'a>,
    pub(super) out: &'a mut [f32],
}

impl Pass for RmsNorm<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, _: W) {
        let NormOf { gain, eps } = self.norm;
        for (x, out) in self.x.chunks_exact(gain.len()).zip(self.out.chunks_exact_mut(gain.len())) {
            let mean = squares(x) / gain.len() as f32;
            let r = 1.0 / (mean + eps).sqrt();
            for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
                *out = (x * r) * gain;
            }
        }
    }
}

/// The sum of squares.
#[inline(always)]
fn squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; WIDE_LANES];
    for x in x.chunks(WIDE_LANES) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = x.mul_add(*x, *lane);
        }
    }
    let (runs, _) = lanes.as_chunks_mut::<WARP>();
    let mut sums = [0.0; WIDE_LANES / WARP];
    for (sum, run) in sums.iter_mut().zip(runs) {
        *sum = halved(run);
    }
    halved(&mut sums)
}

/// The sum of a power of two of values: `i` and `i + len / 2`, until one is left.
#[inline(always)]
fn halved<const N: usize>(values: &mut [f32; N]) -> f32 {
    let mut len = N;
    while len > 1 {
        len /= 2;
        for i in 0..len {
            values[i] += values[i + len];
        }
    }
    values[0]
}
