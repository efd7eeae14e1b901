//! What operators ask of a router: the status of the cluster, the trace of a request, the drain of a worker.

use super::{ClusterStatus, RequestTrace};
use crate::router::RouterChannel;
use baton_proto::v1::{self, admin_client::AdminClient};
use std::time::Duration;
use tonic::{Request, Status, Streaming};

/// A trace of very many requests is some ten MB.
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

    /// Starts to drain a worker. The worker's own `drain.drain_ms_max` holds where no timeout is given.
    pub(crate) async fn drain(&mut self, worker: String, timeout_ms: Option<u64>) -> Result<Drain, Status> {
        let request = v1::DrainWorkerRequest { worker, timeout_ms };
        Ok(Drain(self.0.drain(request).await?.into_inner()))
    }
}

/// A drain that goes on, whether or not anybody follows it.
pub(crate) struct Drain(Streaming<v1::DrainEvent>);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DrainEvent {
    /// So many requests run on the worker.
    Running(u32),
    /// The drain is over.
    Drained(Drained),
}

/// What became of the requests of a drained worker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Drained {
    /// Requests that ended there.
    pub(crate) finished: u32,
    /// Requests that had to go on elsewhere.
    pub(crate) cut_off: u32,
    /// Otherwise the worker's lease ends by itself.
    pub(crate) deregistered: bool,
}

impl Drain {
    /// The next event; `None` where the router ended the stream too early.
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
