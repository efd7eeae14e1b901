//! `baton.v1.Telemetry`: the spans of recent traces in this process, for routers.

use crate::telemetry::Traces;
use baton_proto::v1::{self, telemetry_server::Telemetry};
use opentelemetry::trace::{SpanId, Status as SpanStatus, TraceId};
use opentelemetry_sdk::trace::SpanData;
use std::time::{SystemTime, UNIX_EPOCH};
use tonic::{Request, Response, Status};

/// Most traces of one `Keep`.
pub const KEEP_TRACES_MAX: usize = 1024;

#[derive(Clone, Debug)]
pub struct TelemetryService(Traces);

impl TelemetryService {
    /// A service over these traces.
    pub fn new(traces: Traces) -> Self {
        Self(traces)
    }
}

#[tonic::async_trait]
impl Telemetry for TelemetryService {
    async fn spans(&self, request: Request<v1::SpansRequest>) -> Result<Response<v1::SpansResponse>, Status> {
        let trace = trace_id(&request.into_inner().trace_id)?;
        Ok(Response::new(v1::SpansResponse { spans: summaries(&self.0, trace) }))
    }

    async fn keep(&self, request: Request<v1::KeepRequest>) -> Result<Response<v1::KeepResponse>, Status> {
        let traces = request.into_inner().trace_ids;
        if traces.len() > KEEP_TRACES_MAX {
            return Err(Status::invalid_argument(format!("trace_ids: at most {KEEP_TRACES_MAX}")));
        }
        let traces = traces.iter().map(|id| trace_id(id)).collect::<Result<Vec<_>, _>>()?;
        traces.into_iter().for_each(|trace| self.0.keep(trace));
        Ok(Response::new(v1::KeepResponse {}))
    }
}

fn trace_id(bytes: &[u8]) -> Result<TraceId, Status> {
    let id = bytes.try_into().map(TraceId::from_bytes).ok().filter(|id| *id != TraceId::INVALID);
    id.ok_or_else(|| Status::invalid_argument("a trace id is 16 bytes, not all zero"))
}

/// The stored finished spans of a trace, as messages.
pub fn summaries(traces: &Traces, trace: TraceId) -> Vec<v1::TraceSpan> {
    traces.spans_of(trace).iter().map(|span| summary(span)).collect()
}

fn summary(span: &SpanData) -> v1::TraceSpan {
    let parent = Some(span.parent_span_id).filter(|id| *id != SpanId::INVALID);
    v1::TraceSpan {
        span_id: span.span_context.span_id().to_bytes().to_vec().into(),
        parent_span_id: parent.map(|id| id.to_bytes().to_vec()).unwrap_or_default().into(),
        name: span.name.clone().into_owned(),
        start_ns: nanos(span.start_time),
        end_ns: nanos(span.end_time),
        failed: matches!(span.status, SpanStatus::Error { .. }),
        attributes: span.attributes.iter().map(|pair| (pair.key.to_string(), pair.value.to_string())).collect(),
    }
}

fn nanos(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{TelemetryConfig, build};
    use opentelemetry::KeyValue;
    use opentelemetry::trace::{Span as _, Tracer as _};
    use std::time::Duration;

    #[tokio::test]
    async fn spans_are_told_with_their_instants_and_attributes() {
        let (_, guard) = build("baton-decode-worker", &TelemetryConfig::default()).unwrap();
        let tracer = guard.tracer();
        let at = UNIX_EPOCH + Duration::from_nanos(1_700_000_000_123_456_789);
        let mut span = tracer.span_builder("kv.transfer").with_start_time(at).start(&tracer);
        span.set_attributes([KeyValue::new("baton.kv.bytes", 512), KeyValue::new("baton.kv.transport", "ucx")]);
        span.set_status(SpanStatus::error("torn"));
        let context = span.span_context().clone();
        span.end_with_timestamp(at + Duration::from_micros(7));
        let service = TelemetryService::new(guard.traces());
        let ask = async |trace_id: Vec<u8>| {
            let request = v1::SpansRequest { trace_id: trace_id.into() };
            service.spans(Request::new(request)).await.map(|answer| answer.into_inner().spans)
        };
        let spans = ask(context.trace_id().to_bytes().to_vec()).await.unwrap();
        assert_eq!(
            spans,
            [v1::TraceSpan {
                span_id: context.span_id().to_bytes().to_vec().into(),
                parent_span_id: Default::default(),
                name: "kv.transfer".into(),
                start_ns: 1_700_000_000_123_456_789,
                end_ns: 1_700_000_000_123_463_789,
                failed: true,
                attributes: [("baton.kv.bytes", "512"), ("baton.kv.transport", "ucx")]
                    .map(|(key, value)| (key.into(), value.into()))
                    .into(),
            }]
        );
        assert!(ask(vec![7; 16]).await.unwrap().is_empty());
        for wrong in [vec![], vec![0; 16], vec![7; 15]] {
            assert_eq!(ask(wrong).await.unwrap_err().code(), tonic::Code::InvalidArgument);
        }
        let many = v1::KeepRequest { trace_ids: vec![vec![7; 16].into(); KEEP_TRACES_MAX + 1] };
        assert!(service.keep(Request::new(many)).await.is_err());
    }
}
