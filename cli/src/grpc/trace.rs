//! The spans of a request, from the router and the workers that took part.

use baton_proto::v1;
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default)]
pub(crate) struct RequestTrace {
    /// Id of the trace as 32 hexadecimal digits.
    pub(crate) trace_id: String,
    /// Spans of each process, the router's first.
    pub(crate) processes: Vec<ProcessSpans>,
    /// Workers that took part and did not answer, with the reason.
    pub(crate) silent: Vec<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct ProcessSpans {
    /// `router`, or the worker as `name@incarnation`.
    pub(crate) process: String,
    pub(crate) spans: Vec<Span>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Span {
    /// Id of the span, 8 bytes.
    pub(crate) id: Vec<u8>,
    /// Empty for a root.
    pub(crate) parent_id: Vec<u8>,
    pub(crate) name: String,
    /// Nanoseconds since 1970, by the clock of the process.
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) failed: bool,
    pub(crate) attributes: BTreeMap<String, String>,
}

impl From<v1::TraceResponse> for RequestTrace {
    fn from(trace: v1::TraceResponse) -> Self {
        let process = |v1::ProcessSpans { process, spans }| ProcessSpans {
            process,
            spans: spans.into_iter().map(span).collect(),
        };
        Self {
            trace_id: hex::encode(trace.trace_id),
            processes: trace.processes.into_iter().map(process).collect(),
            silent: trace.silent,
        }
    }
}

fn span(span: v1::TraceSpan) -> Span {
    Span {
        id: span.span_id.into(),
        parent_id: span.parent_span_id.into(),
        name: span.name,
        start_ns: span.start_ns,
        end_ns: span.end_ns,
        failed: span.failed,
        attributes: span.attributes.into_iter().collect(),
    }
}
