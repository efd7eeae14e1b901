//! Experts of a layer: which rows use which of them, and their sum. The canonical order, literally: all kernels do it so.

use super::parts::{Scratch, add_bias, normed_input, room};
use super::{ExpertsOf, HostKernels, Store};
use crate::numerics::{exp, lanes};

/// A row that uses an expert, with its share.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Use {
    expert: usize,
    row: usize,
    share: f32,
}

/// The experts of each row, by their number, then by row.
fn choose(logits: &[f32], op: &ExpertsOf<'_>) -> Vec<Use> {
    let mut uses = Vec::with_capacity(op.rows * op.used);
    let mut order = Vec::with_capacity(op.experts);
    for (row, logits) in logits.chunks_exact(op.experts).enumerate() {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exps: Vec<f32> = logits.iter().map(|logit| exp(logit - max)).collect();
        let sum = lanes::sum(&exps);
        order.clear();
        order.extend(0..op.experts);
        // The sort keeps the order of equal ones; a zero added makes both zeros equal.
        order.sort_by(|a, b| (logits[*b] + 0.0).total_cmp(&(logits[*a] + 0.0)));
        let share = |expert: usize| exps[expert] / sum;
        let of_used =
            if op.renormalize { order[..op.used].iter().map(|e| share(*e)).fold(0.0, |a, b| a + b) } else { 1.0 };
        uses.extend(order[..op.used].iter().map(|&expert| Use { expert, row, share: share(expert) / of_used }));
    }
    uses.sort_by_key(|of| (of.expert, of.row));
    uses
}

/// The operation `Experts`, of all rows of `residual`.
pub(super) fn experts<K: HostKernels>(
    kernels: &K,
    [router, gate_up, down]: [&K::Matrix; 3],
    op: &ExpertsOf<'_>,
    residual: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    let hidden = residual.len() / op.rows.max(1);
    let Scratch { input, normed, up, added, gathered, gate, .. } = scratch;
    let h = normed_input(kernels, router, op.norm, residual, op.rows, normed, input);
    let logits = room(up, op.rows * op.experts);
    kernels.linear(input, router, 0, 1, Store::Set, &mut [&mut *logits]);
    // The bias of matrix `i` of a role, all of height `n`.
    let bias_of = |role: usize, i: usize, n: usize| op.biases.map(|biases| &biases[role][i * n..(i + 1) * n]);
    bias_of(0, 0, op.experts).into_iter().for_each(|bias| add_bias(logits, bias));
    kernels.numerics().round_products(logits);
    let uses = choose(logits, op);
    let total = room(added, residual.len());
    total.fill(0.0);
    for uses in uses.chunk_by(|a, b| a.expert == b.expert) {
        let (expert, rows) = (uses[0].expert, uses.len());
        let x = room(gathered, rows * hidden);
        for (x, of) in x.chunks_exact_mut(hidden).zip(uses) {
            x.copy_from_slice(&h[of.row * hidden..(of.row + 1) * hidden]);
        }
        kernels.input(x, rows, gate_up, input);
        let (gate, up) = (room(gate, rows * op.ffn), room(up, rows * op.ffn));
        kernels.linear(input, gate_up, 2 * expert, 1, Store::Set, &mut [&mut *gate, &mut *up]);
        for (i, x) in [&mut *gate, &mut *up].into_iter().enumerate() {
            bias_of(1, 2 * expert + i, op.ffn).into_iter().for_each(|bias| add_bias(x, bias));
            kernels.numerics().round_products(x);
        }
        kernels.activate(op.activation, gate, up);
        kernels.input(gate, rows, down, input);
        let y = room(gathered, rows * hidden);
        kernels.linear(input, down, expert, op.partitions, Store::Set, &mut [&mut *y]);
        bias_of(2, expert, hidden).into_iter().for_each(|bias| add_bias(y, bias));
        kernels.numerics().round_products(y);
        for (y, of) in y.chunks_exact(hidden).zip(uses) {
            let total = &mut total[of.row * hidden..(of.row + 1) * hidden];
            total.iter_mut().zip(y).for_each(|(total, y)| *total = of.share.mul_add(*y, *total));
        }
    }
    kernels.add_scaled(total, op.factor, residual);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Activation;

    #[test]
    fn the_largest_logits_are_used_and_the_first_of_equal_ones() {
        let chosen = |logits: &[f32], used, renormalize| {
            let (experts, rows, activation) = (4, logits.len() / 4, Activation::Silu);
            let op = ExpertsOf {
                norm: None,
                experts,
                ffn: 1,
                used,
                renormalize,
                activation,
                partitions: 1,
                biases: None,
                factor: 1.0,
                rows,
            };
            let uses = choose(logits, &op);
            uses.into_iter().map(|Use { expert, row, share }| (expert, row, share)).collect::<Vec<_>>()
        };
        let e = |x: f32| f64::from(x).exp();
        let all = e(1.0) + e(3.0) + e(2.0) + e(3.0);
        for ((expert, row, share), (want, logit)) in
            chosen(&[1.0, 3.0, 2.0, 3.0], 2, false).into_iter().zip([(1, 3.0), (3, 3.0)])
        {
            assert_eq!((expert, row), (want, 0));
            assert!((f64::from(share) - e(logit) / all).abs() < 1e-6, "{share}");
        }
        assert_eq!(chosen(&[5.0; 4], 3, true).iter().map(|of| of.0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(chosen(&[-0.0, 0.0, -1.0, -1.0], 1, true)[0].0, 0);
        // By expert, then by row; shares of each row add up to one.
        let two = chosen(&[0.0, 9.0, 1.0, 2.0, 4.0, 3.0, 0.0, -1.0], 2, true);
        assert_eq!(two.iter().map(|of| (of.0, of.1)).collect::<Vec<_>>(), [(0, 1), (1, 0), (1, 1), (3, 0)]);
        let sum = |row| two.iter().filter(|of| of.1 == row).map(|of| of.2).sum::<f32>();
        assert!((sum(0) - 1.0).abs() < 1e-6 && (sum(1) - 1.0).abs() < 1e-6);
    }
}
