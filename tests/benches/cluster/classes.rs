//! The default model in each numerics class, step by step without an engine: prefill and decode against the roofs of this machine, the time of
//! each operation, and other engines beside it where they are installed. All take turns in every round.
//!
//! A class whose bits are not those of the reference has no figures, and the run fails.

use crate::THREADS;
use crate::peers::{self, Peer, Work};
use crate::sampling;
use crate::statistics::{best, median, paired_ratio_at_least};
use crate::summary::{Figure, Summary};
use anyhow::{Context, ensure};
use baton_engine::formats::ModelSource;
use baton_engine::model::{Model, ModelConfig, StepSegment};
use baton_engine::models::TensorName;
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::device::Device;
use baton_kernels::host::Times;
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::roofline;
use baton_kernels::step::TableSteps;
use baton_memory::HostPool;
use baton_node::environment;
use baton_types::{BlockId, BlockTable, Dtype, KvPoolMap, TokenId};
use baton_worker::models;
use baton_worker::settings::ModelSettings;
use std::time::Instant;

const CLASSES: [Numerics; 3] = [Numerics::F32Fma { weights: Dtype::Bf16 }, Numerics::Bf16x32, Numerics::I8x32];
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
/// Tokens that the reference computes: it is scalar.
const CHECKED: usize = 12;

/// A model in one class.
pub(crate) struct Subject {
    pub(crate) numerics: Numerics,
    pub(crate) model: Stepped,
    pub(crate) times: Times,
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
    fn load(source: &dyn ModelSource, numerics: Numerics) -> anyhow::Result<Self> {
        let times = Times::default();
        let device = cpu::timed(CpuConfig { threads: THREADS, simd: None, numerics }, times.clone())?;
        Ok(Self { numerics, model: model(source, device.as_ref(), SEQUENCES_MAX)?, times })
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

    /// Whether its bits are those of the reference, prefilled and decoded.
    fn check(&mut self, source: &dyn ModelSource) -> anyhow::Result<()> {
        let device = ReferenceDevice::new(self.numerics);
        let wanted = outcome(&mut model(source, device.as_ref(), 1)?, CHECKED)?;
        ensure!(outcome(&mut self.model, CHECKED)? == wanted, "{}: not the bits of the reference", self.numerics);
        let [prefilled, decoded] = outcome(&mut self.model, 200)?;
        ensure!(prefilled == decoded, "{}: decode and prefill differ in bits", self.numerics);
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
            summary.add(&format!("{}_{}_{operation}", self.numerics, work.name()), figure, None);
        }
        Ok(())
    }
}

fn model(source: &dyn ModelSource, device: &dyn Device, sequences: usize) -> anyhow::Result<Stepped> {
    let rows_max = if sequences == 1 { CHECKED } else { 2048 };
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

/// Seconds of a step, and its first row of logits.
fn step(of: &mut Stepped, rows: Rows) -> anyhow::Result<(f64, Vec<f32>)> {
    let step = of.steps.step(rows.ids, rows.segments, rows.logit_rows, 0);
    let begin = Instant::now();
    of.model.launch(&step, &mut |_, _| ())?;
    let logits = of.model.finish()?.logits;
    Ok((begin.elapsed().as_secs_f64(), logits.row(0).to_vec()))
}

/// The bits of the logits of a prompt's last token: as it is prefilled, and as it is decoded.
fn outcome(model: &mut Stepped, tokens: usize) -> anyhow::Result<[Vec<u32>; 2]> {
    let (_, prefilled) = step(model, prefill_step(tokens))?;
    step(model, prefill_step(tokens - 1))?;
    let last = Rows { ids: ids(tokens)[tokens - 1..].to_vec(), ..decode_step(1, tokens - 1) };
    let (_, decoded) = step(model, last)?;
    Ok([prefilled, decoded].map(|logits| logits.into_iter().map(f32::to_bits).collect()))
}

/// Rates of this machine.
#[derive(Default)]
struct Roofs {
    fma: Vec<f64>,
    /// Of the instructions of each class.
    classes: [Vec<f64>; CLASSES.len()],
    amx_int8: Vec<f64>,
    /// Of reading what a decode step of each class reads.
    reads: [Vec<f64>; CLASSES.len()],
}

impl Roofs {
    fn round(&mut self, bytes: [usize; CLASSES.len()]) {
        self.fma.push(roofline::fma_peak(THREADS));
        self.amx_int8.extend(roofline::amx_int8_peak(THREADS));
        for (i, class) in CLASSES.into_iter().enumerate() {
            self.classes[i].push(roofline::matrix_peak(class, THREADS));
            self.reads[i].push(roofline::read_bandwidth_of(bytes[i], THREADS));
        }
    }

    fn add(&self, bytes: [usize; CLASSES.len()], summary: &mut Summary) {
        summary.add("roof_fma", Figure::plain(best(self.fma.clone()), "GFLOP/s"), None);
        if !self.amx_int8.is_empty() {
            summary.add("roof_amx_int8", Figure::plain(best(self.amx_int8.clone()), "GOP/s"), None);
        }
        for (i, class) in CLASSES.into_iter().enumerate() {
            let peak = Figure::plain(best(self.classes[i].clone()), "GFLOP/s");
            summary.add(&format!("roof_{class}"), peak, None);
            let of = format!("reading {:.0} MB on huge pages", bytes[i] as f64 / 1e6);
            let read = Figure { of: Some(of), ..Figure::plain(best(self.reads[i].clone()), "GB/s") };
            summary.add(&format!("roof_read_{class}"), read, None);
        }
    }
}

/// Rates of one kind of work in five rounds: of each class, and of each peer.
struct Rates {
    classes: Vec<Vec<f64>>,
    peers: Vec<Vec<f64>>,
}

fn rates(work: Work, subjects: &mut [Subject], peers: &mut [Peer]) -> anyhow::Result<Rates> {
    let mut rates = Rates { classes: vec![Vec::new(); subjects.len()], peers: vec![Vec::new(); peers.len()] };
    let tokens = work.tokens() as f64;
    // The first of each computes prompts and touches memory.
    peers.iter_mut().try_for_each(|peer| peer.measure(work).map(drop))?;
    for _ in 0..ROUNDS {
        for (subject, rates) in subjects.iter_mut().zip(&mut rates.classes) {
            rates.push(tokens / subject.measure(work)?);
        }
        for (peer, rates) in peers.iter_mut().zip(&mut rates.peers) {
            rates.push(tokens / peer.measure(work)?);
        }
    }
    peers.iter_mut().try_for_each(Peer::release)?;
    Ok(rates)
}

/// Bytes of the matrices of a model whose quantized ones stay as the file stores them; all others have two for each weight.
pub(crate) fn stored_bytes(source: &dyn ModelSource) -> anyhow::Result<usize> {
    let spec = source.spec();
    let mut bytes = 0;
    // Of an embedding that is not the output too, a step reads a row for each token.
    let is_read = |name: &TensorName| !name.is_vector() && (spec.tied || *name != TensorName::Embedding);
    for name in spec.tensor_names().filter(is_read) {
        let stored = source.stored(name)?;
        let wide = 2 * spec.tensor_dims(name).iter().product::<usize>();
        bytes += if stored.format.is_quantized() { stored.bytes.len() } else { wide };
    }
    Ok(bytes)
}

/// Bytes of weights that a decode step reads in each class.
fn read_bytes(source: &dyn ModelSource) -> anyhow::Result<[usize; CLASSES.len()]> {
    let (wide, stored) = (2 * source.spec().parameters() as usize, stored_bytes(source)?);
    Ok([wide, stored, stored])
}

/// Measures the named works, or all of them.
pub(crate) fn measure(summary: &mut Summary, names: &[String]) -> anyhow::Result<()> {
    let is_known = |name: &String| WORKS.iter().any(|work| work.name() == *name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        anyhow::bail!("no work {unknown:?}: {}", WORKS.map(Work::name).join(", "));
    }
    let wanted = |work: &Work| names.is_empty() || names.contains(&work.name());

    eprintln!("numerics classes of the default model on {THREADS} threads");
    let source = models::open(&ModelSettings::default(), &|_, _| ())?;
    let cache = environment::cache_home().context("there is no home folder")?;
    let mut peers = peers::all(&cache.join("baton/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"))?;
    let (mut subjects, mut wrong) = (Vec::new(), Vec::new());
    for class in CLASSES {
        let mut subject = Subject::load(source.as_ref(), class)?;
        match subject.check(source.as_ref()) {
            Ok(()) => subjects.push(subject),
            Err(error) => wrong.push(error.to_string()),
        }
    }
    let (bytes, mut roofs) = (read_bytes(source.as_ref())?, Roofs::default());
    let mut all = Vec::new();
    for work in WORKS.into_iter().filter(wanted) {
        eprintln!("  {}", work.name());
        roofs.round(bytes);
        all.push((work, rates(work, &mut subjects, &mut peers)?));
    }
    roofs.add(bytes, summary);
    for (work, rates) in &all {
        figures(*work, rates, &subjects, &peers, summary);
    }
    for subject in &mut subjects {
        TIMED.into_iter().filter(wanted).try_for_each(|work| subject.operations(work, summary))?;
        if wanted(&SAMPLED) {
            sampling::measure(subject, summary)?;
        }
    }
    ensure!(wrong.is_empty(), "no figures of {}", wrong.join("; "));
    Ok(())
}

/// Medians; of a class also the ratio to the best peer, of which one run shows that it is at least that.
fn figures(work: Work, rates: &Rates, subjects: &[Subject], peers: &[Peer], summary: &mut Summary) {
    let medians: Vec<f64> = rates.peers.iter().map(|rates| median(rates.clone())).collect();
    let best = (0..peers.len()).max_by(|a, b| medians[*a].total_cmp(&medians[*b]));
    for (subject, ours) in subjects.iter().zip(&rates.classes) {
        let mut figure = Figure::plain(median(ours.clone()), "tokens/s");
        if let Some(best) = best {
            figure.ratio = Some(paired_ratio_at_least(ours, &rates.peers[best]));
            figure.of = Some(format!("{}; lower end of the 90% interval of {ROUNDS} pairs", peers[best].name));
        }
        summary.add(&format!("{}_{}", subject.numerics, work.name()), figure, None);
    }
    for (peer, median) in peers.iter().zip(medians) {
        let figure = Figure { of: Some(peer.name.clone()), ..Figure::plain(median, "tokens/s") };
        summary.add(&format!("{}_{}", peer.key, work.name()), figure, None);
    }
}
