//! The default model with and without proposed tokens, one sequence at a time: answers that repeat their prompts, and others. Each prompt is
//! answered by two engines of this process, in turns. A token that differs ends the run without a figure.

use crate::THREADS;
use crate::statistics::median;
use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_engine::api::{Run, SequenceEvent, SequenceRequest, SequenceSink};
use baton_engine::{EngineHandle, Load};
use baton_text::{Specials, Tokenizer, bundle};
use baton_types::{RequestId, SamplingParams, Share, TokenId};
use baton_worker::bring_up;
use baton_worker::settings::{EngineSettings, ModelSettings, SpeculationSettings};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

const PROMPTS: usize = 200;
const ANSWER_TOKENS: u32 = 64;
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// What answers that repeat their prompts should gain.
const GAIN: f64 = 1.3;
/// What others may lose.
const KEPT: f64 = 0.97;

/// What an answer is to do with a text, which it mostly repeats.
const TASKS: [&str; 4] = [
    "Repeat this text word for word:",
    "Correct the spelling of this text and change nothing else:",
    "Print this text as a Markdown quotation, with > before each line:",
    "Put this text between quotation marks:",
];

/// Questions about a subject, whose answers are drawn.
const QUESTIONS: [&str; 10] = [
    "Write a short poem about",
    "Tell me a surprising fact about",
    "What would a child ask about",
    "Write the first lines of a novel about",
    "Explain in plain words what people should know about",
    "Write a letter to a friend about",
    "What is the history of",
    "Argue for and against",
    "Describe a picture of",
    "Invent a dialogue about",
];

const SUBJECTS: [&str; 20] = [
    "bread",
    "the moon",
    "trains",
    "winter",
    "a lost key",
    "mathematics",
    "the sea",
    "gardens",
    "sleep",
    "bicycles",
    "an old clock",
    "mountains",
    "tea",
    "languages",
    "a broken radio",
    "volcanoes",
    "maps",
    "chess",
    "rivers",
    "the first snow",
];

struct Sink(SyncSender<SequenceEvent>);

impl SequenceSink for Sink {
    fn has_room(&self, _: usize) -> bool {
        true // The channel holds all events of one sequence.
    }
    fn send(&mut self, event: SequenceEvent) -> bool {
        self.0.try_send(event).is_ok()
    }
}

struct Answer {
    tokens: Vec<TokenId>,
    /// From the first token to the last.
    seconds: f64,
}

fn ask(engine: &EngineHandle, prompt: &[TokenId], sampling: &SamplingParams) -> anyhow::Result<Answer> {
    let request = SequenceRequest {
        id: RequestId::try_new("bench")?,
        tokens: prompt.to_vec(),
        prompt_len: prompt.len(),
        sampling: sampling.clone(),
        sample_index: 0,
        deadline: Instant::now() + ANSWER_MAX,
        priority: 0,
        share: Share::default(),
        prefix: None,
        adapter: None,
    };
    let (sender, events) = sync_channel(ANSWER_TOKENS as usize + 4);
    let _control = engine.submit(request, Run::Full, Box::new(Sink(sender)))?;
    let (mut tokens, mut first) = (Vec::new(), None);
    loop {
        match events.recv_timeout(ANSWER_MAX).context("the engine is silent")? {
            SequenceEvent::Token { token, at, .. } => {
                first.get_or_insert(at);
                tokens.push(token);
            }
            SequenceEvent::Finished { .. } => {
                let seconds = first.map_or(0.0, |first| first.elapsed().as_secs_f64());
                return Ok(Answer { tokens, seconds });
            }
            SequenceEvent::Failed { message, .. } => anyhow::bail!("the engine failed: {message}"),
            SequenceEvent::Started { .. } | SequenceEvent::Prompt(_) | SequenceEvent::Prefilled { .. } => {}
        }
    }
}

/// Paragraphs of this project's pages.
fn paragraphs() -> anyhow::Result<Vec<String>> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut pages: Vec<_> = std::fs::read_dir(docs.join("decisions"))?.collect::<Result<_, _>>()?;
    pages.sort_by_key(std::fs::DirEntry::path);
    let mut paragraphs = Vec::new();
    for page in pages {
        let text = std::fs::read_to_string(page.path())?;
        let is_prose = |line: &&str| (200..500).contains(&line.len()) && line.starts_with(char::is_uppercase);
        paragraphs.extend(text.lines().filter(is_prose).map(str::to_owned));
    }
    ensure!(paragraphs.len() >= PROMPTS / TASKS.len(), "only {} paragraphs", paragraphs.len());
    Ok(paragraphs)
}

struct Case {
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
}

fn cases(tokenizer: &Tokenizer) -> anyhow::Result<[Vec<Case>; 2]> {
    let prompt = |text: &str| {
        let turns = format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
        tokenizer.encode(&turns, Specials::Parse)
    };
    let common = SamplingParams { max_tokens: ANSWER_TOKENS, ignore_eos: true, ..SamplingParams::default() };
    let paragraphs = paragraphs()?;
    let repeating = (0..PROMPTS).map(|i| {
        let text = format!("{}\n\n{}", TASKS[i % TASKS.len()], paragraphs[i / TASKS.len()]);
        Ok(Case { prompt: prompt(&text)?, sampling: SamplingParams { temperature: 0.0, ..common.clone() } })
    });
    let others = (0..PROMPTS).map(|i| {
        let text = format!("{} {}.", QUESTIONS[i % QUESTIONS.len()], SUBJECTS[i / QUESTIONS.len()]);
        let sampling = SamplingParams { temperature: 1.0, top_p: 0.95, seed: i as u64, ..common.clone() };
        Ok(Case { prompt: prompt(&text)?, sampling })
    });
    Ok([repeating.collect::<anyhow::Result<_>>()?, others.collect::<anyhow::Result<_>>()?])
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("speculation with the default model on {THREADS} threads");
    let load = |speculation: SpeculationSettings| {
        let engine = EngineSettings { threads: THREADS.into(), speculation, ..EngineSettings::default() };
        bring_up::load(&ModelSettings::default(), &engine, &|_, _| ())
    };
    let (with, without) = (load(SpeculationSettings::ngram())?, load(SpeculationSettings::off())?);
    let text = with.bundle.as_ref().context("the default model has text")?;
    let tokenizer = Tokenizer::from_bundle(&bundle::decode(text)?)?;
    let [repeating, others] = cases(&tokenizer)?;
    for (name, cases, bound) in [("repeating", repeating, GAIN), ("others", others, KEPT)] {
        compare(name, &cases, bound, &with.engine, &without.engine, summary)?;
    }
    for engine in [&with.engine, &without.engine] {
        ensure!(engine.stop(), "an engine does not stop");
    }
    Ok(())
}

fn compare(
    name: &str,
    cases: &[Case],
    bound: f64,
    with: &EngineHandle,
    without: &EngineHandle,
    summary: &mut Summary,
) -> anyhow::Result<()> {
    let Load { proposed_tokens, accepted_tokens, .. } = with.load();
    let (mut ours, mut theirs, mut tokens) = (Vec::new(), Vec::new(), 0);
    for (i, Case { prompt, sampling }) in cases.iter().enumerate() {
        let ask = |engine| ask(engine, prompt, sampling);
        // The order changes, and with it whose turn comes after the other's.
        let (a, b) = if i % 2 == 0 {
            let a = ask(with)?;
            (a, ask(without)?)
        } else {
            let b = ask(without)?;
            (ask(with)?, b)
        };
        ensure!(a.tokens == b.tokens, "proposals change answer {i} of {name}: no figures");
        ours.push(a.seconds);
        theirs.push(b.seconds);
        tokens += a.tokens.len() - 1;
    }
    let load = with.load();
    let (proposed, accepted) = (load.proposed_tokens - proposed_tokens, load.accepted_tokens - accepted_tokens);
    let rate = |seconds: &[f64]| tokens as f64 / seconds.iter().sum::<f64>();
    let gains: Vec<f64> = ours.iter().zip(&theirs).map(|(ours, theirs)| theirs / ours).collect();
    let of = format!(
        "without; median of the prompts {:.3}, their tenth {:.3}; {accepted} of {proposed} proposals accepted, {tokens} tokens",
        median(gains.clone()),
        tenth(gains),
    );
    let (ours, theirs) = (rate(&ours), rate(&theirs));
    summary.add(&format!("speculation_off_{name}"), Figure::plain(theirs, "tokens/s"), None);
    let figure = Figure::ratio(ours, "tokens/s", ours / theirs, of);
    summary.add(&format!("speculation_{name}"), figure, Target::AtLeast(bound));
    Ok(())
}

/// The value that a tenth of them is below.
fn tenth(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 10]
}
