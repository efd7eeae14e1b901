//! Propagation of the W3C trace context (`traceparent`, `tracestate`).

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceId};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::MetadataMap;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

struct Headers<'a>(&'a mut HeaderMap);

impl Injector for Headers<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}

/// Longest `tracestate` that is passed on, the length that the W3C asks of everyone. Each call to a worker carries it, and
/// workers take few bytes of headers. The trace goes on without a longer one.
const TRACE_STATE_BYTES_MAX: usize = 512;

struct Received<'a>(&'a HeaderMap);

impl Extractor for Received<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let value = self.0.get(key)?.to_str().ok()?;
        (key != "tracestate" || value.len() <= TRACE_STATE_BYTES_MAX).then_some(value)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

/// Writes the context of `span` into the metadata of an outgoing call.
pub fn inject(span: &Span, metadata: &mut MetadataMap) {
    inject_http(span, metadata.as_mut());
}

/// Metadata key for the span of the whole request, in the same trace as the call's span. Work of a worker for the
/// request outside of the call, such as moving its KV, has that span as its parent.
const REQUEST_SPAN: &str = "baton-request-span";

/// Like [`inject`], with the span of the request that contains the call.
pub fn inject_call(span: &Span, request: &Span, metadata: &mut MetadataMap) {
    inject(span, metadata);
    let context = request.context();
    let request = context.span().span_context().clone();
    if request.is_valid()
        && let Ok(value) = HeaderValue::try_from(request.span_id().to_string())
    {
        metadata.as_mut().insert(REQUEST_SPAN, value);
    }
}

/// The context of the request that a call belongs to; the context of the call itself if it is not given.
pub fn request_of(metadata: &MetadataMap) -> Context {
    let call = parent_of(metadata);
    let named = metadata.as_ref().get(REQUEST_SPAN).and_then(|value| value.to_str().ok());
    let Some(request) = named.and_then(|id| SpanId::from_hex(id).ok()).filter(|id| *id != SpanId::INVALID) else {
        return call;
    };
    let of_call = call.span().span_context().clone();
    let (flags, state) = (of_call.trace_flags(), of_call.trace_state().clone());
    Context::new().with_remote_span_context(SpanContext::new(of_call.trace_id(), request, flags, true, state))
}

/// Writes the context of `span` into the headers of an outgoing request.
pub fn inject_http(span: &Span, headers: &mut HeaderMap) {
    TraceContextPropagator::new().inject_context(&span.context(), &mut Headers(headers));
}

/// Makes the caller's span, if it sent one, the parent of `span`. Call it before any code runs inside `span` and before
/// [`trace_id_of`]: a span that has started keeps its parent.
pub fn set_parent(span: &Span, metadata: &MetadataMap) {
    set_parent_http(span, metadata.as_ref());
}

/// The context that a caller sent; empty if it sent none.
pub fn parent_of(metadata: &MetadataMap) -> Context {
    extract(metadata.as_ref())
}

fn extract(headers: &HeaderMap) -> Context {
    TraceContextPropagator::new().extract_with_context(&Context::new(), &Received(headers))
}

/// Like [`set_parent`], from HTTP headers.
pub fn set_parent_http(span: &Span, headers: &HeaderMap) {
    let context = extract(headers);
    if context.span().span_context().is_valid() {
        // Fails only if telemetry is off or the span has started; a trace without its parent is still useful.
        let _ = span.set_parent(context);
    }
}

/// The trace id of `span`, 32 hexadecimal digits; `None` if telemetry is off.
pub fn trace_id_of(span: &Span) -> Option<String> {
    head_of(span).map(|(trace, _)| trace.to_string())
}

/// The trace of `span`, and whether head sampling chose it; `None` if telemetry is off.
pub fn head_of(span: &Span) -> Option<(TraceId, bool)> {
    let context = span.context();
    let span = context.span().span_context().clone();
    span.is_valid().then(|| (span.trace_id(), span.is_sampled()))
}
