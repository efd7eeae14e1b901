//! Weights repacked for the GEMM: panels of 16 output features, each a dense `[k, 16]` run that a kernel streams.

use super::simd::{LANES, Simd};
use baton_types::Dtype;
use half::bf16;

/// Output features of one panel: two vectors.
pub(super) const PANEL: usize = 2 * LANES;

/// One k of a bf16 panel: word `j` holds feature `j` in its low half and feature `j + 8` in its high half, so that one load, one
/// shift and one mask widen all sixteen.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct PairStep([u32; LANES]);

/// One k of an f32 panel.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct WideStep([f32; PANEL]);

/// How a panel is stored.
pub(super) trait Step: Copy + Sync {
    /// Sixteen weights, rounded to the format.
    fn pack(weights: [f32; PANEL]) -> Self;
    /// The weight of feature `j`.
    fn at(&self, j: usize) -> f32;
    /// # Safety
    /// `from` points to a live step.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> [S::F; 2];
}

impl Step for PairStep {
    fn pack(weights: [f32; PANEL]) -> Self {
        let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
        Self(std::array::from_fn(|j| bits(weights[j]) | bits(weights[j + LANES]) << 16))
    }
    fn at(&self, j: usize) -> f32 {
        let word = self.0[j % LANES];
        f32::from_bits(if j < LANES { word << 16 } else { word & 0xffff_0000 })
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> [S::F; 2] {
        // SAFETY: a step is eight words, aligned to 32 bytes.
        unsafe { simd.load_bf16_pairs(from.cast()) }
    }
}

impl Step for WideStep {
    fn pack(weights: [f32; PANEL]) -> Self {
        Self(weights)
    }
    fn at(&self, j: usize) -> f32 {
        self.0[j]
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> [S::F; 2] {
        let from = from.cast::<f32>();
        // SAFETY: a step is sixteen f32.
        unsafe { [simd.load(from), simd.load(from.add(LANES))] }
    }
}

#[derive(Debug)]
pub(super) enum Format {
    /// bf16.
    Pairs(Vec<PairStep>),
    /// f32, and f16 widened: exact, and nobody has asked for fast f16 weights yet.
    Wide(Vec<WideStep>),
}

/// A packed weight `[n, k]`; features beyond `n` in the last panel are zero and never stored.
#[derive(Debug)]
pub struct Panels {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) format: Format,
}

impl Panels {
    pub(super) fn pack(n: usize, k: usize, dtype: Dtype, data: &[f32]) -> Self {
        let format = match dtype {
            Dtype::Bf16 => Format::Pairs(steps(n, k, dtype, data)),
            Dtype::F16 | Dtype::F32 => Format::Wide(steps(n, k, dtype, data)),
        };
        Self { n, k, format }
    }

    /// Widens row `row` into `out`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let panel = row / PANEL * self.k..(row / PANEL + 1) * self.k;
        match &self.format {
            Format::Pairs(steps) => out.iter_mut().zip(&steps[panel]).for_each(|(x, s)| *x = s.at(row % PANEL)),
            Format::Wide(steps) => out.iter_mut().zip(&steps[panel]).for_each(|(x, s)| *x = s.at(row % PANEL)),
        }
    }
}

fn steps<T: Step>(n: usize, k: usize, dtype: Dtype, data: &[f32]) -> Vec<T> {
    let mut out = Vec::with_capacity(n.div_ceil(PANEL) * k);
    for panel in (0..n).step_by(PANEL) {
        for i in 0..k {
            let weight = |j: usize| if panel + j < n { data[(panel + j) * k + i] } else { 0.0 };
            out.push(T::pack(std::array::from_fn(|j| crate::numerics::round::through(dtype, weight(j)))));
        }
    }
    out
}
