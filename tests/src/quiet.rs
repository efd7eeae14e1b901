//! What must hold when nothing runs.

use crate::cluster::Cluster;
use anyhow::ensure;
use baton_proto::v1::{WatchRequest, worker_client::WorkerClient};
use baton_worker::process::RunningWorker;
use std::time::{Duration, Instant};

/// The promise: this long after the last request ended, nobody references a block.
pub const QUIET_MAX: Duration = Duration::from_secs(10);

/// Waits until no worker references or quarantines a block, runs a sequence or has a handoff open, at most [`QUIET_MAX`], and checks that
/// no block was lost.
pub async fn until_quiet(cluster: &Cluster) -> anyhow::Result<()> {
    until(cluster, |_| true).await
}

/// The same where a peer died or cannot be heard: its blocks may still be quarantined, with their tickets.
pub async fn until_unreferenced(cluster: &Cluster) -> anyhow::Result<()> {
    until(cluster, |what| !QUARANTINE.contains(&what)).await
}

const QUARANTINE: [&str; 2] = ["blocks quarantined", "tickets"];

async fn until(cluster: &Cluster, counts: impl Fn(&str) -> bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + QUIET_MAX;
    loop {
        let mut busy = Vec::new();
        for worker in cluster.workers() {
            busy.extend(noise(worker, &counts).await?);
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

/// What still goes on in a worker.
async fn noise(worker: &RunningWorker, counted: impl Fn(&str) -> bool) -> anyhow::Result<Option<String>> {
    let (load, blocks) = (worker.loaded.engine.load(), worker.loaded.engine.pool().counts());
    let transfer = worker.transfer.stats();
    let claimed = claimed_tokens(format!("http://{}", worker.grpc)).await?;
    let counts = [
        ("blocks referenced", blocks.referenced),
        ("blocks quarantined", blocks.quarantined),
        ("sequences waiting", load.waiting),
        ("sequences running", load.running),
        ("handoffs outgoing", transfer.outgoing),
        ("handoffs incoming", transfer.incoming),
        ("tickets", transfer.tickets),
        ("tokens claimed", claimed as usize),
    ];
    let left: Vec<String> =
        counts.iter().filter(|(what, n)| *n > 0 && counted(what)).map(|(what, n)| format!("{n} {what}")).collect();
    Ok((!left.is_empty()).then(|| format!("{}: {}", worker.party.instance, left.join(", "))))
}

/// Tokens claimed and not adopted, as the worker whose gRPC is there reports them to routers.
pub(crate) async fn claimed_tokens(url: String) -> anyhow::Result<u64> {
    let mut client = WorkerClient::connect(url).await?;
    let mut reports = client.watch(WatchRequest { router: "quiet".into() }).await?.into_inner();
    Ok(reports.message().await?.map_or(0, |report| report.claimed_tokens))
}
