//! Spans of a worker's part of a request, under the router's span that came with the call.
//!
//! Phases are known by their instants, often only once they are over, so spans are recorded with explicit times.

use opentelemetry::propagation::Extractor;
use opentelemetry::trace::{Span as _, SpanKind, Tracer as _};
use opentelemetry::{Context, KeyValue, Value, global};
use std::time::{Instant, SystemTime};
use tonic::metadata::{KeyRef, MetadataMap};

/// The caller's span.
#[derive(Clone, Debug)]
pub struct Parent {
    context: Context,
    // One clock reading ties both clocks, so that phases measured by `Instant` keep their order.
    clock: (Instant, SystemTime),
}

/// A phase that is running. Dropping it ends it now.
pub struct Phase {
    span: global::BoxedSpan,
}

struct Metadata<'a>(&'a MetadataMap);

impl Extractor for Metadata<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        let ascii = |k| if let KeyRef::Ascii(k) = k { Some(k.as_str()) } else { None };
        self.0.keys().filter_map(ascii).collect()
    }
}

impl Parent {
    /// Reads the W3C trace context of a call.
    pub fn of(metadata: &MetadataMap) -> Self {
        let context = global::get_text_map_propagator(|p| p.extract_with_context(&Context::new(), &Metadata(metadata)));
        Self { context, clock: (Instant::now(), SystemTime::now()) }
    }

    /// Starts a phase now.
    pub fn span(&self, name: &'static str) -> Phase {
        Phase { span: self.start(name, Instant::now()) }
    }

    /// Records a phase that is over.
    pub fn record<const N: usize>(&self, name: &'static str, start: Instant, end: Instant, attributes: [(&'static str, Value); N]) {
        let mut span = self.start(name, start);
        span.set_attributes(attributes.map(|(key, value)| KeyValue::new(key, value)));
        span.end_with_timestamp(self.at(end.max(start)));
    }

    fn start(&self, name: &'static str, at: Instant) -> global::BoxedSpan {
        let tracer = global::tracer("baton");
        tracer.span_builder(name).with_kind(SpanKind::Internal).with_start_time(self.at(at)).start_with_context(&tracer, &self.context)
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
    /// Adds an attribute.
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
