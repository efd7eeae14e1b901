//! The SIMD backend: AVX2 + FMA if the machine has it, portable Rust otherwise, several threads; its results always equal the reference bit
//! for bit.
//!
//! Kernels are written once over `simd::Simd`, a vector of eight f32; the level is chosen when the backend is created. Threads and vectors
//! only divide work between output elements, never within one canonical reduction.
#![allow(unsafe_code)] // Vector intrinsics, packed panels and pool memory that others may write to.

mod attention;
mod elementwise;
mod heap_pool;
mod linear;
mod pack;
mod pool_memory;
pub mod roofline;
mod simd;
mod threads;

use crate::device::{DeviceError, RopeTable};
use crate::host::{HostDevice, HostKernels, KvStep, ReadRow, Scores, Store};
use crate::numerics::Numerics;
use simd::{Avx2, Kernel, Portable, Simd};
use std::sync::Arc;
use threads::Threads;

pub use heap_pool::HeapPool;
pub use pack::Panels;

/// The instructions to use. The bits do not depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimdLevel {
    /// Plain Rust, for any CPU.
    Portable,
    /// x86-64 with AVX2, FMA.
    Avx2Fma,
}

impl SimdLevel {
    /// The best level of this machine.
    pub fn detect() -> Self {
        if Avx2::detect().is_some() { Self::Avx2Fma } else { Self::Portable }
    }
}

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
    /// Runs a kernel compiled for this level.
    fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            Self::Portable(simd) => simd.run(kernel),
            Self::Avx2(simd) => simd.run(kernel),
        }
    }
}

/// SIMD kernels and the threads that run them.
pub struct CpuKernels {
    numerics: Numerics,
    level: Level,
    threads: Threads,
}

/// The CPU as a [`crate::device::Device`].
pub type CpuDevice = HostDevice<CpuKernels>;

impl CpuDevice {
    /// Starts the threads. Fails if the machine lacks the requested level or cannot start the threads.
    #[allow(clippy::new_ret_no_self)] // Devices are shared by nature.
    pub fn new(config: CpuConfig) -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self::with_kernels(CpuKernels::new(config)?)))
    }
}

impl CpuKernels {
    /// Starts the threads, see [`CpuDevice::new`].
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        let level = match config.simd.unwrap_or_else(SimdLevel::detect) {
            SimdLevel::Portable => Level::Portable(Portable),
            SimdLevel::Avx2Fma => Level::Avx2(
                Avx2::detect().ok_or_else(|| DeviceError::Failed("this processor has no AVX2 and FMA".into()))?,
            ),
        };
        if !(1..=CpuConfig::THREADS_MAX).contains(&config.threads) {
            let message = format!("{} threads; 1 to {}", config.threads, CpuConfig::THREADS_MAX);
            return Err(DeviceError::Shape { op: "cpu", message });
        }
        let threads = Threads::start(config.threads)
            .map_err(|e| DeviceError::Failed(format!("cannot start {} threads: {e}", config.threads)))?;
        Ok(Self { numerics: config.numerics, level, threads })
    }
}

impl HostKernels for CpuKernels {
    type Matrix = Panels;

    fn name(&self) -> String {
        let level = match self.level {
            Level::Portable(_) => "portable",
            Level::Avx2(_) => "avx2+fma",
        };
        format!("cpu {level}, {} threads", self.threads.count())
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn pack(&self, n: usize, k: usize, rows: ReadRow<'_>) -> Panels {
        Panels::pack(n, k, self.numerics.weights(), rows)
    }

    fn row(&self, matrix: &Panels, row: usize, out: &mut [f32]) {
        matrix.row(row, out);
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        elementwise::rms_norm(self, x, gain, eps, out);
    }

    fn linear(&self, x: &[f32], w: &Panels, partitions: usize, store: Store, out: &mut [f32], rows: usize) {
        linear::linear(self, x, w, partitions, store, out, rows);
    }

    fn rope_store(&self, step: KvStep<'_>, rope: &RopeTable, q: &mut [f32], k: &mut [f32], v: &[f32]) {
        elementwise::rope(self, step, rope, q);
        elementwise::rope(self, step, rope, k);
        pool_memory::store(step, [k, v]);
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores, out: &mut [f32]) {
        attention::attend(self, step, q, scores, out);
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        elementwise::silu_mul(self, gate, up);
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
