//! Norm, rotation and activation in the canonical order.

use crate::device::RopeTable;
use crate::host::{KvStep, RotatedHeads};
use crate::numerics::{Numerics, clamped_swiglu, gelu_tanh, lanes, silu};
use crate::program::Activation;

/// With the lanes of the class.
pub(crate) fn rms_norm(numerics: Numerics, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    let cols = gain.len();
    let dot = if let Numerics::TensorCore { .. } = numerics { lanes::wide_dot } else { lanes::dot };
    for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
        let mean = dot(x, x) / cols as f32;
        let r = 1.0 / (mean + eps).sqrt();
        for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
            *out = (x * r) * gain;
        }
    }
}

/// Rotates a part of every head of every row of the step.
pub(crate) fn rope_rows(step: KvStep<'_>, rope: &RopeTable, heads: RotatedHeads, x: &mut [f32]) {
    let half = rope.dim / 2;
    let positions = step.positions();
    let cols = x.len() / step.rows().max(1);
    for (row, position) in x.chunks_exact_mut(cols.max(1)).zip(positions) {
        let table = position * half..(position + 1) * half;
        let (cos, sin) = (&rope.cos[table.clone()], &rope.sin[table]);
        for head in row.chunks_exact_mut(heads.dim) {
            let head = &mut head[heads.first..];
            for i in 0..half {
                let (a, b) = (head[i], head[i + half]);
                head[i] = a.mul_add(cos[i], -(b * sin[i]));
                head[i + half] = b.mul_add(cos[i], a * sin[i]);
            }
        }
    }
}

pub(crate) fn activate(activation: Activation, gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = match activation {
            Activation::Silu => silu(*gate) * up,
            Activation::GeluTanh => gelu_tanh(*gate) * up,
            Activation::ClampedSwiglu { alpha, limit } => clamped_swiglu(*gate, *up, alpha, limit),
        };
    }
}
