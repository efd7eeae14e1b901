//! The trace spans of a scripted worker, and the traces that it was ordered to keep.

use baton_proto::v1::{self, telemetry_server::Telemetry};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

const WAIT_MAX: Duration = Duration::from_secs(20);

/// A worker's memory of traces. Cloning shares it.
#[derive(Clone, Default)]
pub(crate) struct Memory {
    /// The answer to every request, for any trace.
    pub(crate) spans: Arc<Mutex<Vec<v1::TraceSpan>>>,
    /// Whether requests for spans hang.
    pub(crate) hangs: Arc<AtomicBool>,
    kept: Arc<watch::Sender<Vec<String>>>,
}

impl Memory {
    /// Traces that it was ordered to keep so far, as hexadecimal digits; waits until there are `count`.
    pub(crate) async fn kept(&self, count: usize) -> Vec<String> {
        let mut kept = self.kept.subscribe();
        let there = kept.wait_for(|kept| kept.len() >= count);
        tokio::time::timeout(WAIT_MAX, there).await.expect("the router tells what is kept").unwrap().clone()
    }
}

#[tonic::async_trait]
impl Telemetry for Memory {
    async fn spans(&self, _: Request<v1::SpansRequest>) -> Result<Response<v1::SpansResponse>, Status> {
        if self.hangs.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(v1::SpansResponse { spans: self.spans.lock().clone() }))
    }

    async fn keep(&self, request: Request<v1::KeepRequest>) -> Result<Response<v1::KeepResponse>, Status> {
        let traces = request.into_inner().trace_ids;
        let hex = traces.iter().map(|id| id.iter().map(|b| format!("{b:02x}")).collect::<String>());
        self.kept.send_modify(|kept| kept.extend(hex));
        Ok(Response::new(v1::KeepResponse {}))
    }
}
