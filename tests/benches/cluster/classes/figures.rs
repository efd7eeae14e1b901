//! Figures of one work: tokens per second of each class and each peer, and what a class reaches of the roofs and of other series.

use super::roofs::unit;
use super::{ROUNDS, Rates, Subject};
use crate::peers::Peer;
use crate::statistics::{median, paired_ratio_at_least};
use crate::summary::{Figure, Summary, Target};
use baton_engine::families::DecoderSpec;
use baton_kernels::numerics::Numerics;
use baton_kernels::roofline::MatrixInstruction;
use baton_tests::promised;
use baton_tests::work::{Work, computed_operations, kv_bytes, prompt_operations};
use baton_types::Dtype;

/// The peer that computes the very file of the default model.
const SAME_FILE: &str = "llama_cpp_q4_1";

/// `value` beside the ratio of two series, of which one run shows that it is at least that.
fn paired(value: f64, unit: &str, ours: &[f64], theirs: &[f64], of: &str) -> Figure {
    let of = format!("{of}; lower end of the 90% interval of {ROUNDS} pairs");
    Figure::ratio(value, unit, paired_ratio_at_least(ours, theirs), of)
}

/// Adds all figures of a work.
pub(super) fn add(
    work: Work,
    rates: &Rates,
    spec: &DecoderSpec,
    subjects: &[Subject],
    peers: &[Peer],
    summary: &mut Summary,
) {
    let medians: Vec<f64> = rates.peers.iter().map(|rates| median(rates.clone())).collect();
    let best = (0..peers.len()).max_by(|a, b| medians[*a].total_cmp(&medians[*b]));
    let is_before = |subject: &Subject| matches!(subject.class.numerics, Numerics::F32Fma { .. });
    let before = subjects.iter().position(is_before).map(|at| &rates.classes[at]);
    let same_file = peers.iter().position(|peer| peer.key == SAME_FILE);
    for (subject, ours) in subjects.iter().zip(&rates.classes).filter(|(_, ours)| !ours.is_empty()) {
        let (numerics, weights) = (subject.class.numerics, subject.class.weights);
        let (name, rate) = (format!("{}_{}", subject.class.name(), work.name()), median(ours.clone()));
        let mut figure = Figure::plain(rate, "tokens/s");
        if let Some(best) = best {
            figure = paired(rate, "tokens/s", ours, &rates.peers[best], &peers[best].name);
        }
        summary.add(&name, figure, promised::to_best_peer(numerics, work).map(Target::AtLeast));
        if let (Some(at), Some(bound)) = (same_file, promised::to_same_file(weights, work)) {
            let figure = paired(rate, "tokens/s", ours, &rates.peers[at], &peers[at].name);
            summary.add(&format!("{name}_to_{SAME_FILE}"), figure, Target::AtLeast(bound));
        }
        if let (Some(before), Some(bound)) = (before, promised::to_f32fma(numerics, work)) {
            let figure = paired(rate, "tokens/s", ours, before, "f32fma");
            summary.add(&format!("{name}_to_f32fma"), figure, Target::AtLeast(bound));
        }
    }
    for (subject, (ours, roofs)) in subjects.iter().zip(rates.classes.iter().zip(&rates.roofs)) {
        if !roofs.is_empty() {
            share(work, subject, spec, ours, roofs, summary);
        }
    }
    for (peer, median) in peers.iter().zip(medians) {
        let figure = Figure { of: Some(peer.name.clone()), ..Figure::plain(median, "tokens/s") };
        summary.add(&format!("{}_{}", peer.key, work.name()), figure, None);
    }
}

/// Adds what a class reaches of the roof that was measured beside it in each round.
fn share(work: Work, subject: &Subject, spec: &DecoderSpec, rates: &[f64], roofs: &[f64], summary: &mut Summary) {
    let (numerics, weights) = (subject.class.numerics, subject.class.weights);
    let roof = median(roofs.to_vec());
    let name = format!("{}_{}", subject.class.name(), work.name());
    // In 1e9 operations or bytes per second, as roofs are.
    let scaled = |each: usize| rates.iter().map(|rate| rate * each as f64 / 1e9).collect::<Vec<_>>();
    match work {
        Work::Prefill(tokens) => {
            let (all, instruction) = (prompt_operations(spec, tokens), MatrixInstruction::of(numerics));
            let unit = unit(numerics);
            let computed = computed_operations(spec, tokens);
            let reached: Vec<f64> = scaled(computed).into_iter().map(|rate| rate / tokens as f64).collect();
            let part = computed as f64 / all as f64;
            let of = format!(
                "peak of {}, {roof:.0} {unit}; computed operations, {part:.3} of all layers for all tokens",
                instruction.name()
            );
            let figure = paired(median(reached.clone()), unit, &reached, roofs, &of);
            let target = promised::prefill_to_roof(numerics, work, instruction).map(Target::AtLeast);
            summary.add(&format!("{name}_roof"), figure, target);
        }
        Work::Decode(_, context) => {
            let bytes = subject.roofs.weight_bytes() + kv_bytes(spec, Dtype::Bf16, context);
            let reached = scaled(bytes);
            let of = format!("reading weights, {roof:.1} GB/s; {:.1} MB a token", bytes as f64 / 1e6);
            let figure = paired(median(reached.clone()), "GB/s", &reached, roofs, &of);
            let target = promised::decode_to_bandwidth(weights, work).map(Target::AtLeast);
            summary.add(&format!("{name}_bandwidth"), figure, target);
        }
    }
}
