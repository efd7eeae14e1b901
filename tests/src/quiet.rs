//! Checks of what must hold when nothing runs.

use crate::cluster::Cluster;
use crate::scrape::Scrape;
use anyhow::{Context, ensure};
use baton_node::grpc::{ChannelConfig, channel};
use baton_node::identity::{Identity, Role};
use baton_proto::v1::{WatchRequest, worker_client::WorkerClient};
use baton_worker::process::RunningWorker;
use std::time::{Duration, Instant};

/// The promise: this long after the last request has ended, no block is referenced.
pub const QUIET_MAX: Duration = Duration::from_secs(10);

/// Waits, at most [`QUIET_MAX`], until no worker references or quarantines a block, runs a sequence or has a handoff open. Checks that no
/// block was lost.
pub async fn until_quiet(cluster: &Cluster) -> anyhow::Result<()> {
    until(cluster, |_| true).await
}

/// The same if a peer died or is unreachable: its blocks may still be quarantined, with their tickets.
pub async fn until_unreferenced(cluster: &Cluster) -> anyhow::Result<()> {
    until(cluster, |what| !QUARANTINE.contains(&what)).await
}

const QUARANTINE: [&str; 2] = ["blocks quarantined", "tickets"];

async fn until(cluster: &Cluster, counts: impl Fn(&str) -> bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + QUIET_MAX;
    loop {
        let mut busy = Vec::new();
        for worker in cluster.workers() {
            let left = Counts::of(worker).await?.left(&counts);
            busy.extend(left.into_iter().map(|left| format!("{}: {left}", worker.party.instance)));
        }
        if busy.is_empty() {
            break;
        }
        ensure!(Instant::now() < deadline, "{QUIET_MAX:?} after the last request: {busy:#?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for worker in cluster.workers() {
        let c = worker.loaded.engine.pool().counts();
        ensure!(c.free + c.cached + c.quarantined == c.total, "{} lost blocks: {c:?}", worker.party.instance);
    }
    Ok(())
}

/// A worker's activity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// Blocks that are free or cached.
    unused: u64,
    referenced: u64,
    quarantined: u64,
    waiting: u64,
    running: u64,
    sources: u64,
    sinks: u64,
    tickets: u64,
    claimed_tokens: u64,
    /// Blocks of the draft model's pool that sequences hold.
    draft_blocks: u64,
}

impl Counts {
    /// Read from a worker in this process.
    async fn of(worker: &RunningWorker) -> anyhow::Result<Self> {
        let (load, blocks) = (worker.loaded.engine.load(), worker.loaded.engine.pool().counts());
        let transfer = worker.transfer.stats();
        Ok(Self {
            unused: (blocks.free + blocks.cached) as u64,
            referenced: blocks.referenced as u64,
            quarantined: blocks.quarantined as u64,
            waiting: load.waiting as u64,
            running: load.running as u64,
            sources: transfer.sources as u64,
            sinks: transfer.sinks as u64,
            tickets: transfer.tickets as u64,
            claimed_tokens: claimed_tokens(&worker.grpc.to_string(), &Identity::default()).await?,
            draft_blocks: load.draft_blocks as u64,
        })
    }

    /// Read from another process's worker: all values, or an error.
    pub(crate) async fn told(metrics: &str, grpc: &str, identity: &Identity) -> anyhow::Result<Self> {
        let told = Scrape::of(metrics).await?;
        let count = |name: &str, labels: &[&str]| anyhow::Ok(told.find(name, labels)? as u64);
        let blocks = |state: &str| count("baton_kv_blocks", &[&format!("state=\"{state}\"")]);
        Ok(Self {
            unused: blocks("free")? + blocks("cached")?,
            referenced: blocks("referenced")?,
            quarantined: blocks("quarantined")?,
            waiting: count("baton_sequences_waiting", &[])?,
            running: count("baton_sequences_running", &[])?,
            sources: count("baton_kv_put_sources", &[])?,
            sinks: count("baton_kv_put_sinks", &[])?,
            tickets: count("baton_kv_tickets", &[])?,
            claimed_tokens: claimed_tokens(grpc, identity).await?,
            draft_blocks: count("baton_speculation_draft_blocks", &[])?,
        })
    }

    /// All blocks of its pool.
    pub(crate) fn blocks(&self) -> u64 {
        self.unused + self.referenced + self.quarantined
    }

    /// The nonzero values among those selected by `counted`, although nothing runs.
    pub(crate) fn left(&self, counted: impl Fn(&str) -> bool) -> Vec<String> {
        let counts = [
            ("blocks referenced", self.referenced),
            ("blocks quarantined", self.quarantined),
            ("sequences waiting", self.waiting),
            ("sequences running", self.running),
            ("put sources", self.sources),
            ("put sinks", self.sinks),
            ("tickets", self.tickets),
            ("tokens claimed", self.claimed_tokens),
            ("blocks of the draft model", self.draft_blocks),
        ];
        counts.iter().filter(|(what, n)| *n > 0 && counted(what)).map(|(what, n)| format!("{n} {what}")).collect()
    }
}

/// Claimed and not adopted tokens, as the worker with this gRPC address reports them to routers.
pub(crate) async fn claimed_tokens(address: &str, identity: &Identity) -> anyhow::Result<u64> {
    let mut client = WorkerClient::new(channel(address, &ChannelConfig::default(), identity, Role::Worker)?);
    let mut reports = client.watch(WatchRequest { router: "quiet".into(), ..Default::default() }).await?.into_inner();
    Ok(reports.message().await?.context("a worker that reports nothing")?.claimed_tokens)
}
