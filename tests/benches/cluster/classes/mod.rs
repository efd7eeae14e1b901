//! The default model in each numerics class, step by step without an engine: prefill and decode against the roofs of this machine, the time of
//! each operation, and other engines beside it where they are installed. All take turns in every round.
//!
//! A class whose bits are not those of the reference has no figures, and the run fails.

mod figures;
mod roofs;
mod wide;

use crate::THREADS;
use crate::peers::{self, Peer};
use crate::sampling;
use crate::statistics::median;
use crate::summary::{Figure, Summary};
use anyhow::{Context, bail, ensure};
use baton_engine::formats::ModelSource;
use baton_engine::model::{Model, ModelConfig, StepSegment};
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::device::Device;
use baton_kernels::host::Times;
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::step::{Logits, TableSteps};
use baton_kv_cache::ForkCopy;
use baton_memory::HostPool;
use baton_node::environment;
use baton_tests::work::{Weights, Work};
use baton_types::{BlockId, BlockTable, Dtype, GroupBlocks, KvPoolMap, TokenId};
use baton_worker::models;
use baton_worker::settings::ModelSettings;
use roofs::{Peaks, Roofs};
use std::time::Instant;
use wide::Wide;

/// A class, and how the weights lie in memory for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) numerics: Numerics,
    pub(crate) weights: Weights,
}

/// The last reads a model whose file is in bf16.
const CLASSES: [Class; 4] = [
    Class { numerics: Numerics::F32Fma { weights: Dtype::Bf16 }, weights: Weights::Bf16 },
    Class { numerics: Numerics::Bf16x32, weights: Weights::Stored },
    Class { numerics: Numerics::I8x32, weights: Weights::Stored },
    WIDE,
];
const WIDE: Class = Class { numerics: Numerics::Bf16x32, weights: Weights::Bf16 };

impl Class {
    /// For names of figures.
    pub(crate) fn name(self) -> String {
        let format = if self == WIDE { "_bf16" } else { "" };
        format!("{}{format}", self.numerics)
    }

    /// Whether this work is measured: with weights in bf16 only what is compared with the bandwidth of reading them.
    fn measures(self, work: Work) -> bool {
        self != WIDE || matches!(work, Work::Decode(1, _))
    }

    /// Most sequences of a step that is measured.
    fn sequences_max(self) -> usize {
        if self == WIDE { 1 } else { SEQUENCES_MAX }
    }
}

const WORKS: [Work; 9] = [
    Work::Prefill(128),
    Work::Prefill(512),
    Work::Prefill(2048),
    Work::Decode(1, 128),
    Work::Decode(8, 128),
    Work::Decode(32, 128),
    Work::Decode(1, 2048),
    Work::Decode(8, 2048),
    Work::Decode(32, 2048),
];
/// Steps whose operations are timed.
const TIMED: [Work; 3] = [Work::Prefill(512), Work::Decode(1, 128), Work::Decode(8, 2048)];
pub(crate) const SEQUENCES_MAX: usize = 32;
/// The step whose sampling is timed.
const SAMPLED: Work = Work::Decode(SEQUENCES_MAX, 128);
/// Positions of each sequence's table.
const POSITIONS: usize = 2064;
const BLOCK: usize = 16;
const ROUNDS: usize = 5;
const DECODE_STEPS: usize = 4;
/// Rows of the longest prompt.
const ROWS_MAX: usize = 2048;
/// Tokens that the reference computes: it is scalar.
const CHECKED: usize = 12;

/// A model in one class.
pub(crate) struct Subject {
    pub(crate) class: Class,
    pub(crate) model: Stepped,
    pub(crate) times: Times,
    roofs: Roofs,
}

/// A model, and what its slots hold.
pub(crate) struct Stepped {
    pub(crate) model: Model,
    pub(crate) steps: TableSteps,
}

fn ids(count: usize) -> Vec<TokenId> {
    (0..count).map(|i| 100 + (i * 7919 % 48_000) as u32).collect()
}

/// The table of a sequence.
pub(crate) fn blocks(sequence: usize) -> Vec<BlockId> {
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
    let segments = vec![StepSegment { position: 0, rows: tokens, table: BlockTable::from_start(blocks(0)) }];
    Rows { ids: ids(tokens), segments, logit_rows: vec![tokens - 1] }
}

fn decode_step(sequences: usize, position: usize) -> Rows {
    let table = |sequence| BlockTable::from_start(blocks(sequence));
    let segments = (0..sequences).map(|s| StepSegment { position, rows: 1, table: table(s) }).collect();
    Rows { ids: ids(sequences), segments, logit_rows: (0..sequences).collect() }
}

impl Subject {
    fn load(source: &dyn ModelSource, class: Class) -> anyhow::Result<Self> {
        let (times, numerics) = (Times::default(), class.numerics);
        let device = cpu::timed(CpuConfig { threads: THREADS, simd: None, numerics }, times.clone())?;
        let model = model(source, device.as_ref(), class.sequences_max(), ROWS_MAX)?;
        Ok(Self { class, model, times, roofs: Roofs::new(numerics, class.weights.bytes(source)?) })
    }

    /// Seconds of a prompt, or the median of a few steps.
    fn measure(&mut self, work: Work) -> anyhow::Result<f64> {
        let mut seconds = Vec::new();
        match work {
            Work::Prefill(tokens) => seconds.push(step(&mut self.model, prefill_step(tokens))?.0),
            Work::Decode(sequences, position) => {
                for _ in 0..DECODE_STEPS {
                    seconds.push(step(&mut self.model, decode_step(sequences, position))?.0);
                }
            }
        }
        Ok(median(seconds))
    }

    /// Whether its bits are those of the reference, and those of the steps that are timed those of each other: a prompt in one step, and its
    /// last token decoded in a batch. Afterwards every sequence holds the KV of the longest prompt.
    fn check(&mut self, source: &dyn ModelSource) -> anyhow::Result<()> {
        let (device, name) = (ReferenceDevice::new(self.class.numerics), self.class.name());
        let wanted = outcome(&mut model(source, device.as_ref(), 1, CHECKED)?, CHECKED, 1)?;
        ensure!(outcome(&mut self.model, CHECKED, 1)? == wanted, "{name}: not the bits of the reference");
        for (tokens, sequences) in [(200, 1), (128, SEQUENCES_MAX), (512, 8), (ROWS_MAX, SEQUENCES_MAX)] {
            let sequences = sequences.min(self.class.sequences_max());
            let [prefilled, decoded @ ..] = &outcome(&mut self.model, tokens, sequences)?[..] else { unreachable!() };
            let differs = decoded.iter().position(|of| of != prefilled);
            if let Some(sequence) = differs {
                bail!("{name}: sequence {sequence} of {sequences} decodes token {tokens} to other bits than prefill");
            }
        }
        Ok(())
    }

    /// Adds the time of each operation of a step.
    fn operations(&mut self, work: Work, summary: &mut Summary) -> anyhow::Result<()> {
        self.times.take();
        let seconds = self.measure(work)?;
        let steps = if matches!(work, Work::Prefill(_)) { 1.0 } else { DECODE_STEPS as f64 };
        for (operation, time) in self.times.take() {
            let each = time.as_secs_f64() / steps;
            let figure = Figure::ratio(each * 1e3, "ms", each / seconds, "the whole step, in all layers");
            summary.add(&format!("{}_{}_{operation}", self.class.name(), work.name()), figure, None);
        }
        Ok(())
    }
}

fn model(source: &dyn ModelSource, device: &dyn Device, sequences: usize, rows_max: usize) -> anyhow::Result<Stepped> {
    let config = ModelConfig {
        kv: Dtype::Bf16,
        rows_max,
        logit_rows_max: sequences,
        slots_max: sequences,
        model_len_max: POSITIONS,
        adapters: AdapterBounds::default(),
    };
    let mut model = Model::load(source, device, config, &|_| ())?;
    let map = KvPoolMap::try_new(model.layout(BLOCK as u32)?, (sequences * POSITIONS / BLOCK) as u32)?;
    model.bind(HostPool::filled(map.bytes(), 0)?, &map)?;
    Ok(Stepped { model, steps: TableSteps::default() })
}

/// Seconds of a step, and its logits.
fn step(of: &mut Stepped, rows: Rows) -> anyhow::Result<(f64, Logits)> {
    let step = of.steps.step(rows.ids, rows.segments, rows.logit_rows, 0);
    let begin = Instant::now();
    of.model.launch(&step, &mut |_, _| ())?;
    let logits = of.model.finish()?.logits;
    Ok((begin.elapsed().as_secs_f64(), logits))
}

/// The bits of the logits of a prompt's last token: as it is prefilled, and as each of so many sequences decodes it, which hold the prompt
/// before it.
fn outcome(of: &mut Stepped, tokens: usize, sequences: usize) -> anyhow::Result<Vec<Vec<u32>>> {
    let (_, prefilled) = step(of, prefill_step(tokens))?;
    step(of, prefill_step(tokens - 1))?;
    for sequence in 1..sequences {
        let [from, to] = [0, sequence].map(|of| GroupBlocks(vec![blocks(of)]));
        of.model.copy(&ForkCopy { from, to, tokens: BLOCK })?;
    }
    let last = Rows { ids: vec![ids(tokens)[tokens - 1]; sequences], ..decode_step(sequences, tokens - 1) };
    let (_, decoded) = step(of, last)?;
    let rows = [&prefilled, &decoded].into_iter().flat_map(|logits| (0..logits.rows()).map(|row| logits.row(row)));
    Ok(rows.map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect())
}

/// Rates of one kind of work in five rounds: of each class that it is measured of, with the roof beside it, and of each peer.
struct Rates {
    classes: Vec<Vec<f64>>,
    roofs: Vec<Vec<f64>>,
    peers: Vec<Vec<f64>>,
}

fn rates(work: Work, subjects: &mut [Subject], peers: &mut [Peer]) -> anyhow::Result<Rates> {
    let none = vec![Vec::new(); subjects.len()];
    let mut rates = Rates { classes: none.clone(), roofs: none, peers: vec![Vec::new(); peers.len()] };
    let tokens = work.tokens() as f64;
    // The first of each computes prompts and touches memory.
    peers.iter_mut().try_for_each(|peer| peer.measure(work).map(drop))?;
    for _ in 0..ROUNDS {
        for (at, subject) in subjects.iter_mut().enumerate().filter(|(_, subject)| subject.class.measures(work)) {
            rates.roofs[at].extend(subject.roofs.of(work));
            rates.classes[at].push(tokens / subject.measure(work)?);
        }
        for (peer, rates) in peers.iter_mut().zip(&mut rates.peers) {
            rates.push(tokens / peer.measure(work)?);
        }
    }
    peers.iter_mut().try_for_each(Peer::release)?;
    Ok(rates)
}

/// Measures the named works, or all of them.
pub(crate) fn measure(summary: &mut Summary, names: &[String]) -> anyhow::Result<()> {
    let is_known = |name: &String| WORKS.iter().any(|work| work.name() == *name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        bail!("no work {unknown:?}: {}", WORKS.map(Work::name).join(", "));
    }
    let wanted = |work: &Work| names.is_empty() || names.contains(&work.name());

    eprintln!("numerics classes of the default model on {THREADS} threads");
    let source = models::open(&ModelSettings::default(), &|_, _| ())?;
    let cache = environment::cache_home().context("there is no home folder")?;
    let mut peers = peers::all(&cache.join("baton/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"))?;
    let (mut subjects, mut wrong) = (Vec::new(), Vec::new());
    let is_measured = |class: &Class| WORKS.into_iter().any(|work| wanted(&work) && class.measures(work));
    for class in CLASSES.into_iter().filter(is_measured) {
        let wide = Wide(source.as_ref());
        let source = if class == WIDE { &wide } else { source.as_ref() };
        let mut subject = Subject::load(source, class)?;
        match subject.check(source) {
            Ok(()) => subjects.push(subject),
            Err(error) => wrong.push(error.to_string()),
        }
    }
    let (mut peaks, mut all) = (Peaks::default(), Vec::new());
    for work in WORKS.into_iter().filter(wanted) {
        eprintln!("  {}", work.name());
        peaks.round();
        for subject in subjects.iter_mut().filter(|subject| subject.class != WIDE) {
            subject.roofs.round();
        }
        all.push((work, rates(work, &mut subjects, &mut peers)?));
    }
    peaks.add(summary);
    subjects.iter().for_each(|subject| subject.roofs.add(&subject.class.name(), summary));
    for (work, rates) in &all {
        figures::add(*work, rates, source.spec(), &subjects, &peers, summary);
    }
    for subject in &mut subjects {
        for work in TIMED.into_iter().filter(wanted) {
            if subject.class.measures(work) {
                subject.operations(work, summary)?;
            }
        }
        if wanted(&SAMPLED) && subject.class.measures(SAMPLED) {
            sampling::measure(subject, summary)?;
        }
    }
    ensure!(wrong.is_empty(), "no figures of {}", wrong.join("; "));
    Ok(())
}
