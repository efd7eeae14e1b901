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
    Up(up::UpArgs),
    /// Sends one prompt to a running cluster and streams the answer.
    Generate(generate::GenerateArgs),
    /// Puts load on a running cluster, recorded or made up, and tells how it was served.
    Bench(bench::BenchArgs),
    /// Checks whether this host is fit for a cluster, and the way to another host.
    Doctor(doctor::DoctorArgs),
    /// Takes a worker out of a running cluster: no new work, what runs ends or goes on elsewhere.
    Drain(drain::DrainArgs),
    /// Makes an authority and certificates for the processes of a cluster that is not started by `baton up`.
    Identity(identity::IdentityArgs),
    /// Finds out how a node of etcd comes into its cluster; runs before etcd in each pod of the chart's StatefulSet.
    EtcdJoin(etcd_join::EtcdJoinArgs),
    /// Tells what KV of a model takes, and how many sequences fit into a GPU; needs no cluster.
    KvSize(kv_size::KvSizeArgs),
    /// Shows what a running cluster does, and first of all what is the matter with it.
    Status(status::StatusArgs),
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
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("baton: {error:#}");
            ExitCode::FAILURE
        }
    }
}
