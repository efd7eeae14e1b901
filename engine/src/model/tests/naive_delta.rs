//! The gated delta rule of the naive decoder: dense f64, one row after another, written from the formulas of arXiv:2412.06464.

use super::naive::{Linear, Matrix, matrix, rms_norm};
use crate::families::{GatedDeltaSpec, LayerTensor, TensorName};
use crate::formats::ModelSource;

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// One layer, with what it remembers.
pub(super) struct Recurrent {
    spec: GatedDeltaSpec,
    /// Query, key and value; the gate; beta; the decay.
    projections: [Linear; 4],
    taps: Matrix,
    decay_log: Vec<f64>,
    decay_bias: Vec<f64>,
    gain: Matrix,
    /// Inputs of the convolution, the last one last.
    inputs: Vec<Vec<f64>>,
    /// By head: `[key_dim][value_dim]`.
    states: Vec<Matrix>,
}

impl Recurrent {
    pub(super) fn new(model: &dyn ModelSource, l: usize) -> Option<Self> {
        let spec = model.spec().layers[l].delta?;
        let name = |tensor| TensorName::Layer(l, tensor);
        let of = |tensor| matrix(model, name(tensor), model.spec().tensor_dims(name(tensor))[1]);
        let tensors =
            [LayerTensor::DeltaInput, LayerTensor::DeltaGate, LayerTensor::DeltaBeta, LayerTensor::DeltaDecay];
        Some(Self {
            spec,
            // None has a bias.
            projections: tensors.map(|tensor| Linear::new(model, name(tensor), name(LayerTensor::QueryBias))),
            taps: of(LayerTensor::DeltaConv),
            decay_log: of(LayerTensor::DeltaDecayLog).remove(0),
            decay_bias: of(LayerTensor::DeltaDecayBias).remove(0),
            gain: of(LayerTensor::DeltaNorm),
            inputs: vec![vec![0.0; spec.channels()]; spec.taps],
            states: vec![vec![vec![0.0; spec.value_dim]; spec.key_dim]; spec.value_heads],
        })
    }

    /// What the next row attends to.
    pub(super) fn step(&mut self, h: &[f64], eps: f64) -> Vec<f64> {
        let [input, gate, beta, decay] = self.projections.each_ref().map(|linear| linear.of(h));
        self.inputs.remove(0);
        self.inputs.push(input);
        let mixed = |channel: usize| -> f64 {
            silu(self.inputs.iter().zip(&self.taps[channel]).map(|(input, tap)| input[channel] * tap).sum())
        };
        let mixed: Vec<f64> = (0..self.spec.channels()).map(mixed).collect();
        let GatedDeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } = self.spec;
        let (queries, rest) = mixed.split_at(self.spec.keys());
        let (keys, values) = rest.split_at(self.spec.keys());
        let unit = |x: &[f64]| -> Vec<f64> {
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x / length).collect()
        };
        let mut out = Vec::new();
        for (head, state) in self.states.iter_mut().enumerate() {
            let at = head / (value_heads / key_heads) * key_dim;
            let (q, k) = (unit(&queries[at..at + key_dim]), unit(&keys[at..at + key_dim]));
            let v = &values[head * value_dim..(head + 1) * value_dim];
            let softplus = (1.0 + (decay[head] + self.decay_bias[head]).exp()).ln();
            let kept = (-self.decay_log[head].exp() * softplus).exp();
            let share = 1.0 / (1.0 + (-beta[head]).exp());
            state.iter_mut().flatten().for_each(|x| *x *= kept);
            let known: Vec<f64> = (0..value_dim).map(|j| (0..key_dim).map(|i| k[i] * state[i][j]).sum()).collect();
            for (row, k) in state.iter_mut().zip(&k) {
                row.iter_mut().zip(v.iter().zip(&known)).for_each(|(x, (v, known))| *x += k * share * (v - known));
            }
            let read = |j: usize| (0..key_dim).map(|i| q[i] / (key_dim as f64).sqrt() * state[i][j]).sum();
            let read: Vec<f64> = (0..value_dim).map(read).collect();
            let gates = &gate[head * value_dim..(head + 1) * value_dim];
            out.extend(rms_norm(&read, &self.gain, eps).iter().zip(gates).map(|(x, gate)| x * silu(*gate)));
        }
        out
    }
}
