//! Kernels that count the time of each operation, for benchmarks.

use super::{
    Changes, DeltaHeads, DeltaOf, DeltaRows, ExpertMatrices, ExpertsOf, GateUpOf, HeadProducts, HostKernels, KvStep,
    LatentMatrices, LatentOf, NormOf, ProjectOf, QkvOf, RotatedHeads, Scores, Scratch, Store,
};
use crate::device::{DeviceError, Role, RopeTable, StoredRows};
use crate::numerics::Numerics;
use crate::program::Activation;
use crate::step::{SlotSamplers, StepInput, StepOutput};
use baton_types::TokenId;
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
    type Matrix = K::Matrix;
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

    fn pack(&self, role: Role, k: usize, parts: &[StoredRows<'_>]) -> Result<K::Matrix, DeviceError> {
        self.inner.pack(role, k, parts)
    }

    fn row(&self, matrix: &K::Matrix, row: usize, out: &mut [f32]) {
        self.inner.row(matrix, row, out);
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        self.inner.rms_norm(x, gain, eps, out);
    }

    fn input(&self, x: &[f32], rows: usize, w: &K::Matrix, input: &mut K::Input) {
        self.inner.input(x, rows, w, input);
    }

    fn linear(
        &self,
        x: &K::Input,
        w: &K::Matrix,
        first: usize,
        partitions: usize,
        store: Store,
        outs: &mut [&mut [f32]],
    ) {
        self.inner.linear(x, w, first, partitions, store, outs);
    }

    fn rotate(&self, step: KvStep<'_>, rope: &RopeTable, heads: RotatedHeads, x: &mut [f32]) {
        self.inner.rotate(step, rope, heads, x);
    }

    fn store(&self, step: KvStep<'_>, plane: usize, x: &[f32]) {
        self.inner.store(step, plane, x);
    }

    fn normed_linear(
        &self,
        w: &K::Matrix,
        norm: Option<NormOf<'_>>,
        x: &[f32],
        rows: usize,
        outs: &mut [&mut [f32]],
        scratch: &mut Scratch<K::Input>,
    ) {
        self.inner.normed_linear(w, norm, x, rows, outs, scratch);
    }

    fn by_head(&self, w: &K::Matrix, heads: HeadProducts, x: &[f32], out: &mut [f32], scratch: &mut Scratch<K::Input>) {
        self.times.of("expand", || self.inner.by_head(w, heads, x, out, scratch));
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]) {
        self.times.of("attend", || self.inner.attend(step, q, scores, out));
    }

    fn adapt(&self, x: &[f32], changes: Changes<'_>, y: &mut [f32]) {
        self.times.of("adapter", || self.inner.adapt(x, changes, y));
    }

    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        self.inner.activate(activation, gate, up);
    }

    fn gate(&self, gate: &[f32], x: &mut [f32]) {
        self.times.of("gate", || self.inner.gate(gate, x));
    }

    fn convolve(&self, step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]) {
        self.inner.convolve(step, taps, x);
    }

    fn decays(&self, op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]) {
        self.inner.decays(op, decay, beta);
    }

    fn delta_rule(&self, step: KvStep<'_>, heads: DeltaHeads, rows: DeltaRows<'_>, out: &mut [f32]) {
        self.inner.delta_rule(step, heads, rows, out);
    }

    fn add_scaled(&self, x: &[f32], factor: f32, y: &mut [f32]) {
        self.inner.add_scaled(x, factor, y);
    }

    fn finish_logits(&self, logits: &mut [f32], factor: f32, cap: Option<f32>) {
        self.times.of("head", || self.inner.finish_logits(logits, factor, cap));
    }

    fn embed(&self, table: &K::Matrix, factor: f32, ids: &[TokenId], residual: &mut [f32]) {
        self.times.of("embed", || self.inner.embed(table, factor, ids, residual));
    }

    fn qkv(
        &self,
        w: &K::Matrix,
        op: &QkvOf<'_>,
        step: KvStep<'_>,
        residual: &[f32],
        query: &mut [f32],
        gate: &mut [f32],
        scratch: &mut Scratch<K::Input>,
    ) {
        self.times.of("qkv", || self.inner.qkv(w, op, step, residual, query, gate, scratch));
    }

    fn gated_delta(
        &self,
        w: &K::Matrix,
        op: &DeltaOf<'_>,
        step: KvStep<'_>,
        residual: &[f32],
        attended: &mut [f32],
        scratch: &mut Scratch<K::Input>,
    ) {
        self.times.of("gated_delta", || self.inner.gated_delta(w, op, step, residual, attended, scratch));
    }

    fn latent(
        &self,
        matrices: &LatentMatrices<'_, K::Matrix>,
        op: &LatentOf<'_>,
        step: KvStep<'_>,
        residual: &[f32],
        query: &mut [f32],
        scratch: &mut Scratch<K::Input>,
    ) {
        self.times.of("latent", || self.inner.latent(matrices, op, step, residual, query, scratch));
    }

    fn project(
        &self,
        w: &K::Matrix,
        op: &ProjectOf<'_>,
        x: &[f32],
        residual: &mut [f32],
        scratch: &mut Scratch<K::Input>,
    ) {
        let name = if op.role == Role::Out { "out" } else { "down" };
        self.times.of(name, || self.inner.project(w, op, x, residual, scratch));
    }

    fn gate_up(
        &self,
        w: &K::Matrix,
        op: &GateUpOf<'_>,
        residual: &[f32],
        inner: &mut [f32],
        scratch: &mut Scratch<K::Input>,
    ) {
        self.times.of("gate_up", || self.inner.gate_up(w, op, residual, inner, scratch));
    }

    fn experts(
        &self,
        matrices: &ExpertMatrices<'_, K::Matrix>,
        op: &ExpertsOf<'_>,
        residual: &mut [f32],
        scratch: &mut Scratch<K::Input>,
    ) {
        self.times.of("experts", || self.inner.experts(matrices, op, residual, scratch));
    }

    fn head(
        &self,
        w: &K::Matrix,
        norm: NormOf<'_>,
        residual: &[f32],
        logits: &mut [f32],
        scratch: &mut Scratch<K::Input>,
    ) {
        self.times.of("head", || self.inner.head(w, norm, residual, logits, scratch));
    }

    fn sample(&self, samplers: &mut SlotSamplers, step: &StepInput, logits: &[f32]) -> StepOutput {
        self.times.of("sample", || self.inner.sample(samplers, step, logits))
    }
}
