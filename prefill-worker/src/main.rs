//! `baton-prefill-worker`.

use baton_prefill_worker::PrefillRole;
use baton_worker::config::WorkerArgs;
use clap::Parser;
use std::process::ExitCode;

/// Runs prompts and puts their KV to decode workers.
#[derive(Parser)]
#[command(name = "baton-prefill-worker", version, about)]
struct Cli {
    #[command(flatten)]
    worker: WorkerArgs,
}

fn main() -> ExitCode {
    baton_worker::main_of(&Cli::parse().worker, |_| PrefillRole)
}
