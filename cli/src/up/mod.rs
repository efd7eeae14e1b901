//! `baton up`: starts a cluster of separate processes on loopback, waits until it serves, and stops it.
//!
//! Children hold the read end of a pipe whose write end exists only in this process. However this process ends, even by a signal that
//! cannot be caught, the pipe closes, and children stop when they read its end of file.

use crate::local_cluster::LocalCluster;
use anyhow::{Context, bail, ensure};
use baton_node::announce::Announcement;
use baton_node::environment;
use baton_node::host::own_address;
use baton_node::identity::Role;
use baton_node::membership::etcd::ensure_free;
use baton_worker::settings::{ModelDtype, ThreadCount};
use child::Child;
use clap::{Args, ValueEnum};
use futures::FutureExt;
use futures::future::{select_all, try_join};
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use variables::Variables;

mod child;
mod ports;
mod progress;
mod threads;
mod try_it;
mod variables;

/// Address at which the processes of the cluster reach each other.
const INSIDE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Longest wait for the cluster to serve: large models take minutes to load.
const START_S_MAX: u64 = 1800;
/// Longest drain of the workers, and then again of the router: a process that hangs takes no time from the others.
const STOP_S_MAX: u64 = 15;

/// Arguments of `baton up`.
#[derive(Args, Clone, Debug)]
pub(crate) struct UpArgs {
    /// The same as --model.
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    model_given: Option<String>,
    /// A GGUF file, a Hugging Face folder, a hub id `org/name[@revision]`, `smollm2-135m-instruct` or `random:…`.
    #[arg(long, default_value = "smollm2-135m-instruct")]
    model: String,
    /// Names under which clients ask for the model, in place of its own; several are separated by spaces or commas.
    #[arg(long, value_name = "NAME", value_delimiter = ',', num_args = 1..)]
    served_model_name: Vec<String>,
    /// Format of weights and KV: `auto`, `bfloat16`, `float16` or `float32`.
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<ModelDtype>,
    /// Number of prefill workers. With 0, decode workers run the prompts too (aggregated serving).
    #[arg(long, default_value_t = 1)]
    prefill: u16,
    /// Number of decode workers.
    #[arg(long, default_value_t = 1)]
    decode: u16,
    /// Address of the ports for clients; `0.0.0.0` is every address of this host. Traffic inside the cluster stays on loopback.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// gRPC port of the router, for clients.
    #[arg(long, default_value_t = 50051)]
    grpc_port: u16,
    /// HTTP port of the router, for clients.
    #[arg(long, visible_alias = "port", default_value_t = 8000)]
    http_port: u16,
    /// Port of the router for workers and operators. 0 picks a free port; the other commands of the same user find it.
    #[arg(long, default_value_t = 0)]
    cluster_port: u16,
    /// Folder with `tls.crt` and `tls.key`: the client ports take TLS 1.3 only. Renewed files are taken while the cluster runs.
    #[arg(long, value_name = "FOLDER")]
    tls: Option<PathBuf>,
    /// Key that clients must send. Other users of this host may see flags of processes: `BATON_AUTH__API_KEY` is the same, unseen.
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Where prompts are prefilled.
    #[arg(long, value_enum, default_value_t = Policy::Auto)]
    prefill_policy: Policy,
    /// Transport of KV between workers.
    #[arg(long, value_enum, default_value_t = Transport::Ucx)]
    transport: Transport,
    /// Longest context in tokens. Default: the model's own.
    #[arg(long)]
    max_model_len: Option<u32>,
    /// Size of each worker's KV pool, e.g. `512MiB`.
    #[arg(long)]
    kv_cache_bytes: Option<String>,
    /// A smaller model with the same tokens that proposes tokens on decode workers; named like `--model`.
    #[arg(long, value_name = "MODEL")]
    draft_model: Option<String>,
    /// LoRA adapters as `name=folder`, separated by commas.
    #[arg(long, value_name = "NAME=FOLDER")]
    lora_modules: Option<String>,
    /// Folder of LoRA adapters, each a folder named like the adapter; read again while the cluster runs.
    #[arg(long, value_name = "FOLDER")]
    lora_folder: Option<PathBuf>,
    /// Most LoRA adapters that a worker has loaded at once. Default: 8.
    #[arg(long)]
    max_loras: Option<usize>,
    /// Largest rank of a LoRA adapter. Default: 64.
    #[arg(long)]
    max_lora_rank: Option<usize>,
    /// Compute threads of each worker; `auto` divides the cores by what workers do: decode gets a third of them, prefill the rest. With less
    /// than four cores each has all of them.
    /// Default: `auto`, or `BATON_ENGINE__THREADS`.
    #[arg(long)]
    threads: Option<ThreadCount>,
    /// Where workers register: with the router (`embedded`) or in etcd.
    #[arg(long, value_enum, default_value_t = Membership::Embedded)]
    membership: Membership,
    /// Address of etcd, `http://host:port`; several are separated by commas.
    #[arg(long, default_value = "http://127.0.0.1:2379")]
    etcd: String,
    /// Prefix of this cluster's keys in etcd. Each cluster on the same etcd needs its own.
    #[arg(long, default_value = "/baton/default/")]
    etcd_prefix: String,
    /// OTLP gRPC endpoint that receives traces, e.g. `http://127.0.0.1:4317`.
    #[arg(long)]
    otlp: Option<String>,
    /// Log filter of the router and the workers.
    #[arg(long, default_value = "warn")]
    log: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Policy {
    Auto,
    Remote,
    Local,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Transport {
    Auto,
    Ucx,
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Membership {
    Embedded,
    Etcd,
}

impl UpArgs {
    fn router_flags(&self, local_cluster: &LocalCluster) -> Vec<String> {
        let policy = format!("{:?}", self.prefill_policy).to_lowercase();
        let grpc = SocketAddr::new(self.host, self.grpc_port);
        let http = SocketAddr::new(self.host, self.http_port);
        let mut flags = vec![format!("--grpc-listen={grpc}"), format!("--http-listen={http}")];
        flags.push(format!("--advertise={}", from_here(grpc)));
        flags.push(format!("--prefill-policy={policy}"));
        flags.push(format!("--cluster-listen={}", SocketAddr::new(INSIDE, self.cluster_port)));
        flags.push(format!("--identity={}", local_cluster.identity(Role::Router).display()));
        flags.extend(self.tls.as_ref().map(|folder| format!("--tls={}", folder.display())));
        // A flag would override the variable.
        if self.host.is_loopback() && !is_set("BATON_PAGE__OPEN") {
            flags.push("--page-open".into());
        }
        flags.extend(self.common_flags());
        flags
    }

    fn worker_flags(&self, local_cluster: &LocalCluster, router: SocketAddr, index: u16, role: &str) -> Vec<String> {
        let transport = format!("{:?}", self.transport).to_lowercase();
        let any = SocketAddr::new(INSIDE, 0);
        let mut flags = vec![format!("--model={}", self.model), format!("--routers={router}")];
        flags.extend([
            format!("--grpc-listen={any}"),
            format!("--admin-listen={any}"),
            format!("--transfer-bind={INSIDE}"),
        ]);
        flags.extend([format!("--transport={transport}"), format!("--instance={role}-{index}")]);
        flags.push(format!("--identity={}", local_cluster.identity(Role::Worker).display()));
        flags.extend(self.served_model_name.iter().map(|name| format!("--served-model-name={name}")));
        flags.extend(self.dtype.map(|dtype| format!("--dtype={dtype}")));
        flags.extend(self.max_model_len.map(|n| format!("--max-model-len={n}")));
        flags.extend(self.kv_cache_bytes.as_ref().map(|n| format!("--kv-cache-bytes={n}")));
        let draft = self.draft_model.as_ref().filter(|_| role != "prefill");
        flags.extend(draft.map(|model| format!("--draft-model={model}")));
        flags.extend(self.lora_modules.as_ref().map(|modules| format!("--lora-modules={modules}")));
        flags.extend(self.lora_folder.as_ref().map(|folder| format!("--lora-folder={}", folder.display())));
        flags.extend(self.max_loras.map(|n| format!("--max-loras={n}")));
        flags.extend(self.max_lora_rank.map(|n| format!("--max-lora-rank={n}")));
        // A flag would override the variable.
        if self.threads.is_some() || !is_set("BATON_ENGINE__THREADS") {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = threads::of(self.threads.unwrap_or_default(), cores, self.prefill, self.decode);
            let threads = if role == "prefill" { threads.prefill } else { threads.decode };
            flags.push(format!("--threads={threads}"));
        }
        flags.extend(self.common_flags());
        flags
    }

    fn common_flags(&self) -> Vec<String> {
        let mut flags = vec![format!("--log={}", self.log), "--announce".into(), "--stop-with-stdin".into()];
        if self.membership == Membership::Etcd {
            flags.extend(["--membership=etcd".into(), format!("--etcd={}", self.etcd)]);
            flags.push(format!("--etcd-prefix={}", self.etcd_prefix));
        }
        flags.extend(self.otlp.as_ref().map(|url| format!("--otlp-url={url}")));
        flags
    }
}

/// Whether this variable is set for the processes of the cluster.
fn is_set(variable: &str) -> bool {
    environment::own().iter().any(|name| name == variable)
}

/// Starts the cluster, waits until it serves, and stops it on Ctrl-C, SIGTERM or the exit of a process.
pub(crate) async fn run(mut args: UpArgs) -> anyhow::Result<()> {
    args.model = args.model_given.take().unwrap_or(args.model);
    ensure!(args.decode > 0, "a cluster needs at least one decode worker: --decode 1");
    ensure!(args.prefill <= 64 && args.decode <= 64, "at most 64 workers of each role on one machine");
    let needs_prefill = matches!(args.prefill_policy, Policy::Remote);
    ensure!(
        args.prefill > 0 || !needs_prefill,
        "--prefill-policy remote needs a prefill worker: --prefill 1, or another policy"
    );
    ensure!(
        args.grpc_port != args.http_port || args.grpc_port == 0,
        "--grpc-port and --http-port are both {}: they must differ",
        args.grpc_port
    );
    let variables = Variables::of_process()?;
    ports::check(SocketAddr::new(args.host, args.grpc_port), "--grpc-port")?;
    ports::check(SocketAddr::new(args.host, args.http_port), "--http-port")?;
    if args.membership == Membership::Etcd {
        let endpoints = args.etcd.split(',').map(str::to_owned).collect();
        // Workers of two clusters under one prefix would have the same names.
        ensure_free(&crate::etcd::config(endpoints, Some(args.etcd_prefix.clone()))?).await?;
    }
    let local_cluster = LocalCluster::make()?;
    let mut children = Vec::new();
    let result = tokio::select! {
        result = serve(&args, &variables, &local_cluster, &mut children) => result,
        signal = stop_signal() => signal,
    };
    let stopped = stop(children).await;
    result.and(stopped)
}

async fn serve(
    args: &UpArgs,
    variables: &Variables,
    local_cluster: &LocalCluster,
    children: &mut Vec<Child>,
) -> anyhow::Result<()> {
    check(args, variables, local_cluster).await?;
    let deadline = Instant::now() + Duration::from_secs(START_S_MAX);
    children.push(Child::spawn(
        "router",
        "baton-router",
        &args.router_flags(local_cluster),
        variables.not_for_routers(),
        args.api_key.as_deref().map(|key| ("BATON_AUTH__API_KEY", key)),
    )?);
    let addresses = listening(&mut children[0], deadline).await?;
    local_cluster.listens(addresses.grpc, addresses.cluster)?;
    for (role, count) in [("decode", args.decode), ("prefill", args.prefill)] {
        for index in 0..count {
            let flags = args.worker_flags(local_cluster, addresses.cluster, index, role);
            let (name, program) = (format!("{role}-{index}"), format!("baton-{role}-worker"));
            children.push(Child::spawn(&name, &program, &flags, variables.not_for_workers(), None)?);
        }
    }
    let (router, workers) = children.split_at_mut(1);
    // Concurrently: a router that exits is noticed while weights load.
    try_join(progress::until_ready(workers, deadline), wait_ready(&mut router[0], deadline)).await?;
    let _ = greet(args, &addresses, local_cluster, workers);
    let ends = children.iter_mut().map(|c| c.ended().boxed());
    let (failure, ..) = select_all(ends).await;
    Err(failure)
}

/// Lets a worker download the models and check them and its settings, once: each worker would refuse the same, and download at the same time.
async fn check(args: &UpArgs, variables: &Variables, local_cluster: &LocalCluster) -> anyhow::Result<()> {
    let nowhere = SocketAddr::new(INSIDE, 0);
    let mut flags = args.worker_flags(local_cluster, nowhere, 0, "decode");
    flags.push("--check-only".into());
    let mut worker = Child::spawn("model", "baton-decode-worker", &flags, variables.not_for_workers(), None)?;
    let bar = progress::bar(worker.name());
    loop {
        match worker.next().await? {
            Announcement::Progress { what, fraction } => progress::show(&bar, &what, fraction),
            Announcement::Listening { .. } => {}
            Announcement::Refused { reason } => bail!(reason),
            Announcement::Ready => break,
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Addresses at which this host reaches the router.
struct Addresses {
    grpc: SocketAddr,
    http: SocketAddr,
    cluster: SocketAddr,
}

async fn listening(router: &mut Child, deadline: Instant) -> anyhow::Result<Addresses> {
    loop {
        let next = timeout_at(deadline, router.next()).await.context("the router did not start")??;
        if let Announcement::Listening { grpc, http, cluster: Some(cluster) } = next {
            return Ok(Addresses { grpc: from_here(grpc), http: from_here(http), cluster });
        }
    }
}

/// The address to connect to from this host, if `address` stands for all addresses of the host.
fn from_here(address: SocketAddr) -> SocketAddr {
    let loopback = match address.ip() {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(if address.ip().is_unspecified() { loopback } else { address.ip() }, address.port())
}

async fn wait_ready(router: &mut Child, deadline: Instant) -> anyhow::Result<()> {
    while timeout_at(deadline, router.next()).await.context("the router is not ready")?? != Announcement::Ready {}
    Ok(())
}

/// Prints where and how to call the cluster. An error means that stdout is closed, which is no reason to stop serving.
fn greet(args: &UpArgs, addresses: &Addresses, local_cluster: &LocalCluster, workers: &[Child]) -> std::io::Result<()> {
    let Addresses { grpc, http, cluster } = addresses;
    let tls = args.tls.clone().or_else(environment::tls_folder);
    let scheme = if tls.is_some() { "https" } else { "http" };
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nBaton serves {} with {} prefill and {} decode workers.", args.model, args.prefill, args.decode)?;
    writeln!(out, "  gRPC     {grpc}    baton.v1.Inference/Generate, reflection on")?;
    writeln!(out, "  HTTP     {scheme}://{http}/v1    OpenAI API")?;
    if !is_set("BATON_PAGE__ENABLED") {
        writeln!(out, "  page     {scheme}://{http}/    chat, cluster and recent requests")?;
    }
    writeln!(out, "  metrics  {scheme}://{http}/metrics    router")?;
    for (name, http) in workers.iter().filter_map(|w| Some((w.name(), w.http()?))) {
        writeln!(out, "           http://{http}/metrics    {name}")?;
    }
    let folder = local_cluster.identity(Role::Operator);
    writeln!(out, "  cluster  {cluster}    operators, by the certificate in {}", folder.display())?;
    if args.host.is_unspecified() {
        match own_address(args.host) {
            Some(host) => {
                let (grpc, http) = (SocketAddr::new(host, grpc.port()), SocketAddr::new(host, http.port()));
                writeln!(
                    out,
                    "  others   {scheme}://{http}/v1 and {grpc}    from other hosts; in a container, its published ports"
                )?;
            }
            None => writeln!(out, "  others   at any address of this host: its own is not known here")?,
        }
    }
    let has_keys = args.api_key.is_some() || is_set("BATON_AUTH__API_KEY") || is_set("BATON_AUTH__KEYS_FILE");
    write!(out, "{}", try_it::commands(&program(), addresses, tls.as_deref(), has_keys))?;
    writeln!(out, "\nCtrl-C stops everything.")
}

/// The command by which another terminal runs this program: its name if the shell found it on the PATH, else its path.
fn program() -> String {
    let called = std::env::args().next().unwrap_or_default();
    match std::env::current_exe() {
        Ok(path) if called.contains('/') => try_it::quoted(&path),
        _ => "baton".to_owned(),
    }
}

async fn stop_signal() -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut hangup) = (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    tokio::select! {
        interrupt = tokio::signal::ctrl_c() => interrupt.context("cannot wait for Ctrl-C"),
        _ = terminate.recv() => Ok(()),
        _ = hangup.recv() => Ok(()),
    }
}

/// Stops the workers, from which the router receives their deregistration, then the router. A process that does not stop in time is
/// killed.
async fn stop(mut children: Vec<Child>) -> anyhow::Result<()> {
    if children.is_empty() {
        return Ok(());
    }
    eprintln!("\nStopping.");
    let mut killed = Vec::new();
    let routers = children.len().min(1);
    let (router, workers) = children.split_at_mut(routers);
    for part in [workers, router] {
        part.iter_mut().for_each(Child::close);
        let deadline = Instant::now() + Duration::from_secs(STOP_S_MAX);
        for child in part {
            if !child.join(deadline).await {
                killed.push(child.name().to_owned());
            }
        }
    }
    if !killed.is_empty() {
        bail!("killed after {STOP_S_MAX} s without an end: {}", killed.join(", "));
    }
    Ok(())
}
