//! The SIMD backend: several threads, and the instructions of a [`SimdLevel`], which is chosen when the backend is created. In every class
//! its results equal the reference bit for bit.
//!
//! Products, and attention in splits, have tiles for each instruction set. Most other kernels are written once over `simd::Simd`, a vector
//! of eight f32. Threads and vectors only divide work between output elements, never within one canonical reduction.
#![allow(unsafe_code)] // Vector intrinsics, packed panels and pool memory that others may write to.

mod adapter;
#[cfg(target_arch = "x86_64")]
mod amx;
mod amx_scalar;
mod attention_splits;
mod bf16x32;
mod buffer;
mod by_head;
mod delta;
mod elementwise;
mod f32fma;
#[cfg(target_arch = "x86_64")]
mod flush;
mod fused;
mod i8x32;
mod known;
mod level;
mod lines;
mod matrix;
mod pool_memory;
pub mod roofline;
mod sampling;
mod simd;
mod source;
mod stored;
mod target;
mod tensor_core;
mod threads;

use crate::device::{Device, DeviceError, PartShape, Role, RopeTable, StoredRows};
use crate::host::parts;
use crate::host::{
    Changes, DeltaHeads, DeltaOf, DeltaRows, GateUpOf, HeadProducts, HostDevice, HostKernels, KvStep, NormOf,
    ProjectOf, QkvOf, RotatedHeads, Scores, Scratch, Store, Timed, Times,
};
use crate::numerics::Numerics;
use crate::packed::PackedCache;
use crate::program::Activation;
use crate::step::{SlotSamplers, StepInput, StepOutput};
use baton_types::{Digest, TokenId};
use pool_memory::StoreColumns;
use simd::{Avx2, Kernel, Portable, Simd};
use source::Source;
use std::sync::Arc;
use threads::Threads;

pub use level::SimdLevel;
pub use matrix::{Input, Matrix};
pub use tensor_core::{TensorCoreDevice, TensorCoreKernels};

/// Configuration of a [`CpuDevice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Number of compute threads, including the caller's; 1 to [`CpuConfig::THREADS_MAX`].
    pub threads: usize,
    /// Instructions; `None` uses the best that the machine has.
    pub simd: Option<SimdLevel>,
    /// The arithmetic to compute.
    pub numerics: Numerics,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { threads: 1, simd: None, numerics: Numerics::default() }
    }
}

impl CpuConfig {
    /// Most threads of one backend.
    pub const THREADS_MAX: usize = 1024;
}

#[derive(Clone, Copy)]
enum Level {
    Portable(Portable),
    Avx2(Avx2),
}

impl Level {
    /// The vectors of eight that a level has.
    fn of(level: SimdLevel) -> Self {
        match Avx2::detect() {
            Some(avx2) if level >= SimdLevel::Avx2Fma => Self::Avx2(avx2),
            _ => Self::Portable(Portable),
        }
    }

    /// Runs a kernel compiled for this level.
    fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            Self::Portable(simd) => simd.run(kernel),
            Self::Avx2(simd) => simd.run(kernel),
        }
    }
}

/// SIMD kernels and the threads that run them. The classes of tensor cores have [`TensorCoreKernels`].
pub struct CpuKernels {
    numerics: Numerics,
    /// For kernels over vectors of eight.
    level: Level,
    /// For products of class `f32fma`.
    panels: f32fma::PanelVectors,
    /// For all others.
    simd: SimdLevel,
    threads: Threads,
    /// Memory of the rows that are sampled.
    samplers: sampling::Samplers,
}

/// The CPU as a [`crate::device::Device`].
pub type CpuDevice = HostDevice<CpuKernels>;

impl CpuDevice {
    /// Starts the threads. Fails if the machine lacks the requested level, if its known answers are wrong or there is no memory for them, or
    /// if the threads cannot be started. The classes of tensor cores are refused: they have a [`TensorCoreDevice`].
    #[allow(clippy::new_ret_no_self)] // Devices are shared by nature.
    pub fn new(config: CpuConfig) -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self::with_kernels(CpuKernels::new(config)?)))
    }

    /// As [`CpuDevice::new`]; packed weights of the model with this fingerprint are read from `cache`, and kept there.
    pub fn cached(config: CpuConfig, cache: PackedCache, model: Digest) -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self::with_cache(CpuKernels::new(config)?, cache, model)))
    }
}

/// The CPU as a device of this class: a [`TensorCoreDevice`] of those of tensor cores, else a [`CpuDevice`].
///
/// # Errors
/// As [`CpuDevice::new`].
pub fn device(config: CpuConfig) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(match config.numerics {
        Numerics::TensorCore { .. } => TensorCoreDevice::new(config)?,
        _ => CpuDevice::new(config)?,
    })
}

/// As [`device`]; packed weights of the model with this fingerprint are read from `cache`, and kept there.
///
/// # Errors
/// As [`CpuDevice::new`].
pub fn cached_device(config: CpuConfig, cache: PackedCache, model: Digest) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(match config.numerics {
        Numerics::TensorCore { .. } => TensorCoreDevice::cached(config, cache, model)?,
        _ => CpuDevice::cached(config, cache, model)?,
    })
}

/// As [`CpuDevice::new`]; `times` gets the time of each operation.
pub fn timed(config: CpuConfig, times: Times) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(Arc::new(HostDevice::with_kernels(Timed { inner: CpuKernels::new(config)?, times })))
}

impl CpuKernels {
    /// Starts the threads, see [`CpuDevice::new`].
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        if let Numerics::TensorCore { .. } = config.numerics {
            let message = format!("class {} is that of GPUs: see TensorCoreKernels", config.numerics);
            return Err(DeviceError::Shape { op: "cpu", message });
        }
        Self::start(config)
    }

    /// Of any class: products and attention are refused in those of tensor cores.
    fn start(config: CpuConfig) -> Result<Self, DeviceError> {
        let simd = config.simd.map_or_else(SimdLevel::detect, SimdLevel::checked)?;
        if !(1..=CpuConfig::THREADS_MAX).contains(&config.threads) {
            let message = format!("{} threads; 1 to {}", config.threads, CpuConfig::THREADS_MAX);
            return Err(DeviceError::Shape { op: "cpu", message });
        }
        let threads = Threads::start(config.threads)
            .map_err(|e| DeviceError::Failed(format!("cannot start {} threads: {e}", config.threads)))?;
        let panels = f32fma::PanelVectors::of(simd);
        let (level, samplers) = (Level::of(simd), sampling::Samplers::default());
        Ok(Self { numerics: config.numerics, level, panels, simd, threads, samplers })
    }
}

impl HostKernels for CpuKernels {
    type Matrix = Matrix;
    type Input = Input;

    fn name(&self) -> String {
        format!("cpu {}, {} threads", self.simd.name(), self.threads.count())
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn pack(&self, _: Role, k: usize, parts: &[StoredRows<'_>]) -> Result<Matrix, DeviceError> {
        Matrix::pack(self, k, parts)
    }

    fn packing(&self) -> Option<String> {
        Some(Matrix::packing(self))
    }

    fn unpacked(&self, k: usize, parts: &[PartShape]) -> Result<Matrix, DeviceError> {
        Matrix::zeroed(self, k, parts)
    }

    fn packed<'a>(&self, matrix: &'a Matrix) -> Vec<&'a [u8]> {
        matrix.bytes()
    }

    fn packed_mut<'a>(&self, matrix: &'a mut Matrix) -> Vec<&'a mut [u8]> {
        matrix.bytes_mut()
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.threads.run(tasks, task);
    }

    fn row(&self, matrix: &Matrix, row: usize, out: &mut [f32]) {
        matrix.row(row, out);
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        elementwise::rms_norm(self, x, NormOf { gain, eps }, out);
    }

    fn input(&self, x: &[f32], rows: usize, w: &Matrix, input: &mut Input) {
        input.fill(self, w, rows, &mut Source::dense(x, w.k()));
    }

    fn linear(&self, x: &Input, w: &Matrix, first: usize, partitions: usize, store: Store, outs: &mut [&mut [f32]]) {
        matrix::linear(self, x, w, first, partitions, store, outs);
    }

    fn rotate(&self, step: KvStep<'_>, rope: &RopeTable, heads: RotatedHeads, x: &mut [f32]) {
        elementwise::rope(self, step, rope, heads, x);
    }

    fn store(&self, step: KvStep<'_>, plane: usize, data: &[f32]) {
        self.level.run(StoreColumns { step, plane, rows: 0..step.rows(), first: 0, data });
    }

    fn normed_linear(
        &self,
        w: &Matrix,
        norm: Option<NormOf<'_>>,
        x: &[f32],
        rows: usize,
        outs: &mut [&mut [f32]],
        _: &mut Scratch<Input>,
    ) {
        fused::normed_linear(self, w, norm, &x[..rows * w.k()], outs);
    }

    fn by_head(&self, w: &Matrix, heads: HeadProducts, x: &[f32], out: &mut [f32], _: &mut Scratch<Input>) {
        by_head::by_head(self, w, heads, x, out);
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]) {
        match self.numerics {
            Numerics::F32Fma { .. } => f32fma::attend(&self.threads, self.level, step, q, scores, out),
            Numerics::Bf16x32 | Numerics::I8x32 => {
                attention_splits::attend(&self.threads, self.simd, step, q, scores, out)
            }
            Numerics::TensorCore { .. } => unreachable!("TensorCoreKernels attend by themselves"),
        }
    }

    fn adapt(&self, x: &[f32], changes: Changes<'_>, y: &mut [f32]) {
        adapter::adapt(self, x, changes, y);
    }

    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        elementwise::activate(self, activation, gate, up);
    }

    fn gate(&self, gate: &[f32], x: &mut [f32]) {
        elementwise::gate(self, gate, x);
    }

    fn convolve(&self, step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]) {
        delta::convolve(self, step, taps, x);
    }

    fn decays(&self, op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]) {
        delta::decays(self, op, decay, beta);
    }

    fn delta_rule(&self, step: KvStep<'_>, heads: DeltaHeads, rows: DeltaRows<'_>, out: &mut [f32]) {
        delta::delta_rule(self, step, heads, rows, out);
    }

    fn add_scaled(&self, x: &[f32], factor: f32, y: &mut [f32]) {
        elementwise::add_scaled(self, x, factor, y);
    }

    fn finish_logits(&self, logits: &mut [f32], factor: f32, cap: Option<f32>) {
        elementwise::finish_logits(self, logits, factor, cap);
    }

    fn embed(&self, table: &Matrix, factor: f32, ids: &[TokenId], residual: &mut [f32]) {
        fused::embed(self, table, factor, ids, residual);
    }

    fn qkv(
        &self,
        w: &Matrix,
        op: &QkvOf<'_>,
        step: KvStep<'_>,
        residual: &[f32],
        query: &mut [f32],
        gate: &mut [f32],
        scratch: &mut Scratch<Input>,
    ) {
        // A task has some heads of a row.
        let of_heads = |norms: &[NormOf<'_>; 2]| norms.iter().all(|norm| norm.gain.len() == step.kv.dim());
        match op.norms.is_none_or(|norms| of_heads(&norms)) {
            true => fused::qkv(self, w, op, step, residual, query, gate),
            false => parts::qkv(self, w, op, step, residual, query, gate, scratch, None),
        }
    }

    fn project(&self, w: &Matrix, op: &ProjectOf<'_>, x: &[f32], residual: &mut [f32], scratch: &mut Scratch<Input>) {
        match op.is_plain() {
            true => fused::project(self, w, op, x, residual),
            // A norm needs whole rows.
            false => parts::project(self, w, op, x, residual, scratch, None),
        }
    }

    fn gate_up(&self, w: &Matrix, op: &GateUpOf<'_>, residual: &[f32], inner: &mut [f32], _: &mut Scratch<Input>) {
        fused::gate_up(self, w, op, residual, inner);
    }

    fn head(&self, w: &Matrix, norm: NormOf<'_>, residual: &[f32], logits: &mut [f32], _: &mut Scratch<Input>) {
        fused::head(self, w, norm, residual, logits);
    }

    fn sample(&self, samplers: &mut SlotSamplers, step: &StepInput, logits: &[f32]) -> StepOutput {
        samplers.sample_by(&self.rows(), step, logits)
    }
}

/// A pointer that tasks share to write disjoint parts of one output.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: `Shared` only carries the address; code that dereferences it shows that no two tasks touch the same element.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The address. A method, so that closures capture the whole `Shared` and stay `Sync`.
    fn get(self) -> *mut T {
        self.0
    }
}
