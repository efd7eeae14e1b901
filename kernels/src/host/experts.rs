//! Experts of a layer: which rows use which of them, and their sum. The canonical order, literally: all kernels do it so.

use super::parts::{Scratch, add_bias, normed_input, room};
use super::{ExpertMatrices, ExpertsOf, GateUpOf, HostKernels, ProjectOf, Store};
use crate::device::Role;
use crate::numerics::{exp, lanes};
use crate::program::{Choice, ExpertGroups, Scoring};

/// A row that uses an expert, with its share.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Use {
    expert: usize,
    row: usize,
    share: f32,
}

/// The experts of each row, by their number, then by row.
fn choose(logits: &[f32], op: &ExpertsOf<'_>) -> Vec<Use> {
    let Choice { used, scoring, groups, renormalize, factor } = op.choice.of;
    let mut uses = Vec::with_capacity(op.rows * used);
    for (row, logits) in logits.chunks_exact(op.experts).enumerate() {
        let scores = scores(scoring, logits);
        // A softmax ascends with the logits, which round less.
        let by = if scoring == Scoring::Softmax { logits } else { &scores };
        let by: Vec<f32> = match op.choice.bias {
            Some(bias) => by.iter().zip(bias).map(|(score, bias)| score + bias).collect(),
            None => by.to_vec(),
        };
        let order = match groups {
            Some(groups) => descending(&by, &of_groups(&by, groups)),
            None => descending(&by, &(0..op.experts).collect::<Vec<_>>()),
        };
        let order = &order[..used];
        let of_used = match (renormalize, scoring) {
            (false, _) => 1.0,
            (true, Scoring::Softmax) => order.iter().map(|e| scores[*e]).fold(0.0, |a, b| a + b),
            // As transformers has it: all scores may be zero.
            (true, Scoring::Sigmoid) => order.iter().map(|e| scores[*e]).fold(0.0, |a, b| a + b) + LEAST,
        };
        uses.extend(order.iter().map(|&expert| Use { expert, row, share: scores[expert] / of_used * factor }));
    }
    uses.sort_by_key(|of| (of.expert, of.row));
    uses
}

/// Added to a sum of sigmoids.
const LEAST: f32 = 1e-20;

fn scores(scoring: Scoring, logits: &[f32]) -> Vec<f32> {
    match scoring {
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exps: Vec<f32> = logits.iter().map(|logit| exp(logit - max)).collect();
            let sum = lanes::sum(&exps);
            exps.into_iter().map(|e| e / sum).collect()
        }
        Scoring::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + exp(-logit))).collect(),
    }
}

/// Some numbers, those of the largest values first. Of equal ones, the order is kept.
fn descending(by: &[f32], numbers: &[usize]) -> Vec<usize> {
    let mut order = numbers.to_vec();
    // A zero added makes both zeros equal.
    order.sort_by(|a, b| (by[*b] + 0.0).total_cmp(&(by[*a] + 0.0)));
    order
}

/// The experts of the groups that are chosen, ascending.
fn of_groups(by: &[f32], groups: ExpertGroups) -> Vec<usize> {
    let size = by.len() / groups.count;
    let of_group = |group: usize| {
        let best = descending(by, &(group * size..(group + 1) * size).collect::<Vec<_>>());
        best[..groups.best].iter().map(|expert| by[*expert]).reduce(|a, b| a + b).unwrap_or(f32::NEG_INFINITY)
    };
    let totals: Vec<f32> = (0..groups.count).map(of_group).collect();
    let mut chosen = descending(&totals, &(0..groups.count).collect::<Vec<_>>());
    chosen.truncate(groups.used);
    chosen.sort_unstable();
    chosen.into_iter().flat_map(|group| group * size..(group + 1) * size).collect()
}

/// The operation `Experts`, of all rows of `residual`.
pub(super) fn experts<K: HostKernels>(
    kernels: &K,
    matrices: &ExpertMatrices<'_, K::Matrix>,
    op: &ExpertsOf<'_>,
    residual: &mut [f32],
    scratch: &mut Scratch<K::Input>,
) {
    let ExpertMatrices { router, gate_up, down, shared } = *matrices;
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
    if let (Some([gate_up, down]), Some([ffn, partitions])) = (shared, op.shared) {
        let (mut added, mut inner) = (std::mem::take(added), std::mem::take(gate));
        let (total, inner_rows) = (&mut added[..residual.len()], room(&mut inner, op.rows * ffn));
        let of = GateUpOf { norm: op.norm, activation: op.activation, rows: op.rows };
        kernels.gate_up(gate_up, &of, residual, inner_rows, scratch);
        let (rows, role) = (op.rows, Role::Down);
        let of = ProjectOf { role, partitions, rows, bias: None, norm: None, factor: 1.0 };
        kernels.project(down, &of, inner_rows, total, scratch);
        (scratch.added, scratch.gate) = (added, inner);
    }
    kernels.add_scaled(&scratch.added[..residual.len()], op.factor, residual);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::ChoiceOf;
    use crate::program::Activation;

    /// Expert, row and share of each use.
    fn chosen(logits: &[f32], experts: usize, choice: ChoiceOf<'_>) -> Vec<(usize, usize, f32)> {
        let op = ExpertsOf {
            norm: None,
            experts,
            ffn: 1,
            choice,
            shared: None,
            activation: Activation::Silu,
            partitions: 1,
            biases: None,
            factor: 1.0,
            rows: logits.len() / experts,
        };
        choose(logits, &op).into_iter().map(|Use { expert, row, share }| (expert, row, share)).collect()
    }

    #[test]
    fn the_largest_sigmoids_of_the_best_groups_are_used() {
        let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let groups = |used, best| Some(ExpertGroups { count: 3, used, best });
        let of =
            |used, groups, renormalize| Choice { used, scoring: Scoring::Sigmoid, groups, renormalize, factor: 2.5 };
        let experts = |logits: &[f32], of, bias| {
            chosen(logits, 6, ChoiceOf { of, bias }).iter().map(|of| of.0).collect::<Vec<_>>()
        };
        // Sums of two: of the last group less than of the first, though it has the largest.
        let logits = [1.0, 0.9, -1.0, -1.0, 2.0, -4.0];
        assert_eq!(experts(&logits, of(2, groups(1, 2), true), None), [0, 1]);
        assert_eq!(experts(&logits, of(2, groups(1, 1), true), None), [4, 5]);
        assert_eq!(experts(&logits, of(3, groups(2, 2), true), None), [0, 1, 4]);
        assert_eq!(experts(&logits, of(2, None, true), None), [0, 4]);
        // Of equal groups, and of equal experts in them, the first.
        assert_eq!(experts(&[0.0; 6], of(3, groups(2, 2), true), None), [0, 1, 2]);
        // The bias chooses, and is no part of a share.
        let bias = [0.0, 0.0, 9.0, 8.0, 0.0, 0.0];
        let with_bias = of(2, groups(1, 2), true);
        let uses = chosen(&logits, 6, ChoiceOf { of: with_bias, bias: Some(&bias) });
        assert_eq!(uses.iter().map(|of| of.0).collect::<Vec<_>>(), [2, 3]);
        uses.iter().for_each(|of| assert!((of.2 - 1.25).abs() < 1e-6, "{uses:?}"));
        let plain = chosen(&logits, 6, ChoiceOf { of: of(1, None, false), bias: None });
        assert!((f64::from(plain[0].2) - 2.5 * sigmoid(2.0)).abs() < 1e-6, "{plain:?}");
        // All scores are zero: no share is NaN.
        let none = chosen(&[f32::NEG_INFINITY; 6], 6, ChoiceOf { of: of(2, None, true), bias: None });
        assert!(none.iter().all(|of| of.2 == 0.0), "{none:?}");
    }

    #[test]
    fn the_largest_logits_are_used_and_the_first_of_equal_ones() {
        let chosen = |logits: &[f32], used, renormalize| {
            chosen(logits, 4, ChoiceOf { of: Choice::softmax(used, renormalize), bias: None })
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
