//! A span that adds the request to every log line within it.

use tracing::Span;

/// Target of spans for log lines only: they are not phases of a request.
pub(super) const LOG_ONLY: &str = "baton_log";

/// A span for log lines only, with the request and its trace.
pub fn log_span(request_id: &str, trace_id: &str) -> Span {
    tracing::info_span!(target: LOG_ONLY, "request", request_id, trace_id)
}
