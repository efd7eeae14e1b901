//! `baton`: starts a cluster on this machine and talks to one.

use clap::{Parser, Subcommand};
use std::process::ExitCode;

mod drain;
mod generate;
mod trace;
mod up;

/// A disaggregated prefill/decode cluster for serving large language models.
#[derive(Parser)]
#[command(name = "baton", version, about)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Starts a router, prefill workers and decode workers on this machine, until Ctrl-C.
    Up(up::UpArgs),
    /// Sends one prompt to a running cluster and streams the answer.
    Generate(generate::GenerateArgs),
    /// Takes a worker out of a running cluster: no new work, what runs ends or goes on elsewhere.
    Drain(drain::DrainArgs),
    /// Shows where the time of one recent request went.
    Trace(trace::TraceArgs),
}

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("baton: cannot start a runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        match Cli::parse().verb {
            Verb::Up(args) => up::run(args).await,
            Verb::Generate(args) => generate::run(args).await,
            Verb::Drain(args) => drain::run(args).await,
            Verb::Trace(args) => trace::run(args).await,
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton: {error:#}");
            ExitCode::FAILURE
        }
    }
}
