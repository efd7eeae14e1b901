//! `baton`: starts a cluster on this machine and sends requests to it.

use clap::{Parser, Subcommand};
use std::process::ExitCode;

mod bench;
mod doctor;
mod drain;
mod etcd;
mod etcd_join;
mod generate;
mod grpc;
mod identity;
mod kv_size;
mod local_cluster;
mod page;
mod router;
mod status;
mod stdout;
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
    #[command(visible_alias = "serve")]
    Up(up::UpArgs),
    /// Sends one prompt to a running cluster and streams the answer; without a prompt, chats.
    Generate(generate::GenerateArgs),
    /// Sends recorded or synthetic load to a running cluster, and reports latency, throughput and cache hits.
    Bench(bench::BenchArgs),
    /// Checks whether this host is ready for a cluster, and measures the link to another host.
    Doctor(doctor::DoctorArgs),
    /// Takes a worker out of a running cluster: it gets no new requests, and running ones end or continue on other workers.
    Drain(drain::DrainArgs),
    /// Makes a certificate authority, and certificates for the processes of a cluster that `baton up` does not start.
    Identity(identity::IdentityArgs),
    /// Writes the configuration with which an etcd node joins its cluster. Runs before etcd in each pod of the Helm chart.
    EtcdJoin(etcd_join::EtcdJoinArgs),
    /// Prints how much memory a model's KV takes, and how many sequences fit on a GPU. Needs no cluster.
    KvSize(kv_size::KvSizeArgs),
    /// Shows the state of a running cluster, its problems first.
    Status(status::StatusArgs),
    /// Shows how one recent request spent its time.
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
            Verb::Up(args) => up::run(args).await.map(|()| ExitCode::SUCCESS),
            Verb::Generate(args) => generate::run(args).await.map(|()| ExitCode::SUCCESS),
            Verb::Bench(args) => bench::run(args).await,
            Verb::Doctor(args) => doctor::run(args).await.map(|()| ExitCode::SUCCESS),
            Verb::Drain(args) => drain::run(args).await.map(|()| ExitCode::SUCCESS),
            Verb::Identity(args) => identity::run(&args).map(|()| ExitCode::SUCCESS),
            Verb::EtcdJoin(args) => etcd_join::run(args).await.map(|()| ExitCode::SUCCESS),
            Verb::KvSize(args) => kv_size::run(&args).map(|()| ExitCode::SUCCESS),
            Verb::Status(args) => status::run(args).await,
            Verb::Trace(args) => trace::run(args).await.map(|()| ExitCode::SUCCESS),
        }
    });
    // A thread may still wait for the terminal; the process does not wait for it.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("baton: {error:#}");
            ExitCode::FAILURE
        }
    }
}
