//! Matrices and inputs of GEMMs, packed for the arithmetic of their class.

use super::{CpuKernels, bf16x32, f32fma};
use crate::device::{DeviceError, StoredRows};
use crate::host::Store;
use crate::numerics::Numerics;
use half::bf16;

/// Packed matrices that are multiplied together.
#[derive(Debug)]
pub struct Matrix(Packed);

#[derive(Debug)]
enum Packed {
    F32(Vec<f32fma::Panels>),
    Bf16(bf16x32::Weights),
}

/// Rows as a product takes them; the buffers are reused.
#[derive(Debug, Default)]
pub struct Input {
    f32: Vec<f32>,
    bf16: bf16x32::Rows,
}

impl Matrix {
    pub(super) fn pack(numerics: Numerics, k: usize, parts: &[StoredRows<'_>]) -> Result<Self, DeviceError> {
        Ok(Self(match numerics {
            Numerics::F32Fma { weights } => {
                Packed::F32(parts.iter().map(|part| f32fma::Panels::pack(k, weights, part)).collect())
            }
            Numerics::I8x32 if parts.iter().any(|part| part.format.is_quantized()) => {
                return Err(DeviceError::Failed("class i8x32 is not computed by vectors yet".into()));
            }
            Numerics::Bf16x32 | Numerics::I8x32 => {
                let mut wide = vec![0.0; k];
                let heights: Vec<usize> = parts.iter().map(|part| part.rows).collect();
                Packed::Bf16(bf16x32::Weights::pack(&heights, k, |part, row, out| {
                    parts[part].read(row, &mut wide);
                    out.iter_mut().zip(&wide).for_each(|(to, x)| *to = bf16::from_f32(*x));
                }))
            }
        }))
    }

    /// Widens a row of the first part into `out`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        match &self.0 {
            Packed::F32(parts) => parts[0].row(row, out),
            Packed::Bf16(weights) => weights.row(row, out),
        }
    }
}

impl Input {
    /// Rounds `rows` rows of `x` for products with `w`.
    pub(super) fn round(&mut self, kernels: &CpuKernels, x: &[f32], rows: usize, w: &Matrix) {
        match &w.0 {
            Packed::F32(parts) => {
                self.f32.clear();
                self.f32.extend_from_slice(&x[..rows * parts[0].k]);
            }
            Packed::Bf16(w) => self.bf16.pack(&kernels.threads, kernels.simd, &x[..rows * w.k()], rows, w.k()),
        }
    }
}

/// `out = x * w^T` for each part.
pub(super) fn linear(
    kernels: &CpuKernels,
    x: &Input,
    w: &Matrix,
    partitions: usize,
    store: Store,
    outs: &mut [&mut [f32]],
) {
    match &w.0 {
        Packed::F32(parts) => {
            for (part, out) in parts.iter().zip(outs) {
                f32fma::linear(kernels, &x.f32, part, partitions, store, out);
            }
        }
        Packed::Bf16(w) => bf16x32::linear(&kernels.threads, &x.bf16, w, store, outs),
    }
}
