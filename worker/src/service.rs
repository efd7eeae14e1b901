//! `baton.v1.Worker`: the model's bundle, a stream of load reports, and the drain.

use crate::drain::{Drain, DrainPhase, DrainState};
use crate::report::REPORT_MS_MIN;
use baton_engine::EngineHandle;
use baton_kv_transfer::KvTransfer;
use baton_proto::v1::{self, worker_server::Worker};
use baton_types::{Digest, Party};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Largest chunk of a bundle.
const CHUNK_BYTES_MAX: usize = 1 << 20;
/// Reports that wait for a slow router.
const REPORTS_MAX: usize = 2;

/// Longest drain that can be asked for, as for `drain.drain_ms_max`.
const DRAIN_MS_MAX: u64 = 3_600_000;

/// What is claimed and not adopted yet; only a decode worker has any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// Sequences, which will come.
    pub sequences: usize,
    /// Tokens of their prompts.
    pub tokens: u64,
}

/// Tells what is claimed now.
pub type Claims = Arc<dyn Fn() -> Claimed + Send + Sync>;

/// What every worker serves to routers.
#[derive(Clone)]
pub struct WorkerService {
    /// Who reports.
    pub party: Party,
    /// What it registers.
    pub record: v1::InstanceRecord,
    /// Whose load.
    pub engine: EngineHandle,
    /// How its KV travels.
    pub transfer: KvTransfer,
    /// Digest and bytes of the bundle.
    pub bundle: Option<(Digest, Bytes)>,
    /// See [`Claimed`].
    pub claimed: Claims,
    /// See [`crate::report::cache_changes`].
    pub cache_changed: watch::Receiver<()>,
    /// Drains the worker.
    pub drain: Drain,
    /// Bound of a drain that states none.
    pub drain_max: Duration,
    /// Ends reports.
    pub stop: CancellationToken,
}

#[tonic::async_trait]
impl Worker for WorkerService {
    type BundleStream = ReceiverStream<Result<v1::BundleChunk, Status>>;
    type WatchStream = ReceiverStream<Result<v1::LoadReport, Status>>;
    type DrainStream = ReceiverStream<Result<v1::DrainEvent, Status>>;

    async fn bundle(&self, request: Request<v1::BundleRequest>) -> Result<Response<Self::BundleStream>, Status> {
        let wanted = request.into_inner().digest;
        let Some((_, bytes)) = self.bundle.as_ref().filter(|(digest, _)| digest.0[..] == wanted[..]) else {
            return Err(Status::not_found("this worker's model has another bundle, or none"));
        };
        let (chunks, stream) = mpsc::channel(1);
        let mut rest = bytes.clone();
        tokio::spawn(async move {
            while !rest.is_empty() {
                let data = rest.split_to(rest.len().min(CHUNK_BYTES_MAX));
                if chunks.send(Ok(v1::BundleChunk { data })).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let v1::WatchRequest { router, cache_events } = request.into_inner();
        tracing::info!(router, cache_events, "reports load to a router");
        let (reports, stream) = mpsc::channel(REPORTS_MAX);
        tokio::spawn(self.clone().report(reports, cache_events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn record(&self, _: Request<v1::RecordRequest>) -> Result<Response<v1::InstanceRecord>, Status> {
        Ok(Response::new(self.record.clone()))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        let v1::DrainRequest { party, timeout_ms } = request.into_inner();
        if party != Some(self.party.clone().into()) {
            let message = format!("{} is another start than the one that was to drain", self.party);
            return Err(Status::failed_precondition(message));
        }
        let bound = timeout_ms.map_or(self.drain_max, |ms| Duration::from_millis(ms.min(DRAIN_MS_MAX)));
        if !self.drain.start(sleep(bound)) {
            let DrainState { phase, running, .. } = *self.drain.state().borrow();
            let name = &self.party.instance;
            return Err(Status::failed_precondition(match phase {
                DrainPhase::Drained { .. } => format!("{name} is drained already; restart it to serve again"),
                _ => format!("{name} drains already; {running} requests run there"),
            }));
        }
        let (events, stream) = mpsc::channel(REPORTS_MAX);
        tokio::spawn(tell_drain(self.drain.state(), events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Tells how the drain goes on, to its end.
async fn tell_drain(mut state: watch::Receiver<DrainState>, events: mpsc::Sender<Result<v1::DrainEvent, Status>>) {
    loop {
        let DrainState { phase, running, finished, cut_off } = *state.borrow_and_update();
        let drained = match phase {
            DrainPhase::Drained { deregistered } => Some(v1::Drained { finished, cut_off, deregistered }),
            _ => None,
        };
        if events.send(Ok(v1::DrainEvent { running, drained })).await.is_err() || drained.is_some() {
            return;
        }
        sleep(Duration::from_millis(REPORT_MS_MIN)).await;
        if state.changed().await.is_err() {
            return;
        }
    }
}
