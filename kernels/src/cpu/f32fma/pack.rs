//! Weights repacked for the GEMM: panels of 16 output features, each a dense `[k, 16]` array that a kernel reads in order.

use super::linear::Vectors;
use crate::cpu::buffer::{Buffer, Words};
use crate::cpu::simd::LANES;
use crate::device::{DeviceError, StoredRows};
use crate::numerics::round;
use baton_types::Dtype;
use half::bf16;

/// Output features of one panel: two vectors of eight.
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

// SAFETY: an array of words.
unsafe impl Words for PairStep {}
// SAFETY: an array of f32, as large as its alignment.
unsafe impl Words for WideStep {}

/// Storage format of a panel.
pub(super) trait Step: Words + Sync {
    /// Stores the weight of feature `j`, rounded to the format, over a zero.
    fn set(&mut self, j: usize, weight: f32);
    /// The weight of feature `j`.
    fn at(&self, j: usize) -> f32;
    /// # Safety
    /// `from` points to a live step.
    unsafe fn load<V: Vectors>(vectors: V, from: *const Self) -> V::F;
}

impl Step for PairStep {
    #[inline(always)]
    fn set(&mut self, j: usize, weight: f32) {
        self.0[j % LANES] |= u32::from(bf16::from_f32(weight).to_bits()) << if j < LANES { 0 } else { 16 };
    }
    fn at(&self, j: usize) -> f32 {
        let word = self.0[j % LANES];
        f32::from_bits(if j < LANES { word << 16 } else { word & 0xffff_0000 })
    }
    #[inline(always)]
    unsafe fn load<V: Vectors>(vectors: V, from: *const Self) -> V::F {
        // SAFETY: a step is eight words, aligned to 32 bytes.
        unsafe { vectors.load_bf16_pairs(from.cast()) }
    }
}

impl Step for WideStep {
    #[inline(always)]
    fn set(&mut self, j: usize, weight: f32) {
        self.0[j] = weight;
    }
    fn at(&self, j: usize) -> f32 {
        self.0[j]
    }
    #[inline(always)]
    unsafe fn load<V: Vectors>(vectors: V, from: *const Self) -> V::F {
        // SAFETY: a step is sixteen f32.
        unsafe { vectors.load(from.cast()) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// bf16, as pairs in one word: [`PairStep`].
    Pairs,
    /// f32, and f16 widened, which is exact: [`WideStep`]. Fast f16 weights have not been needed yet.
    Wide,
}

/// A packed weight `[n, k]`; features beyond `n` in the last panel are zero and never stored.
#[derive(Debug)]
pub(in crate::cpu) struct Panels {
    pub(in crate::cpu) n: usize,
    pub(in crate::cpu) k: usize,
    pub(super) format: Format,
    pub(super) steps: Buffer,
}

impl Panels {
    pub(in crate::cpu) fn pack(k: usize, dtype: Dtype, stored: &StoredRows<'_>) -> Result<Self, DeviceError> {
        let mut panels = Self::zeroed(stored.rows, k, dtype)?;
        match panels.format {
            Format::Pairs => fill::<PairStep>(&mut panels, |row, out| stored.read(row, out)),
            Format::Wide => fill::<WideStep>(&mut panels, |row, out| {
                stored.read(row, out);
                out.iter_mut().for_each(|x| *x = round::through(dtype, *x));
            }),
        }
        Ok(panels)
    }

    /// Panels of this shape that are all zero.
    pub(in crate::cpu) fn zeroed(n: usize, k: usize, dtype: Dtype) -> Result<Self, DeviceError> {
        let (format, step) = match dtype {
            Dtype::Bf16 => (Format::Pairs, size_of::<PairStep>()),
            Dtype::F32 | Dtype::F16 => (Format::Wide, size_of::<WideStep>()),
        };
        let steps = Buffer::for_weights(n.div_ceil(PANEL) * k * step / size_of::<u32>())?;
        Ok(Self { n, k, format, steps })
    }

    /// All steps as bytes.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        self.steps.bytes()
    }

    /// All steps as bytes, to be written.
    pub(in crate::cpu) fn bytes_mut(&mut self) -> &mut [u8] {
        self.steps.bytes_mut()
    }

    /// Widens row `row` into `out`.
    pub(in crate::cpu) fn row(&self, row: usize, out: &mut [f32]) {
        match self.format {
            Format::Pairs => self.row_of::<PairStep>(row, out),
            Format::Wide => self.row_of::<WideStep>(row, out),
        }
    }

    fn row_of<T: Step>(&self, row: usize, out: &mut [f32]) {
        let panel = &self.steps.steps::<T>()[row / PANEL * self.k..(row / PANEL + 1) * self.k];
        out.iter_mut().zip(panel).for_each(|(x, step)| *x = step.at(row % PANEL));
    }
}

/// Row by row, so that each row is read in order; the panel stays in the cache meanwhile.
pub(super) fn fill<T: Step>(panels: &mut Panels, read: impl Fn(usize, &mut [f32])) {
    let (n, k) = (panels.n, panels.k);
    let mut row = vec![0.0; k];
    for feature in 0..n {
        read(feature, &mut row);
        let panel = &mut panels.steps.steps_mut::<T>()[feature / PANEL * k..(feature / PANEL + 1) * k];
        panel.iter_mut().zip(&row).for_each(|(step, weight)| step.set(feature % PANEL, *weight));
    }
}
