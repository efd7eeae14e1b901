//! The scalar backend: the canonical orders of the [crate] docs, implemented literally, without `unsafe` and without optimization.

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod linear;

use crate::device::RopeTable;
use crate::host::{HostDevice, HostKernels, KvStep, ReadRow, Scores, Store};
use crate::numerics::{ATTENTION_SLAB, K_SLAB, Numerics, round};
use std::sync::Arc;

/// A row-major weight, already rounded to its format.
#[derive(Clone, Debug)]
pub struct Rows {
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) data: Vec<f32>,
}

/// Scalar loops in the canonical reduction order.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceKernels {
    numerics: Numerics,
}

impl ReferenceKernels {
    /// Kernels of this arithmetic.
    pub fn new(numerics: Numerics) -> Self {
        Self { numerics }
    }
}

/// The reference that other backends must equal.
pub type ReferenceDevice = HostDevice<ReferenceKernels>;

impl ReferenceDevice {
    /// A new, empty device.
    #[allow(clippy::new_ret_no_self)] // Devices are shared by nature.
    pub fn new(numerics: Numerics) -> Arc<Self> {
        Arc::new(Self::with_kernels(ReferenceKernels::new(numerics)))
    }
}

impl HostKernels for ReferenceKernels {
    type Matrix = Rows;

    fn name(&self) -> String {
        "cpu reference (scalar)".into()
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn pack(&self, n: usize, k: usize, rows: ReadRow<'_>) -> Rows {
        let mut data = vec![0.0; n * k];
        data.chunks_exact_mut(k.max(1)).enumerate().for_each(|(row, out)| rows(row, out));
        data.iter_mut().for_each(|x| *x = round::through(self.numerics.weights(), *x));
        Rows { n, k, data }
    }

    fn row(&self, matrix: &Rows, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&matrix.data[row * matrix.k..(row + 1) * matrix.k]);
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        elementwise::rms_norm(x, gain, eps, out);
    }

    fn linear(&self, x: &[f32], w: &Rows, partitions: usize, store: Store, out: &mut [f32], rows: usize) {
        linear::linear(x, w, partitions, K_SLAB, store, out, rows);
    }

    fn rope_store(&self, step: KvStep<'_>, rope: &RopeTable, q: &mut [f32], k: &mut [f32], v: &[f32]) {
        elementwise::rope_rows(step, rope, q);
        elementwise::rope_rows(step, rope, k);
        attention::store(step, [k, v]);
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores, out: &mut [f32]) {
        attention::attend(step, q, scores, out, |_, t| t.is_multiple_of(ATTENTION_SLAB));
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        elementwise::silu_mul(gate, up);
    }
}
