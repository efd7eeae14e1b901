//! Names the request in every log line below it.

use tracing::Span;

/// Target of spans that only log lines show: they are no phases of a request.
pub(super) const LOG_ONLY: &str = "baton_log";

/// A span for log lines alone, with the request and its trace.
pub fn log_span(request_id: &str, trace_id: &str) -> Span {
    tracing::info_span!(target: LOG_ONLY, "request", request_id, trace_id)
}
