//! Parts for tests of this crate and others: an in-process OTLP collector, an authority with its certificates, a real
//! etcd, a relay that can be silenced, ports that stay free, spans of a request.

pub mod certificates;
pub mod etcd;
mod ports;
pub mod relay;
pub mod spans;

pub use ports::free_ports;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

/// The marker by which `cargo xtask hazards` finds a binary that was built with these.
#[used]
static MARKER: &str = "BATON_TESTING_HAZARD node";

/// Most spans kept; a test needs far fewer.
const SPANS_MAX: usize = 100_000;

/// One span as the collector received it. Ids are lower-case hexadecimal.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectedSpan {
    /// `service.name` of its process.
    pub service: String,
    /// Other attributes of its process.
    pub resource: BTreeMap<String, String>,
    pub name: String,
    /// Id of its trace.
    pub trace_id: String,
    pub span_id: String,
    /// Id of its parent; `None` for a root.
    pub parent_id: Option<String>,
    /// Attributes; numbers and booleans as text.
    pub attributes: BTreeMap<String, String>,
    /// Start and end, nanoseconds since 1970.
    pub time_ns: std::ops::Range<u64>,
}

#[derive(Clone, Default)]
struct Sink {
    spans: Arc<Mutex<Vec<CollectedSpan>>>,
    came: Arc<Notify>,
}

/// An OTLP gRPC collector on a free port. Ends when dropped.
pub struct Collector {
    url: String,
    sink: Sink,
    _stop: DropGuard,
}

impl Collector {
    pub async fn start() -> std::io::Result<Self> {
        Self::serve("http", Server::builder()).await
    }

    /// The same over TLS, with the certificate of [`certificates::certificates`] in `folder`.
    pub async fn start_tls(folder: &Path) -> std::io::Result<Self> {
        let read = |name: &str| std::fs::read(folder.join(name));
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(read("node.pem")?, read("node.key")?));
        let server = Server::builder().tls_config(tls).map_err(std::io::Error::other)?;
        Self::serve("https", server).await
    }

    async fn serve(scheme: &str, mut server: Server) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("{scheme}://{}", listener.local_addr()?);
        let (sink, stop) = (Sink::default(), CancellationToken::new());
        let router = server.add_service(TraceServiceServer::new(sink.clone()));
        let stopped = stop.clone().cancelled_owned();
        tokio::spawn(router.serve_with_incoming_shutdown(TcpListenerStream::new(listener), stopped));
        Ok(Self { url, sink, _stop: stop.drop_guard() })
    }

    /// Its URL, for the setting `telemetry.otlp_url`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// All spans so far, in order of arrival.
    pub fn spans(&self) -> Vec<CollectedSpan> {
        self.sink.spans.lock().clone()
    }

    /// Waits until `done` is true for the spans, and returns them; `Err` with the received spans if that takes longer
    /// than `within`.
    pub async fn wait(
        &self,
        within: Duration,
        mut done: impl FnMut(&[CollectedSpan]) -> bool,
    ) -> Result<Vec<CollectedSpan>, Vec<CollectedSpan>> {
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let came = self.sink.came.notified();
            let spans = self.spans();
            if done(&spans) {
                return Ok(spans);
            }
            if tokio::time::timeout_at(deadline, came).await.is_err() {
                return Err(spans);
            }
        }
    }
}

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.spans.lock();
        for resource in request.into_inner().resource_spans {
            let mut process = attributes(resource.resource.map(|r| r.attributes).unwrap_or_default());
            let service = process.remove("service.name").unwrap_or_default();
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                if spans.len() == SPANS_MAX {
                    return Err(Status::resource_exhausted("the collector is full"));
                }
                spans.push(CollectedSpan {
                    service: service.clone(),
                    resource: process.clone(),
                    name: span.name,
                    trace_id: hex(&span.trace_id),
                    span_id: hex(&span.span_id),
                    parent_id: (!span.parent_span_id.is_empty()).then(|| hex(&span.parent_span_id)),
                    attributes: attributes(span.attributes),
                    time_ns: span.start_time_unix_nano..span.end_time_unix_nano,
                });
            }
        }
        drop(spans);
        self.came.notify_waiters();
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn attributes(pairs: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value: AnyValue| match value.value {
        Some(any_value::Value::StringValue(v)) => v,
        Some(any_value::Value::IntValue(v)) => v.to_string(),
        Some(any_value::Value::DoubleValue(v)) => v.to_string(),
        Some(any_value::Value::BoolValue(v)) => v.to_string(),
        other => format!("{other:?}"),
    };
    pairs.into_iter().map(|pair| (pair.key, pair.value.map(text).unwrap_or_default())).collect()
}
