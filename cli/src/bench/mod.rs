//! `baton bench`: puts recorded or synthetic load on a running cluster, and reports how it was served.
//!
//! [`trace`] reads recorded requests, [`load`] fits them to this cluster, [`replay`] sends them, [`report`] summarizes the results.
//! [`simulate`] needs no cluster.

mod args;
mod load;
mod replay;
mod report;
mod simulate;
mod trace;

use crate::stdout;
use anyhow::{Context as _, ensure};
pub(crate) use args::BenchArgs;
use load::{Load, Prompts};
use replay::{Replayed, Target};
use report::{About, Report};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use trace::Trace;

/// Puts the load on the router and reports the results. Fails if no request was answered.
pub(crate) async fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    if args.simulate.simulate {
        return simulated(&args).map(|()| ExitCode::SUCCESS);
    }
    let (title, load, mut facts) = load_of(&args)?;
    // Before the load: a report that cannot be written should not be noticed only an hour later.
    let files = [&args.json, &args.html].map(|path| path.as_deref().map(create).transpose());
    let [json, html] = files;
    let (json, html) = (json?, html?);
    let channel = args.router.connect("start a cluster with `baton up`, or ").await?;
    let target = Target { channel, model: args.model.clone(), timeout: Duration::from_secs(args.timeout_s) };
    let seed = args.seed.unwrap_or_else(drawn);
    let prompts = Arc::new(Prompts::new(&load.trace, args.token_ids.clone(), seed));
    eprintln!("{title}: {}", announced(&load));
    let replayed = replay::run(&load, prompts, &target).await?;
    facts.insert("seed".into(), json!(seed));
    tell_of(&replayed, &load, &mut facts);
    let report = Report::of(About { title, facts }, &replayed.outcomes, args.slo());
    // A closed stdout is not an error of this command.
    stdout::tell(&report.table()).context("cannot print the report")?;
    let files = [(json, serde_json::to_string(&report)?), (html, report.html())];
    for (mut file, text) in files.into_iter().filter_map(|(file, text)| Some((file?, text))) {
        file.write_all(text.as_bytes()).context("cannot write the report")?;
    }
    Ok(if report.counts.ok > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Simulates a trace instead of sending it.
fn simulated(args: &BenchArgs) -> anyhow::Result<()> {
    let path = args.trace.as_deref().context("--simulate needs --trace")?;
    ensure!(
        args.html.is_none() || args.simulate.runs() == 1,
        "--html shows one simulation: give one policy and one pool size"
    );
    let [json, html] = [&args.json, &args.html].map(|path| path.as_deref().map(create).transpose());
    let (json, html) = (json?, html?);
    let (trace, _) = args.replay.fit().apply(&Trace::read(path, args.replay.format)?);
    ensure!(!trace.requests.is_empty(), "no request of the trace is left; see --from, --limit and --context-max");
    let reports = simulate::run(&args.simulate, trace, args.seed.unwrap_or(1), args.slo())?;
    let page = reports.first().map(Report::html).unwrap_or_default();
    for (mut file, text) in
        [(json, serde_json::to_string(&reports)?), (html, page)].into_iter().filter_map(|(f, t)| Some((f?, t)))
    {
        file.write_all(text.as_bytes()).context("cannot write the report")?;
    }
    Ok(())
}

/// The title of the load, the requests to send, and facts for the report.
fn load_of(args: &BenchArgs) -> anyhow::Result<(String, Load, Map<String, Value>)> {
    let mut facts = Map::new();
    let mut fact = |name: &str, value: Value| facts.insert(name.to_owned(), value);
    let Some(path) = &args.trace else {
        let synthetic = args.synthetic.synthetic()?;
        fact("prompt_tokens", json!(synthetic.prompt_tokens));
        fact("output_tokens", json!(synthetic.output_tokens));
        fact("shared_prefix_tokens", json!(synthetic.shared_prefix_tokens));
        let load = Load::new(synthetic.trace(), args.synthetic.pace());
        if let load::Pace::Closed { concurrency } = load.pace {
            fact("concurrency", json!(concurrency));
        }
        return Ok(("equal requests".into(), load, facts));
    };
    let fit = args.replay.fit();
    let (trace, fitted) = fit.apply(&Trace::read(path, args.replay.format)?);
    let dropped = fitted.dropped;
    ensure!(
        !trace.requests.is_empty(),
        "no request of the trace is left: {dropped} are longer than --context-max; see --from, --scale and --too-long"
    );
    fact("speed", json!(fit.speed));
    fact("scale", json!(fitted.scale));
    fact("block_tokens", json!(trace.block_tokens));
    fact("dropped_beyond_context", json!(dropped));
    fact("cut_to_context", json!(fitted.cut));
    let load = Load::new(trace, args.replay.pace());
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok((name, load, facts))
}

/// One line printed before a load begins.
fn announced(load: &Load) -> String {
    let requests = stdout::grouped(load.trace.requests.len() as u64);
    let span = load.span().map(|span| format!(" over {:.1} s", span.as_secs_f64())).unwrap_or_default();
    let sharing = if load.trace.sharing_known {
        let (blocks, tokens) = (load.infinite.block_rate() * 100.0, load.infinite.token_rate() * 100.0);
        let unique = stdout::grouped(load.infinite.blocks_unique);
        format!(
            "an infinite cache would hit {blocks:.1}% of the blocks ({unique} different ones), {tokens:.1}% of the tokens"
        )
    } else {
        "the trace tells nothing of sharing".into()
    };
    format!("{requests} requests{span}; {sharing}")
}

/// Adds the facts that only the replay knows.
fn tell_of(replayed: &Replayed, load: &Load, facts: &mut Map<String, Value>) {
    if let load::Pace::Open { in_flight_max } = load.pace {
        facts.insert("in_flight_max".into(), json!(in_flight_max));
        facts.insert("sent_late_ms_max".into(), json!((replayed.late_max.as_secs_f64() * 1e3).round()));
    }
    if replayed.unsent > 0 {
        facts.insert("interrupted_before".into(), json!(replayed.unsent));
    }
}

fn create(path: &Path) -> anyhow::Result<File> {
    File::create(path).with_context(|| format!("cannot write {}", path.display()))
}

/// A new random seed. Short, so that it can be typed.
fn drawn() -> u64 {
    RandomState::new().build_hasher().finish() >> 40
}
