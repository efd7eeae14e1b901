//! The scalar backend: the canonical orders of the [crate] docs, implemented literally, without `unsafe` and without optimization.

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod linear;

use crate::host::{HostBackend, HostKernels, KvStep};
use crate::numerics::{ATTENTION_SLAB, K_SLAB, round};
use crate::ops::{RopeTable, Store};
use baton_types::Dtype;
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
pub struct ReferenceKernels;

/// The reference that other backends must equal.
pub type ReferenceBackend = HostBackend<ReferenceKernels>;

impl ReferenceBackend {
    /// A new, empty backend.
    #[allow(clippy::new_ret_no_self)] // Backends are shared by nature.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::with_kernels(ReferenceKernels))
    }
}

impl HostKernels for ReferenceKernels {
    type Matrix = Rows;

    fn name(&self) -> String {
        "cpu reference (scalar)".into()
    }

    fn pack(&self, n: usize, k: usize, dtype: Dtype, data: &[f32]) -> Rows {
        Rows { n, k, data: data.iter().map(|&x| round::through(dtype, x)).collect() }
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

    fn attend(&self, step: KvStep<'_>, q: &[f32], scale: f32, out: &mut [f32]) {
        attention::attend(step, q, scale, out, |_, t| t.is_multiple_of(ATTENTION_SLAB));
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        elementwise::silu_mul(gate, up);
    }
}
