//! The default model on its engine, without a network: tokens per second. Its steps are compared with this machine's roofs in `classes`.

use crate::statistics::{best, median};
use crate::summary::{Figure, Summary};
use crate::{THREADS, gemm};
use anyhow::{Context, ensure};
use baton_engine::api::{Run, SequenceEvent, SequenceRequest, SequenceSink};
use baton_engine::families::DecoderSpec;
use baton_engine::{AdapterUse, EngineHandle, SequenceControl};
use baton_tests::{golden, work};
use baton_types::{RequestId, SamplingParams, Share, TokenId};
use baton_worker::settings::{EngineSettings, ModelSettings, SpeculationSettings};
use baton_worker::{bring_up, models};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

const ROUNDS: usize = 6;
pub(crate) const DECODE_PROMPT: usize = 64;
pub(crate) const DECODE_TOKENS: usize = 64;
pub(crate) const BATCH: usize = 8;
/// Rounds of prefill: the longest prompts take seconds.
const PREFILL_ROUNDS: usize = 3;
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// A greedy choice in bf16 may differ from float32 only where the best two logits are nearer than this.
const MARGIN: f64 = 0.25;

struct Sink(SyncSender<SequenceEvent>);

impl SequenceSink for Sink {
    fn has_room(&self, _: usize) -> bool {
        true // The channel holds all events of one sequence.
    }
    fn send(&mut self, event: SequenceEvent) -> bool {
        self.0.try_send(event).is_ok()
    }
}

/// One sequence under way.
pub(crate) struct Sequence {
    events: Receiver<SequenceEvent>,
    begin: Instant,
    _control: SequenceControl,
}

/// Its tokens and when each was there, in seconds from the start.
pub(crate) struct Output {
    pub(crate) tokens: Vec<u32>,
    at: Vec<f64>,
}

pub(crate) fn submit(
    engine: &EngineHandle,
    prompt: &[u32],
    max_tokens: usize,
    adapter: Option<AdapterUse>,
) -> anyhow::Result<Sequence> {
    let sampling = SamplingParams {
        temperature: 0.0,
        max_tokens: max_tokens as u32,
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = SequenceRequest {
        id: RequestId::try_new("bench")?,
        tokens: prompt.to_vec(),
        prompt_len: prompt.len(),
        sampling,
        sample_index: 0,
        deadline: Instant::now() + ANSWER_MAX,
        priority: 0,
        share: Share::default(),
        prefix: None,
        adapter,
    };
    let (sender, events) = sync_channel(max_tokens + 4);
    let begin = Instant::now();
    let control = engine.submit(request, Run::Full, Box::new(Sink(sender)))?;
    Ok(Sequence { events, begin, _control: control })
}

impl Sequence {
    pub(crate) fn output(self) -> anyhow::Result<Output> {
        let mut output = Output { tokens: Vec::new(), at: Vec::new() };
        loop {
            match self.events.recv_timeout(ANSWER_MAX).context("the engine is silent")? {
                SequenceEvent::Token { token, at, .. } => {
                    output.tokens.push(token);
                    output.at.push((at - self.begin).as_secs_f64());
                }
                SequenceEvent::Finished { .. } => return Ok(output),
                SequenceEvent::Failed { message, .. } => anyhow::bail!("the engine failed: {message}"),
                SequenceEvent::Started { .. } | SequenceEvent::Prompt(_) | SequenceEvent::Prefilled { .. } => {}
            }
        }
    }
}

impl Output {
    /// Seconds of the median decode step from token `first` on.
    pub(crate) fn step_s(&self, first: usize) -> f64 {
        median(self.at[first..].windows(2).map(|pair| pair[1] - pair[0]).collect())
    }
}

impl Output {
    /// Seconds of the fastest decode step from token `first` on.
    pub(crate) fn fastest_step_s(&self, first: usize) -> f64 {
        self.at[first..].windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min)
    }
}

/// A prompt of any tokens, different in each sequence.
pub(crate) fn prompt(len: usize, salt: usize) -> Vec<TokenId> {
    (0..len).map(|i| 100 + ((i + 7 * salt) * 7919 % 48_000) as u32).collect()
}

/// Answers must be the reference's before anything is timed.
fn check(engine: &EngineHandle) -> anyhow::Result<()> {
    for case in golden::all()?.iter().take(4) {
        let output = submit(engine, &case.prompt_ids, case.out_ids.len(), None)?.output()?;
        let differs = output.tokens.iter().zip(&case.out_ids).position(|(got, want)| got != want);
        if let Some(step) = differs {
            let margin = case.margin[step];
            ensure!(margin < MARGIN, "wrong answer to {:?} at step {step}, margin {margin}: no figures", case.prompt);
        }
    }
    Ok(())
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("compute of the default model on {THREADS} threads");
    let settings = ModelSettings::default();
    let source = models::open(&settings, &|_, _| ())?;
    let spec = source.spec().clone();
    gemm::measure_prefill(&spec, summary)?;
    let loaded = bring_up::load(
        &settings,
        // Steps are measured one token at a time.
        &EngineSettings {
            threads: THREADS.into(),
            speculation: SpeculationSettings::off(),
            ..EngineSettings::default()
        },
        &|_, _| (),
    )?;
    let engine = &loaded.engine;
    check(engine)?;
    decode(engine, summary)?;
    prefill(engine, &spec, summary)?;
    ensure!(engine.stop(), "the engine does not stop");
    Ok(())
}

fn decode(engine: &EngineHandle, summary: &mut Summary) -> anyhow::Result<()> {
    let prompts: Vec<_> = (0..BATCH).map(|salt| prompt(DECODE_PROMPT, salt)).collect();
    let (mut one, mut eight) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let alone = submit(engine, &prompts[round % BATCH], DECODE_TOKENS, None)?.output()?;
        one.push(1.0 / alone.step_s(1));
        let sequences: Vec<_> =
            prompts.iter().map(|p| submit(engine, p, DECODE_TOKENS, None)).collect::<Result<_, _>>()?;
        let outputs: Vec<_> = sequences.into_iter().map(Sequence::output).collect::<Result<_, _>>()?;
        ensure!(outputs[round % BATCH].tokens == alone.tokens, "a batch changes the answer: no figures");
        // Early steps still prefill the others.
        eight.push(BATCH as f64 / outputs[0].step_s(DECODE_TOKENS / 2));
    }
    let (one, eight) = (best(one), best(eight));
    summary.add("decode_b1", Figure::plain(one, "tokens/s"), None);
    summary.add("decode_b8", Figure::ratio(eight, "tokens/s", eight / one, "batch of 1"), None);
    Ok(())
}

fn prefill(engine: &EngineHandle, spec: &DecoderSpec, summary: &mut Summary) -> anyhow::Result<()> {
    for len in [512, 1024, 2048] {
        let times = (0..PREFILL_ROUNDS).map(|round| Ok(submit(engine, &prompt(len, round), 1, None)?.output()?.at[0]));
        let rate = len as f64 / median(times.collect::<anyhow::Result<_>>()?);
        let gemms = work::matrix_operations(spec) as f64 * rate / 1e9;
        let of = format!("{gemms:.0} GFLOP/s in the layers' GEMMs alone; attention and all else included in the time");
        summary.add(&format!("prefill_{len}"), Figure { of: Some(of), ..Figure::plain(rate, "tokens/s") }, None);
    }
    Ok(())
}
