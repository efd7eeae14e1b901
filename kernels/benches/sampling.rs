//! Times the sampling of a step of 32 rows over a vocabulary of 49,152, on the threads of the device and by the reference on one. What is not
//! sampled as the reference does is not timed.

use baton_kernels::cpu::{CpuConfig, CpuKernels};
use baton_kernels::host::HostKernels;
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::sampling::TokenSet;
use baton_kernels::step::{Delta, Join, LateMask, SlotRows, SlotSamplers, StepInput};
use baton_types::SamplingParams;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::time::Duration;

const ROWS: usize = 32;
const VOCAB: usize = 49_152;

/// Logits that are distributed like a model's: a normal distribution, and a few tokens above it.
fn logits(spread: f32) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(1);
    let mut row = || {
        let normal = |rng: &mut StdRng| (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0;
        let mut row: Vec<f32> = (0..VOCAB).map(|_| normal(&mut rng) * spread).collect();
        (0..20).for_each(|i| row[rng.random_range(0..VOCAB)] = spread * (5.0 - i as f32 * 0.1));
        row
    };
    (0..ROWS).flat_map(|_| row()).collect()
}

/// With only some tokens allowed.
const MASKED: &str = "temperature mask";

/// Any half of the tokens, as a grammar may leave them within a text.
fn half() -> TokenSet {
    let mut rng = StdRng::seed_from_u64(2);
    (0..VOCAB as u32).filter(|_| rng.random_bool(0.5)).collect()
}

fn steps(params: &SamplingParams) -> [StepInput; 2] {
    let join = |slot: usize| {
        let sampling = SamplingParams { seed: slot as u64, ..params.clone() };
        let tokens = (0..200).map(|i| (i * 7919 % VOCAB) as u32).collect();
        Delta::Join(Box::new(Join { slot, tokens, prompt_len: 200, sampling, ..Join::default() }))
    };
    let rows = |slot| SlotRows { slot, position: 199, rows: 1, samples: 1, masks: Vec::new() };
    let first =
        StepInput { ids: vec![1.into(); ROWS], segments: (0..ROWS).map(rows).collect(), ..StepInput::default() };
    [StepInput { deltas: (0..ROWS).map(join).collect(), ..first.clone() }, first]
}

fn sampling(c: &mut Criterion) {
    let plain = SamplingParams { temperature: 1.0, max_tokens: 4096, ..SamplingParams::default() };
    let top_p = SamplingParams { temperature: 0.8, top_p: 0.95, ..plain.clone() };
    let kinds = [
        ("greedy", SamplingParams { temperature: 0.0, ..plain.clone() }),
        ("temperature", plain.clone()),
        ("top_p", top_p.clone()),
        ("top_k", SamplingParams { top_k: 40, ..plain.clone() }),
        ("top_k top_p", SamplingParams { top_k: 40, ..top_p.clone() }),
        ("top_p penalties", SamplingParams { repetition_penalty: 1.1, ..top_p.clone() }),
        ("top_p logprobs", SamplingParams { logprobs: Some(5), ..top_p.clone() }),
        ("wide top_p", SamplingParams { temperature: 2.0, top_p: 0.99, ..plain.clone() }),
        (MASKED, plain.clone()),
    ];
    let logits = logits(2.5);
    let mut group = c.benchmark_group("sampling");
    let fast = CpuKernels::new(CpuConfig { threads: 2, ..CpuConfig::default() }).expect("threads start");
    let slow = ReferenceKernels::new(Default::default());
    for (name, params) in kinds {
        let [mut join, mut step] = steps(&params);
        if name == MASKED {
            for row in join.segments.iter_mut().chain(&mut step.segments) {
                row.masks = vec![LateMask::known(half())];
            }
        }
        let (mut ours, mut theirs) = (SlotSamplers::new(ROWS, VOCAB), SlotSamplers::new(ROWS, VOCAB));
        for samplers in [&mut ours, &mut theirs] {
            samplers.begin(&join, &mut Vec::new());
        }
        let sampled = fast.sample(&mut ours, &step, &logits);
        assert_eq!(sampled, slow.sample(&mut theirs, &step, &logits), "{name}");
        group
            .bench_function(BenchmarkId::new("2 threads", name), |b| b.iter(|| fast.sample(&mut ours, &step, &logits)));
        group.bench_function(BenchmarkId::new("reference", name), |b| {
            b.iter(|| slow.sample(&mut theirs, &step, &logits));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    targets = sampling
}
criterion_main!(benches);
