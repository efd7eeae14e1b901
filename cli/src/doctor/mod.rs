//! `baton doctor`: whether a host is fit for a cluster, before one is deployed there, and what to do where it is not.
//!
//! Each check is a [`Finding`]: a verdict, what was found, and the remedy. What is not there fails only where it was asked for, `--rdma` or
//! `--gpu`: a laptop without either is fit for what laptops do.

mod devices;
mod finding;
mod host;
mod link;
mod members;
mod ucx;

use anyhow::ensure;
use baton_kv_transfer::TransportChoice;
use clap::Args;
use finding::{Finding, Verdict, report, worst};
use std::net::SocketAddr;
use std::path::Path;

/// Arguments of `baton doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// KV is to move over RDMA here: what that needs and is missing fails.
    #[arg(long)]
    rdma: bool,
    /// GPUs are to be used here: what they need and is missing fails.
    #[arg(long)]
    gpu: bool,
    /// Check these nodes of etcd, http://host:port, separated by commas, with the settings of BATON_MEMBERSHIP__ETCD__*.
    #[arg(long, value_name = "URLS", value_delimiter = ',')]
    etcd: Vec<String>,
    /// Answer `baton doctor --connect` of other hosts at this address, until Ctrl-C.
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "connect")]
    listen: Option<SocketAddr>,
    /// Measure the way to another host, where `baton doctor --listen` runs: reach, clock, and GB/s of KV.
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// Transports of UCX, as in UCX_TLS.
    #[arg(long, value_name = "LIST", default_value = TransportChoice::UCX_TLS_DEFAULT)]
    ucx_tls: String,
    /// Print findings as JSON.
    #[arg(long, conflicts_with = "listen")]
    json: bool,
}

/// Runs all checks and prints what they found; an error where one failed.
pub(crate) async fn run(args: DoctorArgs) -> anyhow::Result<()> {
    let mut findings = host::look(args.rdma);
    findings.extend(devices::look(Path::new("/"), args.rdma, args.gpu));
    findings.push(ucx::look(&args.ucx_tls, args.rdma));
    if !args.etcd.is_empty() {
        findings.extend(members::look(args.etcd.clone()).await?);
    }
    if let Some(to) = &args.connect {
        findings.extend(link::connect(to, &args.ucx_tls).await);
    }
    print(&findings, args.json)?;
    if let Some(address) = args.listen {
        return link::listen(address).await;
    }
    let failed = findings.iter().filter(|f| f.verdict == Verdict::Failure).count();
    ensure!(
        worst(&findings) < Verdict::Failure,
        "{failed} of {} checks failed; what to do stands below each",
        findings.len()
    );
    Ok(())
}

fn print(findings: &[Finding], json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(findings)?);
    } else {
        print!("{}", report(findings));
    }
    Ok(())
}
