//! Spans of a worker's part of a request. Their parent is the router's span that came with the call, or the span of the whole request.
//!
//! A phase's start and end are often known only when it is over, so spans are recorded with explicit times.

use opentelemetry::trace::{Span as _, SpanKind, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::trace::{SdkTracer, Span};
use std::time::{Instant, SystemTime};
use tonic::metadata::MetadataMap;

/// The caller's span, and the request's.
#[derive(Clone, Debug)]
pub struct Parent {
    tracer: SdkTracer,
    context: Context,
    request: Context,
    // One reading of both clocks relates them, so that phases measured by `Instant` keep their order.
    clock: (Instant, SystemTime),
}

/// A phase that is running. Dropping it ends it now.
#[derive(Debug)]
pub struct Phase {
    span: Span,
}

impl Parent {
    /// Reads the W3C trace context of a call.
    pub fn of(metadata: &MetadataMap, tracer: &SdkTracer) -> Self {
        let context = baton_node::telemetry::parent_of(metadata);
        let request = baton_node::telemetry::request_of(metadata);
        Self { tracer: tracer.clone(), context, request, clock: (Instant::now(), SystemTime::now()) }
    }

    /// Names the request, and its trace, in log lines.
    pub fn log_span(&self, request_id: &str) -> tracing::Span {
        let trace = self.context.span().span_context().trace_id().to_string();
        baton_node::telemetry::log_span(request_id, &trace)
    }

    /// Starts a phase now.
    pub fn span(&self, name: &'static str) -> Phase {
        Phase { span: self.start(&self.context, name, Instant::now()) }
    }

    /// Records a phase that is over.
    pub fn record<const N: usize>(
        &self,
        name: &'static str,
        start: Instant,
        end: Instant,
        attributes: [(&'static str, Value); N],
    ) {
        self.record_under(&self.context, name, start, end, attributes);
    }

    /// Records a phase of the request that is not part of the call: it may end after the call.
    pub fn record_beside<const N: usize>(
        &self,
        name: &'static str,
        start: Instant,
        end: Instant,
        attributes: [(&'static str, Value); N],
    ) {
        self.record_under(&self.request, name, start, end, attributes);
    }

    fn record_under<const N: usize>(
        &self,
        parent: &Context,
        name: &'static str,
        start: Instant,
        end: Instant,
        attributes: [(&'static str, Value); N],
    ) {
        let mut span = self.start(parent, name, start);
        span.set_attributes(attributes.map(|(key, value)| KeyValue::new(key, value)));
        span.end_with_timestamp(self.at(end.max(start)));
    }

    fn start(&self, parent: &Context, name: &'static str, at: Instant) -> Span {
        let span = self.tracer.span_builder(name).with_kind(SpanKind::Internal).with_start_time(self.at(at));
        span.start_with_context(&self.tracer, parent)
    }

    fn at(&self, instant: Instant) -> SystemTime {
        let (base, wall) = self.clock;
        match instant.checked_duration_since(base) {
            Some(later) => wall + later,
            None => wall - base.duration_since(instant),
        }
    }
}

impl Phase {
    #[must_use]
    pub fn attribute(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.span.set_attribute(KeyValue::new(key, value));
        self
    }

    /// Ends the phase now.
    pub fn end(mut self) {
        self.span.end();
    }
}
