//! Operators' calls of a router: the status of the cluster, the trace of a request, the drain of a worker.

use crate::router::RouterChannel;
use baton_node::operators::{ClusterStatus, RequestTrace};
use baton_proto::v1::{self, admin_client::AdminClient};
use std::time::Duration;
use tonic::{Request, Status, Streaming};

/// The trace of a request with very many spans is some tens of MB.
const TRACE_BYTES_MAX: usize = 64 << 20;

/// A router's `Admin` service.
pub(crate) struct Admin(AdminClient<RouterChannel>);

impl Admin {
    pub(crate) fn new(channel: RouterChannel) -> Self {
        Self(AdminClient::new(channel).max_decoding_message_size(TRACE_BYTES_MAX))
    }

    pub(crate) async fn status(&mut self) -> Result<ClusterStatus, Status> {
        Ok(self.0.status(v1::StatusRequest {}).await?.into_inner().into())
    }

    /// Spans of a recent request, or of a whole trace.
    pub(crate) async fn trace(&mut self, id: String, timeout: Duration) -> Result<RequestTrace, Status> {
        let mut request = Request::new(v1::TraceRequest { id });
        request.set_timeout(timeout);
        Ok(self.0.trace(request).await?.into_inner().into())
    }

    /// Starts to drain a worker. Without a timeout, the worker's own `drain.drain_ms_max` applies.
    pub(crate) async fn drain(&mut self, worker: String, timeout_ms: Option<u64>) -> Result<Drain, Status> {
        let request = v1::DrainWorkerRequest { worker, timeout_ms };
        Ok(Drain(self.0.drain(request).await?.into_inner()))
    }
}

/// A drain in progress; it continues even if this stream is dropped.
pub(crate) struct Drain(Streaming<v1::DrainEvent>);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DrainEvent {
    /// This many requests run on the worker.
    Running(u32),
    /// The drain is over.
    Drained(Drained),
}

/// How the requests of a drained worker ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Drained {
    /// Requests that ended there.
    pub(crate) finished: u32,
    /// Requests that were continued on other workers.
    pub(crate) cut_off: u32,
    /// Whether it deregistered; otherwise its lease will expire.
    pub(crate) deregistered: bool,
}

impl Drain {
    /// The next event; `None` if the router ended the stream too early.
    pub(crate) async fn next(&mut self) -> Result<Option<DrainEvent>, Status> {
        let event = self.0.message().await?;
        Ok(event.map(|v1::DrainEvent { running, drained }| match drained {
            None => DrainEvent::Running(running),
            Some(v1::Drained { finished, cut_off, deregistered }) => {
                DrainEvent::Drained(Drained { finished, cut_off, deregistered })
            }
        }))
    }
}
