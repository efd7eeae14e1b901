//! Receives every span that ends: stores it in the ring of recent spans, and exports it if sampling chose it.
//!
//! It takes a short lock and uses a queue that never blocks, so the collector cannot delay a request.

use super::export::{ExportCounters, Queue};
use super::ring::{Evicted, Finished, Ring, RingLimits};
use opentelemetry::Value;
use opentelemetry::trace::TraceId;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Longest text of an attribute; longer ones are cut, since names that clients choose may be long.
const TEXT_BYTES_MAX: usize = 1024;

/// Recent traces of this process. Clones share them; the default stores nothing.
#[derive(Clone, Debug)]
pub struct Traces(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    ring: Mutex<Ring>,
    queue: Option<Queue>,
    counters: ExportCounters,
}

impl Default for Traces {
    fn default() -> Self {
        Self::new(RingLimits { spans_max: 0, bytes_max: 0 }, None, ExportCounters::default())
    }
}

impl Traces {
    pub(super) fn new(limits: RingLimits, queue: Option<Queue>, counters: ExportCounters) -> Self {
        Self(Arc::new(Shared { ring: Mutex::new(Ring::new(limits)), queue, counters }))
    }

    /// Exports a trace that head sampling did not choose: stored spans at once, later ones as they end.
    pub fn keep(&self, trace: TraceId) {
        let mut ring = self.0.ring.lock();
        let (waiting, evicted) = ring.keep(trace);
        self.show(&ring, &evicted);
        drop(ring);
        waiting.into_iter().for_each(|span| self.export(span));
    }

    /// The stored finished spans of a trace, in the order in which they ended.
    pub fn spans_of(&self, trace: TraceId) -> Vec<Arc<SpanData>> {
        self.0.ring.lock().spans_of(trace)
    }

    /// The newest trace in which a span has this string attribute.
    pub fn trace_with(&self, key: &str, text: &str) -> Option<TraceId> {
        self.0.ring.lock().trace_with(key, text)
    }

    /// The newest traces in which a span has this attribute, newest first.
    pub fn traces_with(&self, key: &str, max: usize) -> Vec<TraceId> {
        self.0.ring.lock().traces_with(key, max)
    }

    pub fn held(&self) -> usize {
        self.0.ring.lock().traces()
    }

    fn record(&self, span: Finished) {
        let is_sampled = span.span_context.is_sampled();
        let mut ring = self.0.ring.lock();
        let (kept, evicted) = ring.insert(span.clone());
        self.show(&ring, &evicted);
        drop(ring);
        if is_sampled || kept {
            self.export(span);
        }
    }

    fn show(&self, ring: &Ring, evicted: &Evicted) {
        self.0.counters.evicted.inc_by(evicted.len() as u64);
        self.0.counters.held.set(ring.spans() as i64);
        self.0.counters.held_bytes.set(ring.bytes() as i64);
    }

    fn export(&self, span: Finished) {
        if let Some(queue) = &self.0.queue {
            queue.push(span);
        }
    }
}

/// The only span processor of the process.
#[derive(Debug)]
pub(super) struct Recorder(pub(super) Traces);

impl SpanProcessor for Recorder {
    fn on_start(&self, _: &mut Span, _: &opentelemetry::Context) {}

    fn on_end(&self, mut span: SpanData) {
        for pair in &mut span.attributes {
            if let Value::String(text) = &pair.value
                && text.as_str().len() > TEXT_BYTES_MAX
            {
                let text = text.as_str();
                pair.value = Value::String(text[..text.floor_char_boundary(TEXT_BYTES_MAX)].to_owned().into());
            }
        }
        self.0.record(Arc::new(span));
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }

    fn set_resource(&mut self, resource: &Resource) {
        if let Some(queue) = &self.0.0.queue {
            queue.set_resource(resource);
        }
    }
}
