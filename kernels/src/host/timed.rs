//! Kernels that count the time of each operation, for benchmarks.

use super::{HostKernels, KvStep, Scores, Store};
use crate::device::{DeviceError, Role, RopeTable, StoredRows};
use crate::numerics::Numerics;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time by operation, since it was taken last.
#[derive(Clone, Debug, Default)]
pub struct Times(Arc<Mutex<BTreeMap<&'static str, Duration>>>);

impl Times {
    /// The times so far, which begin anew.
    pub fn take(&self) -> BTreeMap<&'static str, Duration> {
        std::mem::take(&mut self.0.lock())
    }

    fn of<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let done = work();
        *self.0.lock().entry(name).or_default() += begin.elapsed();
        done
    }
}

/// Other kernels, timed.
pub(crate) struct Timed<K> {
    pub(crate) inner: K,
    pub(crate) times: Times,
}

impl<K: HostKernels> HostKernels for Timed<K> {
    /// With what the matrix is used for.
    type Matrix = (Role, K::Matrix);
    type Input = K::Input;

    fn name(&self) -> String {
        self.inner.name()
    }

    fn numerics(&self) -> Numerics {
        self.inner.numerics()
    }

    fn revision(&self) -> u32 {
        self.inner.revision()
    }

    fn pack(&self, role: Role, k: usize, parts: &[StoredRows<'_>]) -> Result<Self::Matrix, DeviceError> {
        Ok((role, self.inner.pack(role, k, parts)?))
    }

    fn row(&self, matrix: &Self::Matrix, row: usize, out: &mut [f32]) {
        self.times.of("embed", || self.inner.row(&matrix.1, row, out));
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        self.times.of("norm", || self.inner.rms_norm(x, gain, eps, out));
    }

    fn input(&self, x: &[f32], rows: usize, w: &Self::Matrix, input: &mut K::Input) {
        self.times.of("round", || self.inner.input(x, rows, &w.1, input));
    }

    fn linear(&self, x: &K::Input, w: &Self::Matrix, partitions: usize, store: Store, outs: &mut [&mut [f32]]) {
        let name = match w.0 {
            Role::Qkv => "qkv",
            Role::Out => "out",
            Role::GateUp => "gate_up",
            Role::Down => "down",
            Role::Embedding | Role::Head => "head",
            Role::Vector => "vector",
        };
        self.times.of(name, || self.inner.linear(x, &w.1, partitions, store, outs));
    }

    fn rope_store(&self, step: KvStep<'_>, rope: &RopeTable, q: &mut [f32], k: &mut [f32], v: &[f32]) {
        self.times.of("rope_store", || self.inner.rope_store(step, rope, q, k, v));
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores, out: &mut [f32]) {
        self.times.of("attend", || self.inner.attend(step, q, scores, out));
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        self.times.of("activation", || self.inner.silu_mul(gate, up));
    }
}
