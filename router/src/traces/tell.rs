//! Notifies workers which traces are kept, in batches. Each call has a deadline, and verdicts that do not arrive are
//! counted.

use crate::workers::WorkerHandle;
use baton_node::grpc::KEEP_TRACES_MAX;
use baton_node::telemetry::TraceId;
use baton_types::Runtime;
use futures::future::join_all;
use prometheus_client::metrics::counter::Counter;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Verdicts are collected for this long: during an outage, one call covers many requests.
const GATHER: Duration = Duration::from_millis(50);
/// Longest call. A worker that hangs delays the verdicts of others this long; their spans stay in their rings
/// meanwhile.
const CALL_MAX: Duration = Duration::from_secs(1);

/// An order to one worker to export its spans of one trace.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(super) trace: TraceId,
    pub(super) worker: Arc<WorkerHandle>,
}

/// Runs until the router's core is gone.
pub(crate) async fn deliver(runtime: Arc<dyn Runtime>, mut verdicts: mpsc::Receiver<Verdict>, lost: Counter) {
    let mut batch = Vec::new();
    while verdicts.recv_many(&mut batch, KEEP_TRACES_MAX).await > 0 {
        runtime.sleep(GATHER).await;
        while batch.len() < KEEP_TRACES_MAX
            && let Ok(next) = verdicts.try_recv()
        {
            batch.push(next);
        }
        let mut calls: BTreeMap<_, (Arc<WorkerHandle>, Vec<TraceId>)> = BTreeMap::new();
        for Verdict { trace, worker } in batch.drain(..) {
            let (_, traces) = calls.entry(worker.party().clone()).or_insert_with(|| (worker, Vec::new()));
            traces.push(trace);
        }
        join_all(calls.into_values().map(|(worker, traces)| tell(&*runtime, worker, traces, &lost))).await;
    }
}

async fn tell(runtime: &dyn Runtime, worker: Arc<WorkerHandle>, traces: Vec<TraceId>, lost: &Counter) {
    let count = traces.len();
    let told = runtime.until(runtime.now() + CALL_MAX, worker.link().keep(traces)).await;
    if !matches!(told, Some(Ok(()))) {
        // Older workers do not have this call, and a worker that is gone has no spans.
        tracing::debug!(worker = %worker.party(), traces = count, "cannot tell a worker which traces are kept");
        lost.inc_by(count as u64);
    }
}
