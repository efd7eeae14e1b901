//! The cluster under test: two routers, two prefill and two decode workers, and an etcd of three nodes, each a process.

use super::ActPlan;
use super::network::{self, HUB, Net, Network};
use crate::logs::bad_lines;
use crate::quiet::{Counts, claimed_tokens};
use crate::scrape::sum;
use crate::service::{Place, Service, free_addresses};
use anyhow::ensure;
use baton_node::grpc::{Channel, ChannelConfig, channel};
use baton_node::identity::{self, Authority, Identity, IdentityConfig};
use baton_node::testing::etcd::EtcdCluster;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Longest wait for the whole cluster to be ready.
const WHOLE_MAX: Duration = Duration::from_secs(120);
/// Longer than any run.
const CERTIFICATES_LAST: Duration = Duration::from_secs(24 * 3600);
/// Leases expire while a worker is stopped for long, and leave time for a second call if the first is lost.
const CONFIG: &str = "[membership.etcd]\nlease_ttl_s = 5\nrequest_ms_max = 1000\n";
/// So small that it is full within a second.
const ETCD_QUOTA: &str = "--quota-backend-bytes=8388608";
/// Further worker settings: short steps, because the four workers may share two cores.
const WORKER_CONFIG: &str = "[engine]\nchunk_tokens_max = 64\n";
/// Shorter than most answers take, so that some requests are continued on other workers.
const WORKER_DRAIN_MS: u32 = 300;

/// One product process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// A router, by number.
    Router(usize),
    /// A prefill worker.
    Prefill(usize),
    /// A decode worker.
    Decode(usize),
}

impl Node {
    pub const ALL: [Self; 6] =
        [Self::Router(0), Self::Router(1), Self::Prefill(0), Self::Prefill(1), Self::Decode(0), Self::Decode(1)];
    /// All routers.
    pub const ROUTERS: [Self; 2] = [Self::Router(0), Self::Router(1)];
    /// All workers.
    pub const WORKERS: [Self; 4] = [Self::Prefill(0), Self::Prefill(1), Self::Decode(0), Self::Decode(1)];
    /// All decode workers.
    pub const DECODE: [Self; 2] = [Self::Decode(0), Self::Decode(1)];
    /// All prefill workers.
    pub const PREFILL: [Self; 2] = [Self::Prefill(0), Self::Prefill(1)];

    /// Its number among all nodes.
    pub fn number(self) -> usize {
        match self {
            Self::Router(n) => n,
            Self::Prefill(n) => 2 + n,
            Self::Decode(n) => 4 + n,
        }
    }

    const fn program(self) -> &'static str {
        match self {
            Self::Router(_) => "baton-router",
            Self::Prefill(_) => "baton-prefill-worker",
            Self::Decode(_) => "baton-decode-worker",
        }
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Router(n) => write!(f, "r-{n}"),
            Self::Prefill(n) => write!(f, "p-{n}"),
            Self::Decode(n) => write!(f, "d-{n}"),
        }
    }
}

/// Where a process listens, `host:port`.
struct Listens {
    grpc: String,
    http: String,
}

/// The running cluster. Dropping it kills everything.
pub struct Stage {
    services: Vec<Mutex<Service>>,
    listens: Vec<Listens>,
    /// The three nodes.
    pub etcd: Mutex<EtcdCluster>,
    network: Option<Arc<Network>>,
    /// The run's own identity: that of a router.
    identity: Identity,
    logs: PathBuf,
    /// Blocks of each worker's pool, in the order of [`Node::WORKERS`].
    blocks: Vec<u64>,
}

/// Name of a process's log file.
pub fn log_of(process: &str) -> String {
    format!("{process}.log")
}

impl Stage {
    /// Starts it as `act` says, in a network of its own if possible; logs go to `logs`.
    pub async fn start(act: &ActPlan, network: Option<Arc<Network>>, logs: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(logs)?;
        let (config, worker_config) = (logs.join("config.toml"), logs.join("worker.toml"));
        std::fs::write(&config, CONFIG)?;
        // UCX selects these lanes by default only if all processes are certainly on one host.
        let lanes = if act.transport == "ucx" { "ucx_tls = \"posix,sysv,self\"\n" } else { "" };
        let transfer = format!("[transfer]\ntransport = \"{}\"\n{lanes}", act.transport);
        std::fs::write(&worker_config, [CONFIG, WORKER_CONFIG, &transfer].concat())?;
        let hub = if network.is_some() { HUB } else { "127.0.0.1" }.to_owned();
        let etcd = tokio::task::spawn_blocking(move || EtcdCluster::start_on(&hub, 3, &[ETCD_QUOTA])).await??;
        let listens = listens(network.is_some())?;
        let identities = logs.join("identities");
        let authority = Authority::new()?;
        for role in [identity::Role::Router, identity::Role::Worker] {
            authority.issue(&identities.join(role.name()), &[role], &[], CERTIFICATES_LAST, "")?;
        }
        let common =
            ["--membership=etcd".into(), format!("--etcd={}", etcd.config().endpoints.join(",")), "--log=info".into()];
        let mut services = Vec::new();
        for (node, at) in Node::ALL.into_iter().zip(&listens) {
            let own = flags(node, at, act, network.is_some());
            let config = if let Node::Router(_) = node { &config } else { &worker_config };
            let config = format!("--config={}", config.display());
            let role = if let Node::Router(_) = node { "router" } else { "worker" };
            let identity = format!("--identity={}", identities.join(role).display());
            let within = if network.is_some() { network::enter(&node.to_string()) } else { Vec::new() };
            let place = Place { within, log: Some(logs.join(log_of(&node.to_string()))) };
            services.push(Mutex::new(Service::start_in(
                place,
                node.program(),
                &[&common[..], &own, &[config, identity]].concat(),
            )?));
        }
        let (etcd, logs, dir) = (Mutex::new(etcd), logs.to_path_buf(), Some(identities.join("router")));
        let identity = IdentityConfig { dir, ..IdentityConfig::default() };
        let identity = Identity::start(&identity, identity::Role::Router).await?;
        let mut stage = Self { services, listens, etcd, network, identity, logs, blocks: Vec::new() };
        for node in Node::ALL {
            stage.service(node).lock().await.ready().await?;
        }
        stage.whole().await?;
        for worker in Node::WORKERS {
            stage.blocks.push(stage.counts(worker).await?.blocks());
        }
        Ok(stage)
    }

    /// Waits until both routers place on all workers.
    async fn whole(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + WHOLE_MAX;
        for router in Node::ROUTERS {
            for role in ["prefill", "decode"] {
                while sum(&self.metrics(router), "baton_router_ready_workers", &[role]).await? < 2.0 {
                    ensure!(Instant::now() < deadline, "{router} does not see both {role} workers");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        Ok(())
    }

    /// A worker's activity, from its metrics.
    pub(super) async fn counts(&self, worker: Node) -> anyhow::Result<Counts> {
        Counts::told(&self.metrics(worker), &self.grpc(worker), &self.identity).await
    }

    /// Each worker, and the number of blocks in its pool, which is the same after each start.
    pub fn blocks(&self) -> impl Iterator<Item = (Node, u64)> {
        Node::WORKERS.into_iter().zip(self.blocks.iter().copied())
    }

    /// The process of a node.
    pub fn service(&self, node: Node) -> &Mutex<Service> {
        &self.services[node.number()]
    }

    /// URL of its gRPC server.
    pub fn grpc(&self, node: Node) -> String {
        format!("http://{}", self.listens[node.number()].grpc)
    }

    /// A channel to a worker, like a router's.
    pub(super) fn channel(&self, worker: Node) -> anyhow::Result<Channel> {
        Ok(channel(&self.grpc(worker), &ChannelConfig::default(), &self.identity, identity::Role::Worker)?)
    }

    /// Claimed tokens that a worker reports.
    pub(super) async fn claimed_tokens(&self, worker: Node) -> anyhow::Result<u64> {
        claimed_tokens(&self.grpc(worker), &self.identity).await
    }

    /// Address of its metrics.
    pub fn metrics(&self, node: Node) -> String {
        format!("http://{}/metrics", self.listens[node.number()].http)
    }

    /// The network whose links can fail.
    pub fn network(&self) -> Option<&Network> {
        self.network.as_deref()
    }

    /// The same, for a task that runs concurrently.
    pub(super) fn shared_network(&self) -> Option<Arc<Network>> {
        self.network.clone()
    }

    /// Ends everything with SIGTERM. Returns what went wrong then, and any log line that is not allowed.
    pub async fn end(self) -> anyhow::Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (node, service) in Node::ALL.into_iter().zip(self.services).rev() {
            let mut service = service.into_inner();
            service.signal("TERM")?;
            let status = service.ended().await?;
            if !status.success() {
                wrong.push(format!("{node} ended with {status}"));
            }
            let log = std::fs::read_to_string(self.logs.join(log_of(&node.to_string())))?;
            wrong.extend(bad_lines(&log).map(|line| format!("{node} logs: {line}")));
        }
        Ok(wrong)
    }
}

fn flags(node: Node, at: &Listens, act: &ActPlan, network: bool) -> Vec<String> {
    let grpc = format!("--grpc-listen={}", at.grpc);
    if let Node::Router(_) = node {
        // Workers register in etcd.
        return vec![grpc, format!("--http-listen={}", at.http), "--cluster-listen=127.0.0.1:0".into()];
    }
    let data = if network { network::address(Net::Data, node.number()) } else { "127.0.0.1".into() };
    vec![
        grpc,
        format!("--admin-listen={}", at.http),
        format!("--transfer-bind={data}"),
        format!("--model={}", act.model),
        format!("--instance={node}"),
        format!("--drain-ms-max={WORKER_DRAIN_MS}"),
        "--threads=1".into(),
        format!("--kv-cache-bytes={}", act.kv_cache_bytes),
    ]
}

/// Addresses that stay the same for every start.
fn listens(network: bool) -> anyhow::Result<Vec<Listens>> {
    if !network {
        let addresses = free_addresses::<{ 2 * Node::ALL.len() }>()?;
        return Ok(addresses.chunks(2).map(|a| Listens { grpc: a[0].to_string(), http: a[1].to_string() }).collect());
    }
    let of = |node: Node| {
        // Clients call routers, routers call workers.
        let net = if matches!(node, Node::Router(_)) { Net::Admin } else { Net::Control };
        let (grpc, http) = (network::address(net, node.number()), network::address(Net::Admin, node.number()));
        Listens { grpc: format!("{grpc}:7000"), http: format!("{http}:7001") }
    };
    Ok(Node::ALL.into_iter().map(of).collect())
}
