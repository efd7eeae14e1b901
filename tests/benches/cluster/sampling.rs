//! The share of sampling in a decode step of 32 sequences of the default model, each over real text, so that the model is as sure of the next
//! token as it is in use.

use crate::classes::{SEQUENCES_MAX, Stepped, Subject, blocks};
use crate::statistics::median;
use crate::summary::{Figure, Summary, Target};
use anyhow::Context;
use baton_kernels::step::{Delta, Join, RowId, SlotRows, StepInput};
use baton_types::{BlockTable, BlockTables, SamplingParams, TokenId};
use serde::Deserialize;
use std::path::Path;
use std::time::Instant;

const CONTEXT: usize = 128;
/// Sequences of a step that computes prompts.
const TOGETHER: usize = 16;
const STEPS: usize = 24;
/// What sampling may take of a step.
const SHARE_MAX: f64 = 0.03;

/// A case of the recorded outputs.
#[derive(Deserialize)]
struct Recorded {
    prompt_ids: Vec<TokenId>,
    out_ids: Vec<TokenId>,
}

/// Prompts, and what the model said, one after another.
fn text() -> anyhow::Result<Vec<TokenId>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/smollm2_greedy.jsonl");
    let lines = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut text = Vec::new();
    for line in lines.lines() {
        let Recorded { prompt_ids, out_ids } = serde_json::from_str(line)?;
        text.extend(prompt_ids.into_iter().chain(out_ids));
    }
    Ok(text)
}

/// A step of one segment for each of these slots.
fn step(slots: std::ops::Range<usize>, position: usize, rows: usize, ids: Vec<RowId>, deltas: Vec<Delta>) -> StepInput {
    let segments = slots.map(|slot| SlotRows { slot, position, rows, samples: 1, masks: Vec::new() }).collect();
    StepInput { deltas, ids, segments, ..StepInput::default() }
}

fn run(of: &mut Stepped, step: &StepInput) -> anyhow::Result<f64> {
    let begin = Instant::now();
    of.model.launch(step, &mut |_, _| ())?;
    let sampled = of.model.finish()?.sampled;
    let seconds = begin.elapsed().as_secs_f64();
    for row in sampled.into_iter().flat_map(|of| of.rows) {
        row.context("a row is not sampled")?;
    }
    Ok(seconds)
}

/// Milliseconds of sampling a step, and its share of the step: medians.
fn share(subject: &mut Subject, sampling: &SamplingParams) -> anyhow::Result<(f64, f64)> {
    let text = text()?;
    let mut leave = subject.model.steps.leave();
    for first in (0..SEQUENCES_MAX).step_by(TOGETHER) {
        let slots = first..first + TOGETHER;
        let mut ids = Vec::new();
        for slot in slots.clone() {
            let from = slot * 7 * CONTEXT % (text.len() - CONTEXT);
            let tokens = text[from..from + CONTEXT].to_vec();
            ids.extend(tokens.iter().map(|token| RowId::Token(*token)));
            let sampling = SamplingParams { seed: slot as u64, ..sampling.clone() };
            let tables = BlockTables(vec![BlockTable::from_start(blocks(slot))]);
            let join = Join { slot, tables, tokens, prompt_len: CONTEXT, sampling, ..Join::default() };
            leave.push(Delta::Join(Box::new(join)));
        }
        run(&mut subject.model, &step(slots, 0, CONTEXT, ids, std::mem::take(&mut leave)))?;
    }
    let (mut times, mut shares) = (Vec::new(), Vec::new());
    for at in 0..STEPS {
        let ids = vec![RowId::LastSampled; SEQUENCES_MAX];
        subject.times.take();
        let seconds = run(&mut subject.model, &step(0..SEQUENCES_MAX, CONTEXT + at, 1, ids, Vec::new()))?;
        let sampling = subject.times.take().get("sample").context("nothing is sampled")?.as_secs_f64();
        times.push(sampling * 1e3);
        shares.push(sampling / seconds);
    }
    subject.model.steps.joined(SEQUENCES_MAX);
    Ok((median(times), median(shares)))
}

/// Greedy, and with top-p at two temperatures.
pub(crate) fn measure(subject: &mut Subject, summary: &mut Summary) -> anyhow::Result<()> {
    let warm =
        SamplingParams { max_tokens: STEPS as u32 + 1, temperature: 0.8, top_p: 0.95, ..SamplingParams::default() };
    let hot = SamplingParams { temperature: 1.0, ..warm.clone() };
    let greedy = SamplingParams { temperature: 0.0, ..warm.clone() };
    for (name, sampling) in [("greedy", greedy), ("top_p", warm), ("top_p_hot", hot)] {
        let (milliseconds, share) = share(subject, &sampling)?;
        let of = format!("the step; temperature {}, top-p {}", sampling.temperature, sampling.top_p);
        let figure = Figure::ratio(milliseconds, "ms", share, of);
        let name = format!("{}_b{SEQUENCES_MAX}_context{CONTEXT}_sample_{name}", subject.class.name());
        summary.add(&name, figure, Target::AtMost(SHARE_MAX));
    }
    Ok(())
}
