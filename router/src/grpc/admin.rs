//! `baton.v1.Admin`: operator calls to a router, which knows the cluster and forwards calls that concern one worker.

use super::link::GrpcConnector;
use super::status::status_response;
use super::trace::{recent, trace};
use crate::status::ClusterStatus;
use crate::workers::{NotNamed, WorkerHandle, WorkerSet};
use baton_node::operators::{self, RequestTrace};
use baton_node::telemetry::Traces;
use baton_proto::v1::{self, admin_server::Admin, worker_client::WorkerClient};
use baton_types::shown;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::{Code, Request, Response, Status};

/// Most workers that an error names: the message is sent in a header.
const NAMED_MAX: usize = 16;
/// Longest wait for a worker's first answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(crate) struct AdminService {
    workers: Arc<WorkerSet>,
    connector: GrpcConnector,
    status: ClusterStatus,
    traces: Traces,
}

impl AdminService {
    /// A service over this router's workers and how to reach them, its view of them, and its recent traces.
    pub(crate) fn new(
        workers: Arc<WorkerSet>,
        connector: GrpcConnector,
        status: ClusterStatus,
        traces: Traces,
    ) -> Self {
        Self { workers, connector, status, traces }
    }

    /// What `Status` answers.
    pub(crate) fn cluster(&self) -> operators::ClusterStatus {
        status_response(&self.status, Instant::now()).into()
    }

    /// What `Trace` answers; the error says why there is nothing.
    pub(crate) async fn request(&self, id: &str) -> Result<RequestTrace, String> {
        let found = trace(&self.workers, &self.connector, &self.traces, id).await;
        found.map(Into::into).map_err(|status| status.message().to_owned())
    }

    /// This router's own spans of the newest traces in which a request has ended, newest first.
    pub(crate) fn recent(&self, max: usize) -> Vec<RequestTrace> {
        recent(&self.traces, max)
    }
}

#[tonic::async_trait]
impl Admin for AdminService {
    type DrainStream = BoxStream<'static, Result<v1::DrainEvent, Status>>;

    async fn drain(&self, request: Request<v1::DrainWorkerRequest>) -> Result<Response<Self::DrainStream>, Status> {
        let v1::DrainWorkerRequest { worker: name, timeout_ms } = request.into_inner();
        let worker = self.workers.named(&name).map_err(|unnamed| refused(&name, &unnamed))?;
        let request = v1::DrainRequest { party: Some(worker.party().clone().into()), timeout_ms };
        let channel = self.connector.channel(&worker.record).map_err(|e| Status::unavailable(e.to_string()))?;
        let mut client = WorkerClient::new(channel);
        let late = |_| Status::unavailable(format!("worker {} did not answer within {ANSWER_MAX:?}", worker.party()));
        let answer = timeout(ANSWER_MAX, client.drain(request)).await.map_err(late)?;
        let events = answer.map_err(|status| of_worker(&worker, &status))?.into_inner();
        tracing::info!(worker = %worker.party(), "drains a worker, as asked");
        Ok(Response::new(events.map(move |event| event.map_err(|status| of_worker(&worker, &status))).boxed()))
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        Ok(Response::new(status_response(&self.status, Instant::now())))
    }

    async fn trace(&self, request: Request<v1::TraceRequest>) -> Result<Response<v1::TraceResponse>, Status> {
        trace(&self.workers, &self.connector, &self.traces, &request.into_inner().id).await.map(Response::new)
    }
}

fn refused(name: &str, unnamed: &NotNamed) -> Status {
    let name = shown(name);
    match unnamed {
        NotNamed::Nobody { known } if known.is_empty() => {
            Status::not_found(format!("no worker {name}: none is registered at this router"))
        }
        NotNamed::Nobody { known } => {
            Status::not_found(format!("no worker {name} is registered at this router; there are {}", list(known)))
        }
        NotNamed::Several { starts } => {
            Status::invalid_argument(format!("several starts of {name} are registered; name one: {}", list(starts)))
        }
    }
}

fn list(names: &[String]) -> String {
    let shown = names.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
    let more = names.len().saturating_sub(NAMED_MAX);
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// A worker's refusal, or the loss of its connection.
fn of_worker(worker: &WorkerHandle, status: &Status) -> Status {
    match status.code() {
        Code::Unimplemented => {
            Status::unimplemented(format!("worker {} cannot be asked to drain; end it with SIGTERM", worker.party()))
        }
        Code::FailedPrecondition => Status::failed_precondition(status.message()),
        _ => Status::unavailable(format!("worker {} does not answer: {}", worker.party(), status.message())),
    }
}
