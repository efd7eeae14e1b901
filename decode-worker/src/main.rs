//! `baton-decode-worker`.

use baton_decode_worker::DecodeRole;
use baton_worker::config::WorkerArgs;
use clap::Parser;
use std::process::ExitCode;

/// Receives KV from prefill workers and generates.
#[derive(Parser)]
#[command(name = "baton-decode-worker", version, about)]
struct Cli {
    #[command(flatten)]
    worker: WorkerArgs,
}

fn main() -> ExitCode {
    baton_worker::main_of(&Cli::parse().worker, DecodeRole::new)
}
