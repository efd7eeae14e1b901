//! Norm, rotation and activation: vectors along a row, rows divided among threads.

use super::simd::{Kernel, LANES, Simd, gelu_tanh, silu};
use super::{CpuKernels, Shared};
use crate::device::RopeTable;
use crate::host::{KvStep, NormOf, RotatedHeads, parts};
use crate::numerics;
use crate::program::Activation;

/// Elements below which waking threads costs more than the work.
const TASK_ELEMENTS: usize = 8 << 10;

/// Runs `kernel` on pieces of `rows` rows, on several threads if there is enough work.
pub(super) fn pieces(kernels: &CpuKernels, rows: usize, cols: usize, run: &(dyn Fn(usize, usize) + Sync)) {
    let piece = TASK_ELEMENTS.div_ceil(cols.max(1)).max(1);
    kernels.threads.run(rows.div_ceil(piece), &|task| run(task * piece, ((task + 1) * piece).min(rows)));
}

/// Rows `start..end` of a shared output.
///
/// # Safety
/// The rows lie in the output, and no other task touches them.
pub(super) unsafe fn rows_of<'a>(out: Shared<f32>, cols: usize, start: usize, end: usize) -> &'a mut [f32] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(out.get().add(start * cols), (end - start) * cols) }
}

pub(super) fn rms_norm(kernels: &CpuKernels, x: &[f32], norm: NormOf<'_>, out: &mut [f32]) {
    let cols = norm.gain.len();
    assert_eq!(x.len(), out.len());
    let shared = Shared(out.as_mut_ptr());
    pieces(kernels, x.len() / cols, cols, &|start, end| {
        // SAFETY: `pieces` gives each row to one task.
        let out = unsafe { rows_of(shared, cols, start, end) };
        kernels.level.run(RmsNorm { rows: Rows::From { x: &x[start * cols..end * cols], out }, norm });
    });
}

/// Rows to norm.
pub(super) enum Rows<'a> {
    From { x: &'a [f32], out: &'a mut [f32] },
    InPlace(&'a mut [f32]),
}

pub(super) struct RmsNorm<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) norm: NormOf<'a>,
}

impl Kernel for RmsNorm<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let NormOf { gain, eps } = self.norm;
        match self.rows {
            Rows::From { x, out } => {
                for (x, out) in x.chunks_exact(gain.len()).zip(out.chunks_exact_mut(gain.len())) {
                    let r = factor(s, x, eps);
                    for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
                        *out = (x * r) * gain;
                    }
                }
            }
            Rows::InPlace(x) => {
                for x in x.chunks_exact_mut(gain.len()) {
                    let r = factor(s, x, eps);
                    for (x, gain) in x.iter_mut().zip(gain) {
                        *x = (*x * r) * gain;
                    }
                }
            }
        }
    }
}

/// What a row is multiplied by.
#[inline(always)]
fn factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let mean = s.merge(square_lanes(s, x)) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Lane sums of squares, the tail padded with zeros.
#[inline(always)]
fn square_lanes<S: Simd>(s: S, x: &[f32]) -> S::F {
    let mut acc = s.splat(0.0);
    let (whole, tail) = x.as_chunks::<LANES>();
    for chunk in whole {
        // SAFETY: a chunk is one vector.
        let x = unsafe { s.load(chunk.as_ptr()) };
        acc = s.fma(x, x, acc);
    }
    if !tail.is_empty() {
        let mut padded = [0.0; LANES];
        padded[..tail.len()].copy_from_slice(tail);
        // SAFETY: as above.
        let x = unsafe { s.load(padded.as_ptr()) };
        acc = s.fma(x, x, acc);
    }
    acc
}

/// Rotates a part of every head of every row of the step.
pub(super) fn rope(kernels: &CpuKernels, step: KvStep<'_>, table: &RopeTable, heads: RotatedHeads, x: &mut [f32]) {
    let rows = step.rows();
    if rows == 0 {
        return;
    }
    let cols = x.len() / rows;
    let shared = Shared(x.as_mut_ptr());
    pieces(kernels, rows, cols, &|start, end| {
        // SAFETY: `pieces` gives each row to one task.
        let x = unsafe { rows_of(shared, cols, start, end) };
        for (row, position) in x.chunks_exact_mut(cols).zip(step.positions_of(start..end)) {
            kernels.level.run(Rotate::new(row, heads, table, position));
        }
    });
}

/// Rotates the heads of a row.
pub(super) struct Rotate<'a> {
    row: &'a mut [f32],
    heads: RotatedHeads,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl<'a> Rotate<'a> {
    #[inline(always)]
    pub(super) fn new(row: &'a mut [f32], heads: RotatedHeads, table: &'a RopeTable, position: usize) -> Self {
        let half = table.dim / 2;
        let at = position * half..(position + 1) * half;
        Self { row, heads, cos: &table.cos[at.clone()], sin: &table.sin[at] }
    }
}

impl Kernel for Rotate<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, _: S) {
        // Scalar code: every element is independent, so the compiler's vectorization rounds alike.
        let half = self.cos.len();
        let sin = &self.sin[..half];
        for head in self.row.chunks_exact_mut(self.heads.dim) {
            let (low, high) = head[self.heads.first..].split_at_mut(half);
            let high = &mut high[..half];
            for i in 0..half {
                let (a, b) = (low[i], high[i]);
                low[i] = a.mul_add(self.cos[i], -(b * sin[i]));
                high[i] = b.mul_add(self.cos[i], a * sin[i]);
            }
        }
    }
}

pub(super) fn activate(kernels: &CpuKernels, activation: Activation, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    let shared = Shared(gate.as_mut_ptr());
    pieces(kernels, up.len(), 1, &|start, end| {
        // SAFETY: `pieces` gives each element to one task.
        let gate = unsafe { rows_of(shared, 1, start, end) };
        kernels.level.run(ActivateGate { activation, gate, up: &up[start..end] });
    });
}

/// `gate = activation(gate) * up`
pub(super) struct ActivateGate<'a> {
    pub(super) activation: Activation,
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a [f32],
}

impl Kernel for ActivateGate<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        match self.activation {
            Activation::Silu => activate_by(s, self.gate, self.up, silu, numerics::silu),
            Activation::GeluTanh => activate_by(s, self.gate, self.up, gelu_tanh, numerics::gelu_tanh),
            // Scalar code: every element is independent, so the compiler's vectorization rounds alike.
            Activation::ClampedSwiglu { alpha, limit } => {
                for (gate, up) in self.gate.iter_mut().zip(self.up) {
                    *gate = numerics::clamped_swiglu(*gate, *up, alpha, limit);
                }
            }
        }
    }
}

/// With the function of vectors, and of single elements.
#[inline(always)]
fn activate_by<S: Simd>(s: S, gate: &mut [f32], up: &[f32], of: fn(S, S::F) -> S::F, of_one: fn(f32) -> f32) {
    let (gates, gate_tail) = gate.as_chunks_mut::<LANES>();
    let (ups, up_tail) = up.as_chunks::<LANES>();
    for (gate, up) in gates.iter_mut().zip(ups) {
        // SAFETY: a chunk is one vector.
        unsafe {
            let product = s.mul(of(s, s.load(gate.as_ptr())), s.load(up.as_ptr()));
            s.store(gate.as_mut_ptr(), product);
        }
    }
    for (gate, up) in gate_tail.iter_mut().zip(up_tail) {
        *gate = of_one(*gate) * up;
    }
}

/// `x = x / (1 + exp(-gate))`
pub(super) fn gate(kernels: &CpuKernels, gate: &[f32], x: &mut [f32]) {
    assert_eq!(gate.len(), x.len());
    let shared = Shared(x.as_mut_ptr());
    pieces(kernels, gate.len(), 1, &|start, end| {
        // SAFETY: `pieces` gives each element to one task.
        let x = unsafe { rows_of(shared, 1, start, end) };
        kernels.level.run(Gate { gate: &gate[start..end], x });
    });
}

struct Gate<'a> {
    gate: &'a [f32],
    x: &'a mut [f32],
}

impl Kernel for Gate<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, _: S) {
        // Scalar code: every element is independent, so the compiler's vectorization rounds alike.
        self.x.iter_mut().zip(self.gate).for_each(|(x, gate)| *x = numerics::gated(*x, *gate));
    }
}

/// `y += factor * x`
pub(super) fn add_scaled(kernels: &CpuKernels, x: &[f32], factor: f32, y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    let shared = Shared(y.as_mut_ptr());
    pieces(kernels, x.len(), 1, &|start, end| {
        // SAFETY: `pieces` gives each element to one task.
        let y = unsafe { rows_of(shared, 1, start, end) };
        y.iter_mut().zip(&x[start..end]).for_each(|(y, x)| *y += factor * x);
    });
}

/// `logit = soft_cap(factor * logit)`
pub(super) fn finish_logits(kernels: &CpuKernels, logits: &mut [f32], factor: f32, cap: Option<f32>) {
    let (len, shared) = (logits.len(), Shared(logits.as_mut_ptr()));
    pieces(kernels, len, 1, &|start, end| {
        // SAFETY: `pieces` gives each element to one task.
        let logits = unsafe { rows_of(shared, 1, start, end) };
        kernels.level.run(FinishLogits { logits, factor, cap });
    });
}

struct FinishLogits<'a> {
    logits: &'a mut [f32],
    factor: f32,
    cap: Option<f32>,
}

impl Kernel for FinishLogits<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, _: S) {
        // Scalar code: every element is independent, so the compiler's vectorization rounds alike.
        parts::finish_logits(self.logits, self.factor, self.cap);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::exp;
    use crate::cpu::{Avx2, Portable};
    use baton_skips::{Need, skipped};

    struct ExpBits(Vec<f32>);

    impl Kernel for ExpBits {
        type Out = Vec<u32>;
        #[inline(always)]
        fn call<S: Simd>(self, s: S) -> Vec<u32> {
            let mut out = vec![0.0; self.0.len()];
            for (x, out) in self.0.chunks_exact(LANES).zip(out.chunks_exact_mut(LANES)) {
                // SAFETY: a chunk is one vector.
                unsafe { s.store(out.as_mut_ptr(), exp(s, s.load(x.as_ptr()))) };
            }
            out.into_iter().map(f32::to_bits).collect()
        }
    }

    #[test]
    fn vector_exp_has_the_bits_of_the_scalar() {
        // Every 8191st bit pattern except NaNs: both signs, subnormals, infinities.
        let all = (0..=u32::MAX).step_by(8191).map(f32::from_bits).filter(|x| !x.is_nan());
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 88.8, -87.4, -103.9, -104.5];
        let mut inputs: Vec<f32> = all.chain(special).collect();
        inputs.resize(inputs.len().next_multiple_of(LANES), 1.0);
        let want: Vec<u32> = inputs.iter().map(|&x| numerics::exp(x).to_bits()).collect();
        assert_eq!(Portable.run(ExpBits(inputs.clone())), want);
        match Avx2::detect() {
            Some(simd) => assert_eq!(simd.run(ExpBits(inputs)), want),
            None => skipped(Need::Avx2, "the vector exponential", "the processor does not say that it has it"),
        }
    }
}
