//! The stream of a host backend: it computes each operation when it is enqueued, so its fences are always done.
//!
//! [`HostBackend`] owns tensors, weights and handles and checks every shape; a [`HostKernels`] only computes on slices.

mod stream;
mod tables;

use crate::kv::KvBinding;
use crate::numerics::KERNEL_REVISION;
use crate::ops::{Plan, RopeTable, Store};
use baton_types::Dtype;
use parking_lot::Mutex;

/// Location of a step's rows in a KV pool.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct KvStep<'a> {
    pub kv: &'a KvBinding,
    /// Layer within group 0.
    pub layer: usize,
    /// The batch; its tables are checked against the pool.
    pub plan: &'a Plan,
}

/// The arithmetic of a host backend. Shapes are checked before a call; all activations are dense and row-major.
#[allow(missing_docs, reason = "the names of methods say it")]
pub trait HostKernels: Send + Sync {
    /// A weight in the format of these kernels.
    type Matrix: Send + Sync;

    fn name(&self) -> String;

    /// Revision of the canonical orders that they implement.
    fn revision(&self) -> u32 {
        KERNEL_REVISION
    }

    /// Rounds `data` (`[n, k]`) to `dtype` and repacks it.
    fn pack(&self, n: usize, k: usize, dtype: Dtype, data: &[f32]) -> Self::Matrix;

    /// Widens row `row` into `out` (`k` elements).
    fn row(&self, matrix: &Self::Matrix, row: usize, out: &mut [f32]);

    /// RMSNorm of rows as long as `gain`.
    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]);

    /// GEMM of `rows` rows.
    fn linear(&self, x: &[f32], w: &Self::Matrix, partitions: usize, store: Store, out: &mut [f32], rows: usize);

    /// Rotates q and k in place and stores k and v; `v` as long as `k`.
    fn rope_store(&self, step: KvStep<'_>, rope: &RopeTable, q: &mut [f32], k: &mut [f32], v: &[f32]);

    /// Causal attention of `q`, rows of `q.len() / plan.rows()`.
    fn attend(&self, step: KvStep<'_>, q: &[f32], scale: f32, out: &mut [f32]);

    /// SwiGLU in place: `gate = silu(gate) * up`.
    fn silu_mul(&self, gate: &mut [f32], up: &[f32]);
}

/// A backend that computes on the calling thread. Calls from several threads are serialized.
pub struct HostBackend<K: HostKernels> {
    kernels: K,
    tables: Mutex<tables::Tables<K::Matrix>>,
}

impl<K: HostKernels> HostBackend<K> {
    pub(crate) fn with_kernels(kernels: K) -> Self {
        Self { kernels, tables: Mutex::default() }
    }
}
