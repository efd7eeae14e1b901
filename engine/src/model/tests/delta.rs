//! The naive decoder's gated delta rule: one row after another, in f64, from the formulas of Yang, Kautz and Hatamizadeh (arXiv:2412.06464).

use super::naive::{Linear, Matrix, matrix, rms_norm};
use crate::families::{GatedDeltaSpec, LayerTensor, TensorName};
use crate::formats::ModelSource;

/// A layer's rule, and what it keeps of the rows before.
pub(super) struct Delta {
    spec: GatedDeltaSpec,
    eps: f64,
    qkv: Linear,
    z: Linear,
    b: Linear,
    a: Linear,
    conv: Matrix,
    decay: Vec<f64>,
    decay_bias: Vec<f64>,
    gain: Matrix,
    /// Of each row so far, before the convolution.
    inputs: Vec<Vec<f64>>,
    /// Of each value head, `[value_dim, key_dim]`.
    states: Vec<Matrix>,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(a, b)| a * b).sum()
}

impl Delta {
    pub(super) fn new(model: &dyn ModelSource, layer: usize, spec: GatedDeltaSpec) -> Self {
        use LayerTensor::{DeltaA, DeltaB, DeltaConv, DeltaDecay, DeltaDecayBias, DeltaNorm, DeltaQkv, DeltaZ};
        let name = |tensor| TensorName::Layer(layer, tensor);
        // Without biases.
        let linear = |tensor| Linear::new(model, name(tensor), name(LayerTensor::QueryBias));
        let vector = |tensor| matrix(model, name(tensor), spec.value_heads).remove(0);
        Self {
            spec,
            eps: f64::from(model.spec().layers[layer].rms_eps),
            qkv: linear(DeltaQkv),
            z: linear(DeltaZ),
            b: linear(DeltaB),
            a: linear(DeltaA),
            conv: matrix(model, name(DeltaConv), spec.taps),
            decay: vector(DeltaDecay),
            decay_bias: vector(DeltaDecayBias),
            gain: matrix(model, name(DeltaNorm), spec.value_dim),
            inputs: Vec::new(),
            states: vec![vec![vec![0.0; spec.key_dim]; spec.value_dim]; spec.value_heads],
        }
    }

    /// What goes into the output matrix for the next row.
    pub(super) fn of(&mut self, h: &[f64]) -> Vec<f64> {
        let GatedDeltaSpec { key_heads, value_heads, key_dim, value_dim, length_eps, .. } = self.spec;
        self.inputs.push(self.qkv.of(h));
        let channel = |c: usize| {
            let newest_first = self.inputs.iter().rev().map(|row| row[c]);
            let sum: f64 = self.conv[c].iter().rev().zip(newest_first).map(|(tap, x)| tap * x).sum();
            sum * sigmoid(sum)
        };
        let mixed: Vec<f64> = (0..self.conv.len()).map(channel).collect();
        let (queries, rest) = mixed.split_at(key_heads * key_dim);
        let (keys, values) = rest.split_at(key_heads * key_dim);
        let (z, b, a) = (self.z.of(h), self.b.of(h), self.a.of(h));
        let unit = |x: &[f64]| {
            let length = (dot(x, x) + f64::from(length_eps)).sqrt();
            x.iter().map(|x| x / length).collect::<Vec<_>>()
        };
        let mut out = Vec::new();
        for head in 0..value_heads {
            let of_key = head / (value_heads / key_heads) * key_dim;
            let query = unit(&queries[of_key..of_key + key_dim]);
            let key = unit(&keys[of_key..of_key + key_dim]);
            let softplus = (1.0 + (a[head] + self.decay_bias[head]).exp()).ln();
            let stays = (-self.decay[head].exp() * softplus).exp();
            let written = sigmoid(b[head]);
            let mut attended = Vec::new();
            for (j, row) in self.states[head].iter_mut().enumerate() {
                row.iter_mut().for_each(|s| *s *= stays);
                let change = written * (values[head * value_dim + j] - dot(row, &key));
                row.iter_mut().zip(&key).for_each(|(s, k)| *s += change * k);
                attended.push(dot(row, &query) / (key_dim as f64).sqrt());
            }
            let gates = z[head * value_dim..].iter().map(|z| z * sigmoid(*z));
            out.extend(rms_norm(&attended, &self.gain, self.eps).into_iter().zip(gates).map(|(x, gate)| x * gate));
        }
        out
    }
}
