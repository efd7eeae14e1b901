//! `baton bench`: load on a running cluster, and what it made of it.

mod report;
mod simulate;
mod trace;

use crate::stdout;
use anyhow::Context as _;
use clap::Args;
use std::path::PathBuf;
use trace::{Format, Trace};

/// Arguments of `baton bench`.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// Recorded requests: Mooncake's JSON lines or Azure's CSV.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// How the trace is written; told by its first line where absent.
    #[arg(long)]
    format: Option<Format>,
    #[command(flatten)]
    simulate: simulate::SimulateArgs,
}

/// Tells what a trace holds.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let trace = Trace::read(&args.trace, args.format)?;
    if args.simulate.simulate {
        return simulate::run(&args.simulate, &trace, report::Slo::default()).map(drop);
    }
    let infinite = trace.infinite_cache();
    let sharing = if trace.sharing_known {
        format!(
            "an infinite cache would hit {:.1}% of {} blocks ({} different ones), {:.1}% of the tokens",
            infinite.block_rate() * 100.0,
            infinite.blocks,
            infinite.blocks_unique,
            infinite.token_rate() * 100.0
        )
    } else {
        "it tells nothing of sharing".to_owned()
    };
    let (count, seconds) = (trace.requests.len(), trace.span().as_secs_f64());
    stdout::tell(&format!("{count} requests in {seconds:.0} s; {sharing}")).map(drop).context("cannot print")
}
