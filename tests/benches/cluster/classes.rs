//! The default model in each numerics class, step by step without an engine: prefill against the peak of the class's instructions, decode
//! against `f32fma`. All classes take turns in every round.

use crate::THREADS;
use crate::statistics::best;
use crate::summary::{Figure, Summary};
use anyhow::ensure;
use baton_engine::formats::ModelSource;
use baton_engine::model::{Model, ModelConfig, StepSegment};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::numerics::Numerics;
use baton_kernels::roofline;
use baton_kernels::step::TableSteps;
use baton_memory::HostPool;
use baton_types::{BlockId, Dtype, KvPoolMap, TokenId};
use baton_worker::models;
use baton_worker::settings::ModelSettings;
use std::time::Instant;

const CLASSES: [Numerics; 3] = [Numerics::F32Fma { weights: Dtype::Bf16 }, Numerics::Bf16x32, Numerics::I8x32];
const PREFILLS: [usize; 3] = [128, 512, 2048];
/// Sequences, and tokens of each before the step.
const DECODES: [(usize, usize); 6] = [(1, 128), (8, 128), (32, 128), (1, 2048), (8, 2048), (32, 2048)];
const SEQUENCES_MAX: usize = 32;
/// Positions of each sequence's table.
const POSITIONS: usize = 2064;
const BLOCK: usize = 16;
const ROUNDS: usize = 5;
const DECODE_STEPS: usize = 4;

/// A model in one class, with the seconds of each kind of step.
struct Subject {
    numerics: Numerics,
    model: Model,
    steps: TableSteps,
    prefills: [Vec<f64>; PREFILLS.len()],
    decodes: [Vec<f64>; DECODES.len()],
}

fn ids(count: usize) -> Vec<TokenId> {
    (0..count).map(|i| 100 + (i * 7919 % 48_000) as u32).collect()
}

fn blocks(sequence: usize) -> Vec<BlockId> {
    let each = POSITIONS / BLOCK;
    (sequence * each..(sequence + 1) * each).map(|block| BlockId(block as u32)).collect()
}

/// Rows of a step, whose last logits of each sequence are returned.
struct Rows {
    ids: Vec<TokenId>,
    segments: Vec<StepSegment>,
    logit_rows: Vec<usize>,
}

fn prefill_step(tokens: usize) -> Rows {
    let segments = vec![StepSegment { position: 0, rows: tokens, blocks: blocks(0) }];
    Rows { ids: ids(tokens), segments, logit_rows: vec![tokens - 1] }
}

fn decode_step(sequences: usize, position: usize) -> Rows {
    let segments = (0..sequences).map(|s| StepSegment { position, rows: 1, blocks: blocks(s) }).collect();
    Rows { ids: ids(sequences), segments, logit_rows: (0..sequences).collect() }
}

impl Subject {
    fn load(source: &dyn ModelSource, numerics: Numerics) -> anyhow::Result<Self> {
        let device = CpuDevice::new(CpuConfig { threads: THREADS, simd: None, numerics })?;
        let config = ModelConfig {
            kv: Dtype::Bf16,
            rows_max: 2048,
            logit_rows_max: SEQUENCES_MAX,
            slots_max: SEQUENCES_MAX,
            model_len_max: POSITIONS,
        };
        let mut model = Model::load(source, device.as_ref(), config, &|_| ())?;
        let map = KvPoolMap::try_new(model.layout(BLOCK as u32)?, (SEQUENCES_MAX * POSITIONS / BLOCK) as u32)?;
        model.bind(HostPool::filled(map.bytes(), 0).unwrap(), &map)?;
        Ok(Self {
            numerics,
            model,
            steps: TableSteps::default(),
            prefills: Default::default(),
            decodes: Default::default(),
        })
    }

    /// Seconds of a step, and its first row of logits.
    fn step(&mut self, rows: Rows) -> anyhow::Result<(f64, Vec<f32>)> {
        let step = self.steps.step(rows.ids, rows.segments, rows.logit_rows, 0);
        let begin = Instant::now();
        self.model.launch(&step, &mut |_, _| ())?;
        let logits = self.model.finish()?.logits;
        Ok((begin.elapsed().as_secs_f64(), logits.row(0).to_vec()))
    }

    /// A token's logits must have the same bits whether it is prefilled or decoded: otherwise nothing is timed.
    fn check(&mut self) -> anyhow::Result<()> {
        let (_, prefilled) = self.step(prefill_step(200))?;
        self.step(prefill_step(199))?;
        let mut last = decode_step(1, 199);
        last.ids = ids(200)[199..].to_vec();
        let (_, decoded) = self.step(last)?;
        ensure!(prefilled == decoded, "{}: decode and prefill differ in bits: no figures", self.numerics);
        Ok(())
    }

    fn round(&mut self) -> anyhow::Result<()> {
        for (i, tokens) in PREFILLS.into_iter().enumerate() {
            let (seconds, _) = self.step(prefill_step(tokens))?;
            self.prefills[i].push(seconds);
        }
        for (i, (sequences, position)) in DECODES.into_iter().enumerate() {
            for _ in 0..DECODE_STEPS {
                let (seconds, _) = self.step(decode_step(sequences, position))?;
                self.decodes[i].push(seconds);
            }
        }
        Ok(())
    }
}

fn fastest(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("numerics classes of the default model on {THREADS} threads");
    let source = models::open(&ModelSettings::default(), &|_, _| ())?;
    let spec = source.spec().clone();
    let mut subjects =
        CLASSES.into_iter().map(|class| Subject::load(source.as_ref(), class)).collect::<Result<Vec<_>, _>>()?;
    subjects.iter_mut().try_for_each(Subject::check)?;
    let (mut peaks, mut reads) = ([(); CLASSES.len()].map(|()| Vec::new()), Vec::new());
    for _ in 0..ROUNDS {
        reads.push(roofline::read_bandwidth(THREADS));
        for (subject, peaks) in subjects.iter_mut().zip(&mut peaks) {
            peaks.push(roofline::matrix_peak(subject.numerics, THREADS));
            subject.round()?;
        }
    }
    summary.add("roof_read", Figure::plain(best(reads), "GB/s"), None);
    let matrices = (spec.parameters() as usize - spec.vocab * spec.hidden) as f64;
    // Scores and weighted values: two products for each element of a query and each token that it attends to.
    let query = spec.layers[0].attention.query_dim();
    let attended = |tokens: usize| (spec.layers.len() * query * tokens * (tokens + 1) * 2) as f64;
    let base: Vec<f64> = subjects[0].prefills.iter().chain(&subjects[0].decodes).map(|times| fastest(times)).collect();
    for (subject, peaks) in subjects.iter().zip(peaks) {
        let (class, peak) = (subject.numerics.name(), best(peaks));
        summary.add(&format!("roof_{class}"), Figure::plain(peak, "GFLOP/s"), None);
        for (i, tokens) in PREFILLS.into_iter().enumerate() {
            let seconds = fastest(&subject.prefills[i]);
            let flops = 2.0 * matrices * tokens as f64 + attended(tokens);
            let of = format!("peak of its instructions; {:.2} times f32fma; best of {ROUNDS}", base[i] / seconds);
            let figure = Figure::ratio(tokens as f64 / seconds, "tokens/s", flops / seconds / 1e9 / peak, of);
            summary.add(&format!("{class}_pp{tokens}"), figure, None);
        }
        for (i, (sequences, position)) in DECODES.into_iter().enumerate() {
            let seconds = fastest(&subject.decodes[i]);
            let ratio = base[PREFILLS.len() + i] / seconds;
            let figure = Figure::ratio(sequences as f64 / seconds, "tokens/s", ratio, "f32fma");
            summary.add(&format!("{class}_b{sequences}_context{position}"), figure, None);
        }
    }
    Ok(())
}
