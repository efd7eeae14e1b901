//! The gRPC services of every worker: the only module of this crate that names protobuf.

use crate::call::CallContext;
use crate::drain::{DrainPhase, DrainState};
use crate::report::{PERIOD, Report, Wanted};
use crate::role::Parts;
use crate::service::WorkerService;
use crate::spans::Parent;
use baton_kv_cache::{FeedChange, FeedUpdate, PrefixHash};
use baton_node::grpc::TelemetryService;
use baton_node::grpc::{self, GrpcConfig, Router, deadline_of};
use baton_node::telemetry::Traces;
use baton_proto::convert::{required, status};
use baton_proto::v1::telemetry_server::{self, TelemetryServer};
use baton_proto::v1::worker_server::{self, Worker, WorkerServer};
use baton_proto::v1::{self, cache_update::Change};
use baton_types::{Party, RequestError, Runtime};
use bytes::Bytes;
use futures::Stream;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Largest chunk of a bundle.
const CHUNK_BYTES_MAX: usize = 1 << 20;
/// Chunks, or drain updates, that wait for a slow reader.
const MESSAGES_MAX: usize = 2;

/// A call's answer, message by message.
pub type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Accepts a call of a role's service.
///
/// # Errors
/// While the worker drains, and if the call's own timeout cannot be parsed.
pub fn take_up<T>(request: &Request<T>, parts: &Parts) -> Result<CallContext, RequestError> {
    let since = parts.runtime.now();
    let deadline = deadline_of(request.metadata(), since, parts.call_max)?;
    let running = parts.drain.enter()?;
    Ok(CallContext { since, deadline, running, parent: Parent::of(request.metadata(), &parts.tracer) })
}

/// Events of a call as its messages.
pub fn replies<E: Send + 'static, T: From<E>>(events: mpsc::Receiver<Result<E, RequestError>>) -> Replies<T> {
    let reply = |event: Result<E, RequestError>| event.map(T::from).map_err(|error| status::from_error(&error));
    Box::pin(ReceiverStream::new(events).map(reply))
}

/// Services of every worker; its role adds its own.
pub(crate) fn router(config: &GrpcConfig, service: WorkerService, traces: Traces, role_service: &str) -> Router {
    let (_, health) = grpc::health();
    let worker = WorkerServer::new(service).max_decoding_message_size(config.message_max());
    let telemetry = TelemetryServer::new(TelemetryService::new(traces));
    let router = grpc::server(config).add_service(health).add_service(worker).add_service(telemetry);
    grpc::with_reflection(router, &[worker_server::SERVICE_NAME, telemetry_server::SERVICE_NAME, role_service])
}

#[tonic::async_trait]
impl Worker for WorkerService {
    type BundleStream = ReceiverStream<Result<v1::BundleChunk, Status>>;
    type WatchStream = Replies<v1::LoadReport>;
    type DrainStream = ReceiverStream<Result<v1::DrainEvent, Status>>;

    async fn bundle(&self, request: Request<v1::BundleRequest>) -> Result<Response<Self::BundleStream>, Status> {
        let wanted = request.into_inner().digest;
        let Some((_, bytes)) = self.bundle.as_ref().filter(|(digest, _)| digest.0[..] == wanted[..]) else {
            return Err(Status::not_found("this worker's model has another bundle, or none"));
        };
        let (chunks, stream) = mpsc::channel(1);
        let mut rest = bytes.clone();
        self.runtime.spawn(Box::pin(async move {
            while !rest.is_empty() {
                let data = rest.split_to(rest.len().min(CHUNK_BYTES_MAX));
                if chunks.send(Ok(v1::BundleChunk { data })).await.is_err() {
                    return;
                }
            }
        }));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let v1::WatchRequest { router, cache_events, adapters } = request.into_inner();
        tracing::info!(router, cache_events, "reports load to a router");
        let wanted = Wanted { cache: cache_events, adapters };
        let (party, mut sequence) = (self.party.clone(), 0);
        let reports = ReceiverStream::new(self.reports(wanted));
        Ok(Response::new(Box::pin(reports.map(move |report| Ok(load_report(&party, &mut sequence, report))))))
    }

    async fn record(&self, _: Request<v1::RecordRequest>) -> Result<Response<v1::InstanceRecord>, Status> {
        Ok(Response::new(self.record.clone().into()))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        let v1::DrainRequest { party, timeout_ms } = request.into_inner();
        let state = required("party", party)
            .map_err(|error| error.to_string())
            .and_then(|party| self.start_drain(&party, timeout_ms.map(Duration::from_millis)))
            .map_err(Status::failed_precondition)?;
        let (events, stream) = mpsc::channel(MESSAGES_MAX);
        self.runtime.spawn(Box::pin(tell_drain(state, events, self.runtime.clone())));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Sends updates of the drain until it ends.
async fn tell_drain(
    mut state: watch::Receiver<DrainState>,
    events: mpsc::Sender<Result<v1::DrainEvent, Status>>,
    runtime: Arc<dyn Runtime>,
) {
    loop {
        let DrainState { phase, running, finished, cut_off } = *state.borrow_and_update();
        let drained = match phase {
            DrainPhase::Drained { deregistered } => Some(v1::Drained { finished, cut_off, deregistered }),
            _ => None,
        };
        if events.send(Ok(v1::DrainEvent { running, drained })).await.is_err() || drained.is_some() {
            return;
        }
        runtime.sleep_until(runtime.now() + PERIOD).await;
        if state.changed().await.is_err() {
            return;
        }
    }
}

/// A report as its message; `sequence` numbers the load reports.
fn load_report(party: &Party, sequence: &mut u64, report: Report) -> v1::LoadReport {
    let party = Some(party.clone().into());
    match report {
        Report::Load(load) => {
            *sequence += 1;
            v1::LoadReport { party, sequence: *sequence, ..load.into() }
        }
        Report::Adapters(cards) => v1::LoadReport { party, adapters: Some((&cards[..]).into()), ..Default::default() },
        Report::Cache(update) => v1::LoadReport { party, cache: Some(cache_update(update)), ..Default::default() },
    }
}

fn cache_update(update: FeedUpdate) -> v1::CacheUpdate {
    let bytes = |hashes: Vec<PrefixHash>| hashes.iter().flat_map(|hash| hash.0).collect::<Bytes>();
    let change = match update.change {
        FeedChange::Stored(blocks) => Change::Stored(bytes(blocks)),
        FeedChange::Removed(blocks) => Change::Removed(bytes(blocks)),
        FeedChange::Snapshot { part, last, blocks } => {
            Change::Snapshot(v1::CacheSnapshot { part, last, hashes: bytes(blocks) })
        }
    };
    v1::CacheUpdate { sequence: update.sequence, change: Some(change) }
}
