//! The tensor-core classes on a CPU: the bits of the reference, many times as fast.
//!
//! Their dot product is no arithmetic of a CPU, so that a product takes several vector instructions ([`step`]). These kernels are for tests, and
//! for checking what a GPU computes; no CPU serves in these classes.

mod attention;
mod known;
mod matrix;
mod norm;
mod operand;
mod products;
mod step;
#[cfg(test)]
mod tests;

use super::simd::Width;
use super::{CpuConfig, CpuKernels, Shared, elementwise};
use crate::device::{DeviceError, PartShape, Role, RopeTable, StoredRows};
use crate::host::{
    Changes, DeltaHeads, DeltaOf, DeltaRows, HostDevice, HostKernels, KvStep, NormOf, RotatedHeads, Scores, Store,
};
use crate::numerics::{Half, Numerics, TensorCore};
use crate::packed::PackedCache;
use crate::program::Activation;
use crate::step::{SlotSamplers, StepInput, StepOutput};
use baton_types::Digest;
use std::sync::Arc;

pub(super) use known::known_answers;
use matrix::Matrix;
use operand::Operand;

/// SIMD kernels of the classes `tc16f25` and `tc8f24`, and the threads that run them.
pub struct TensorCoreKernels {
    /// What is the same in all classes, and the threads.
    cpu: CpuKernels,
    arithmetic: Arithmetic,
}

/// The arithmetic, and the vectors that compute it.
#[derive(Clone, Copy, Debug)]
struct Arithmetic {
    cores: TensorCore,
    half: Half,
    width: Width,
}

/// The CPU as a [`crate::device::Device`] that computes as tensor cores do.
pub type TensorCoreDevice = HostDevice<TensorCoreKernels>;

impl TensorCoreDevice {
    /// Starts the threads. Fails as [`super::CpuDevice::new`], and if the class is another one.
    #[allow(clippy::new_ret_no_self)] // Devices are shared by nature.
    pub fn new(config: CpuConfig) -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self::with_kernels(TensorCoreKernels::new(config)?)))
    }

    /// As [`TensorCoreDevice::new`]; packed weights of the model with this fingerprint are read from `cache`, and kept there.
    pub fn cached(config: CpuConfig, cache: PackedCache, model: Digest) -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self::with_cache(TensorCoreKernels::new(config)?, cache, model)))
    }
}

impl TensorCoreKernels {
    /// Starts the threads, see [`TensorCoreDevice::new`].
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        let Numerics::TensorCore { cores, half } = config.numerics else {
            let message = format!("class {} is not that of tensor cores", config.numerics);
            return Err(DeviceError::Shape { op: "cpu", message });
        };
        let cpu = CpuKernels::start(config)?;
        Ok(Self { arithmetic: Arithmetic { cores, half, width: Width::of(cpu.simd) }, cpu })
    }
}

impl HostKernels for TensorCoreKernels {
    type Matrix = Matrix;
    type Input = Operand;

    fn name(&self) -> String {
        format!("tensor cores on {}", self.cpu.name())
    }

    fn numerics(&self) -> Numerics {
        self.cpu.numerics()
    }

    fn pack(&self, _: Role, k: usize, parts: &[StoredRows<'_>]) -> Result<Matrix, DeviceError> {
        Matrix::pack(self.arithmetic, k, parts)
    }

    fn packing(&self) -> Option<String> {
        Some(Matrix::packing(self.arithmetic.half))
    }

    fn unpacked(&self, k: usize, parts: &[PartShape]) -> Result<Matrix, DeviceError> {
        Matrix::zeroed(self.arithmetic, k, parts)
    }

    fn packed<'a>(&self, matrix: &'a Matrix) -> Vec<&'a [u8]> {
        matrix.bytes()
    }

    fn packed_mut<'a>(&self, matrix: &'a mut Matrix) -> Vec<&'a mut [u8]> {
        matrix.bytes_mut()
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.cpu.threads.run(tasks, task);
    }

    fn row(&self, matrix: &Matrix, row: usize, out: &mut [f32]) {
        matrix.row(row, out);
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        let cols = gain.len();
        assert_eq!(x.len(), out.len());
        let shared = Shared(out.as_mut_ptr());
        elementwise::pieces(&self.cpu, x.len() / cols, cols, &|start, end| {
            // SAFETY: `pieces` gives each row to one task.
            let out = unsafe { elementwise::rows_of(shared, cols, start, end) };
            let x = &x[start * cols..end * cols];
            self.arithmetic.width.run(norm::RmsNorm { x, norm: NormOf { gain, eps }, out });
        });
    }

    fn input(&self, x: &[f32], rows: usize, w: &Matrix, input: &mut Operand) {
        input.fill(self.arithmetic, &x[..rows * w.k()], w.k());
    }

    fn linear(&self, x: &Operand, w: &Matrix, first: usize, _: usize, store: Store, outs: &mut [&mut [f32]]) {
        matrix::linear(&self.cpu.threads, self.arithmetic, x, w, first, store, outs);
    }

    fn rotate(&self, step: KvStep<'_>, rope: &RopeTable, heads: RotatedHeads, x: &mut [f32]) {
        self.cpu.rotate(step, rope, heads, x);
    }

    fn store(&self, step: KvStep<'_>, plane: usize, x: &[f32]) {
        self.cpu.store(step, plane, x);
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]) {
        attention::attend(&self.cpu.threads, self.arithmetic, step, q, scores, out);
    }

    fn adapt(&self, x: &[f32], changes: Changes<'_>, y: &mut [f32]) {
        self.cpu.adapt(x, changes, y);
    }

    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        self.cpu.activate(activation, gate, up);
    }

    fn gate(&self, gate: &[f32], x: &mut [f32]) {
        self.cpu.gate(gate, x);
    }

    fn convolve(&self, step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]) {
        self.cpu.convolve(step, taps, x);
    }

    fn decays(&self, op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]) {
        self.cpu.decays(op, decay, beta);
    }

    fn delta_rule(&self, step: KvStep<'_>, heads: DeltaHeads, rows: DeltaRows<'_>, out: &mut [f32]) {
        self.cpu.delta_rule(step, heads, rows, out);
    }

    fn add_scaled(&self, x: &[f32], factor: f32, y: &mut [f32]) {
        self.cpu.add_scaled(x, factor, y);
    }

    fn finish_logits(&self, logits: &mut [f32], factor: f32, cap: Option<f32>) {
        self.cpu.finish_logits(logits, factor, cap);
    }

    fn sample(&self, samplers: &mut SlotSamplers, step: &StepInput, logits: &[f32]) -> StepOutput {
        self.cpu.sample(samplers, step, logits)
    }
}
