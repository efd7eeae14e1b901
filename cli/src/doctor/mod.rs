//! `baton doctor`: checks whether a host is ready for a cluster before one is deployed there, and names remedies.
//!
//! Each check is a [`Finding`]: a verdict, what was found, and the remedy. Missing RDMA or GPUs are failures only with `--rdma` or
//! `--gpu`: a laptop without either passes.

mod finding;
mod gpu;
mod host;
mod link;
mod members;
mod net_devices;
mod pcie;
mod rate;
mod rdma;
mod sysfs;
mod ucx;

use anyhow::ensure;
use baton_kernels::cuda;
use baton_kv_transfer::{UcxLanes, inventory};
use baton_node::config::ByteSize;
use baton_node::host::raise_locked_memory_limit;
use baton_worker::device;
use clap::Args;
use finding::{Finding, Verdict, report, worst};
use link::Way;
use net_devices::NetDevices;
use std::fs::File;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Arguments of `baton doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Require RDMA for KV: whatever it needs and is missing counts as a failure.
    #[arg(long)]
    rdma: bool,
    /// Require GPUs: whatever they need and is missing counts as a failure.
    #[arg(long)]
    gpu: bool,
    /// Folder of the files of GPU kernels, as a worker's engine.cuda_kernels. Default: `kernels` beside this program.
    #[arg(long, value_name = "FOLDER")]
    cuda_kernels: Option<PathBuf>,
    /// Size of a worker's KV pool, e.g. 40GiB. With --rdma, the limit of locked memory must be at least this.
    #[arg(long, value_name = "SIZE")]
    pool_bytes: Option<ByteSize>,
    /// Check these etcd nodes: http://host:port, separated by commas. BATON_MEMBERSHIP__ETCD__* gives the other settings of etcd.
    #[arg(long, value_name = "URLS", value_delimiter = ',')]
    etcd: Vec<String>,
    /// Listen at this address for `baton doctor --connect` from other hosts, until Ctrl-C.
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "connect")]
    listen: Option<SocketAddr>,
    /// Measure the link to a host that runs `baton doctor --listen`: reachability, clock offset, and throughput of KV in GB/s.
    #[arg(long, value_name = "HOST:PORT")]
    connect: Option<String>,
    /// Transports that UCX may use, as in UCX_TLS, without tcp. Default: RDMA with --rdma or --ucx-net-devices, else Baton's own TCP
    /// transport.
    #[arg(long, value_name = "LIST")]
    ucx_tls: Option<String>,
    /// Network devices that UCX may use, as in UCX_NET_DEVICES, e.g. mlx5_0:1,mlx5_1:1. Each must exist and be up. For --connect, set those
    /// of the other host there, with its --listen.
    #[arg(long, value_name = "LIST", default_value = "")]
    ucx_net_devices: NetDevices,
    /// Print findings as JSON.
    #[arg(long, conflicts_with = "listen")]
    json: bool,
}

/// Runs all checks and prints their findings; an error if one failed.
pub(crate) async fn run(args: DoctorArgs) -> anyhow::Result<()> {
    // A program reads this output, so it must not contain warnings of UCX.
    let json = args.json.then(inventory::stdout_without_ucx).transpose()?;
    raise_locked_memory_limit();
    let (root, devices) = (Path::new("/"), &args.ucx_net_devices);
    let mut findings = host::look(args.rdma, args.pool_bytes);
    let (ports, usable) = rdma::look(root, args.rdma, devices);
    findings.extend(ports);
    let wanted = gpu::Wanted { gpu: args.gpu, rdma: args.rdma };
    let kernels = device::cuda_kernels(args.cuda_kernels.as_deref().unwrap_or(Path::new("")));
    let (gpus, has_gpu) = gpu::look(root, wanted, &kernels, &rdma::usable(root, devices), cuda::host);
    findings.extend(gpus);
    let over_rdma = args.rdma || devices.given().is_some();
    let tls = args.ucx_tls.or_else(|| over_rdma.then(|| UcxLanes::Rdma.tls().into()));
    let looked = tls.clone().unwrap_or_else(|| UcxLanes::SharedMemory.tls().into());
    findings.push(ucx::look(&looked, devices, ucx::Rdma { wanted: args.rdma, usable }));
    if has_gpu {
        findings.push(ucx::look_for_cuda(args.gpu && args.rdma));
    }
    if !args.etcd.is_empty() {
        findings.extend(members::look(args.etcd.clone()).await?);
    }
    let way = Way { tls, devices: devices.clone(), rdma: args.rdma };
    if let Some(to) = &args.connect {
        findings.extend(link::connect(to, &way).await);
    }
    match json {
        Some(out) => print_json(out, &findings)?,
        None => stdout().write_all(report(&findings).as_bytes())?,
    }
    if let Some(address) = args.listen {
        return link::listen(address, devices.given().map(str::to_owned)).await;
    }
    let failed = findings.iter().filter(|f| f.verdict == Verdict::Failure).count();
    ensure!(
        worst(&findings) < Verdict::Failure,
        "{failed} of {} checks failed; what to do stands below each",
        findings.len()
    );
    Ok(())
}

fn print_json(mut out: File, findings: &[Finding]) -> anyhow::Result<()> {
    Ok(writeln!(out, "{}", serde_json::to_string_pretty(findings)?)?)
}
