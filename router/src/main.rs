//! `baton-router`: parse, telemetry, run, drain.

use baton_node::Shutdown;
use baton_node::announce::Announcer;
use baton_node::config::{CommonArgs, load_or_dump};
use baton_node::metrics::Metrics;
use baton_router::RouterConfig;
use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

/// Bodies are long and arrive in bursts. glibc's allocator keeps much of their memory in each of its arenas; this
/// allocator returns it.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The router of a Baton cluster: gRPC and HTTP (the APIs of OpenAI and Anthropic) in front of prefill and decode workers
#[derive(Parser)]
#[command(name = "baton-router", version)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// gRPC listen address for clients
    #[arg(long, value_name = "ADDRESS")]
    grpc_listen: Option<SocketAddr>,
    /// gRPC listen address for workers, and for operators with certificates
    #[arg(long, value_name = "ADDRESS")]
    cluster_listen: Option<SocketAddr>,
    /// host:port at which others reach the gRPC port. Default: the listen address
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// HTTP listen address for the APIs of OpenAI and Anthropic and health, and for metrics unless --admin-listen is set
    #[arg(long, value_name = "ADDRESS")]
    http_listen: Option<SocketAddr>,
    /// Folder with tls.crt and tls.key: the ports for clients take TLS 1.3 only
    #[arg(long, value_name = "FOLDER")]
    tls: Option<PathBuf>,
    /// Where prompts are prefilled: auto, remote or local
    #[arg(long, value_name = "POLICY")]
    prefill_policy: Option<String>,
    /// With policy auto, prompts of at most this many tokens are prefilled on their decode worker
    #[arg(long, value_name = "TOKENS")]
    local_prefill_tokens_max: Option<u64>,
    /// Refuse fields of request bodies that the API does not have, in place of ignoring them
    #[arg(long)]
    strict_fields: bool,
    /// Without keys, show the cluster and recent requests on the page at / to everyone who reaches the HTTP port
    #[arg(long)]
    page_open: bool,
    /// Print a JSON line to stdout when the router listens, and one when it is ready
    #[arg(long)]
    announce: bool,
}

impl Args {
    fn overlay(&self) -> baton_node::config::Overlay {
        self.common
            .overlay()
            .set("--grpc-listen", "grpc.listen", &self.grpc_listen)
            .set("--cluster-listen", "cluster.listen", &self.cluster_listen)
            .set("--advertise", "grpc.advertise", &self.advertise)
            .set("--http-listen", "http.listen", &self.http_listen)
            .set("--tls", "tls.dir", &self.tls)
            .set("--prefill-policy", "placement.prefill_policy", &self.prefill_policy)
            .set("--local-prefill-tokens-max", "placement.local_prefill_tokens_max", &self.local_prefill_tokens_max)
            .set("--strict-fields", "http.strict_fields", &self.strict_fields.then_some(true))
            .set("--page-open", "page.open", &self.page_open.then_some(true))
    }
}

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton-router: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> anyhow::Result<()> {
    let args = Args::parse();
    let Some(config) = load_or_dump::<RouterConfig>(&args.common, args.overlay())? else { return Ok(()) };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let telemetry = baton_node::telemetry::init("baton-router", &config.telemetry)?;
        baton_node::host::raise_file_limit();
        let metrics = Metrics::new("baton-router");
        metrics.register_export(&telemetry.counters());
        let shutdown = Shutdown::install(&config.drain)?;
        let result =
            baton_router::run(config, shutdown, Announcer::new(args.announce), metrics, telemetry.traces()).await;
        tokio::task::spawn_blocking(move || drop(telemetry)).await?;
        anyhow::Ok(result?)
    });
    // A thread may still block on standard input; the process does not wait for it.
    runtime.shutdown_background();
    result
}
