//! Spans of recent requests, bounded by number and bytes: the oldest trace is evicted as a whole. Pure: no lock, no
//! clock, no I/O.
//!
//! Spans that head sampling chose are exported as they end. The others are stored here, in case tail sampling keeps
//! their trace.

use opentelemetry::trace::TraceId;
use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::SpanData;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Most spans stored of one trace: a caller's own trace may contain any number of requests.
pub(super) const TRACE_SPANS_MAX: usize = 1024;
/// Memory of a trace besides its spans: its entries in the map and in the order, rounded up.
const TRACE_BYTES: usize = 256;

/// A finished span, shared with the exporter.
pub(super) type Finished = Arc<SpanData>;

/// Spans that left the ring. Drop them while no lock is held.
pub(super) type Evicted = Vec<Finished>;

/// Limits of the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingLimits {
    /// Spans; 0 stores nothing.
    pub(super) spans_max: usize,
    /// Estimated memory of spans and traces.
    pub(super) bytes_max: usize,
}

/// The spans of recent requests.
#[derive(Debug)]
pub(super) struct Ring {
    limits: RingLimits,
    traces: HashMap<TraceId, TraceSpans>,
    /// In order of arrival.
    order: VecDeque<TraceId>,
    spans: usize,
    bytes: usize,
}

#[derive(Debug, Default)]
struct TraceSpans {
    spans: Vec<Finished>,
    bytes: usize,
    keep: bool,
}

impl Ring {
    pub(super) fn new(limits: RingLimits) -> Self {
        Self { limits, traces: HashMap::new(), order: VecDeque::new(), spans: 0, bytes: 0 }
    }

    /// Stores a span. Returns whether its trace is to be kept, and the evicted spans; if its trace is full, that is the
    /// span itself.
    pub(super) fn insert(&mut self, span: Finished) -> (bool, Evicted) {
        if self.limits.spans_max == 0 {
            return (false, vec![span]);
        }
        let bytes = bytes_of(&span);
        let held = self.entry(span.span_context.trace_id());
        let keep = held.keep;
        if held.spans.len() == TRACE_SPANS_MAX {
            return (keep, vec![span]);
        }
        held.spans.push(span);
        held.bytes += bytes;
        self.spans += 1;
        self.bytes += bytes;
        (keep, self.make_room())
    }

    /// Keeps a trace: returns its stored spans that head sampling did not choose. Later spans report it when they are
    /// inserted.
    pub(super) fn keep(&mut self, trace: TraceId) -> (Vec<Finished>, Evicted) {
        if self.limits.spans_max == 0 {
            return Default::default();
        }
        let held = self.entry(trace);
        let waiting = match std::mem::replace(&mut held.keep, true) {
            true => Vec::new(),
            false => held.spans.iter().filter(|span| !span.span_context.is_sampled()).cloned().collect(),
        };
        (waiting, self.make_room())
    }

    /// The stored spans of a trace, in the order in which they ended.
    pub(super) fn spans_of(&self, trace: TraceId) -> Vec<Finished> {
        self.traces.get(&trace).map(|held| held.spans.clone()).unwrap_or_default()
    }

    /// The newest trace in which a span has this string attribute.
    pub(super) fn trace_with(&self, key: &str, text: &str) -> Option<TraceId> {
        let says = |pair: &KeyValue| pair.key.as_str() == key && is_text(&pair.value, text);
        let has = |held: &TraceSpans| held.spans.iter().any(|span| span.attributes.iter().any(says));
        self.order.iter().rev().find(|trace| self.traces.get(trace).is_some_and(has)).copied()
    }

    /// The newest traces in which a span has this attribute, newest first.
    pub(super) fn traces_with(&self, key: &str, max: usize) -> Vec<TraceId> {
        let has = |held: &TraceSpans| {
            held.spans.iter().any(|span| span.attributes.iter().any(|pair| pair.key.as_str() == key))
        };
        let named = self.order.iter().rev().filter(|trace| self.traces.get(trace).is_some_and(has));
        named.take(max).copied().collect()
    }

    pub(super) fn spans(&self) -> usize {
        self.spans
    }

    /// Estimated size of the stored spans, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn traces(&self) -> usize {
        self.order.len()
    }

    fn entry(&mut self, trace: TraceId) -> &mut TraceSpans {
        match self.traces.entry(trace) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(place) => {
                self.order.push_back(trace);
                self.bytes += TRACE_BYTES;
                place.insert(TraceSpans::default())
            }
        }
    }

    fn make_room(&mut self) -> Evicted {
        let mut evicted = Evicted::new();
        while self.spans > self.limits.spans_max || self.bytes > self.limits.bytes_max {
            let Some(oldest) = self.order.pop_front() else { break };
            let Some(held) = self.traces.remove(&oldest) else { continue };
            self.spans -= held.spans.len();
            self.bytes -= held.bytes + TRACE_BYTES;
            evicted.extend(held.spans);
        }
        evicted
    }
}

fn is_text(value: &Value, text: &str) -> bool {
    matches!(value, Value::String(value) if value.as_str() == text)
}

/// An estimate: the span, its attributes and their text, the same for its events, and what the caller added to the trace.
fn bytes_of(span: &SpanData) -> usize {
    let texts = |pairs: &[KeyValue]| pairs.iter().map(text_bytes).sum::<usize>();
    let events = span.events.iter().map(|e| size_of_val(e) + size_of_val(&*e.attributes) + texts(&e.attributes));
    let state = span.span_context.trace_state().into_iter();
    let state = state.map(|(key, value)| size_of::<(String, String)>() + key.len() + value.len());
    let attributes = size_of_val(&*span.attributes) + texts(&span.attributes);
    size_of::<SpanData>() + attributes + events.sum::<usize>() + state.sum::<usize>()
}

fn text_bytes(pair: &KeyValue) -> usize {
    match &pair.value {
        Value::String(text) => text.as_str().len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry::InstrumentationScope;
    use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceState};
    use std::time::UNIX_EPOCH;

    fn span(trace: u128, id: u64, sampled: bool, request: Option<&str>) -> Finished {
        let flags = TraceFlags::default().with_sampled(sampled);
        let (trace, id) = (TraceId::from(trace), SpanId::from(id));
        Arc::new(SpanData {
            span_context: SpanContext::new(trace, id, flags, false, TraceState::NONE),
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "generate".into(),
            start_time: UNIX_EPOCH,
            end_time: UNIX_EPOCH,
            attributes: request.map(|id| KeyValue::new("id", id.to_owned())).into_iter().collect(),
            dropped_attributes_count: 0,
            events: Default::default(),
            links: Default::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::default(),
        })
    }

    fn ring(spans_max: usize, bytes_max: usize) -> Ring {
        Ring::new(RingLimits { spans_max, bytes_max })
    }

    fn ids(spans: &[Finished]) -> Vec<u64> {
        spans.iter().map(|s| u64::from_be_bytes(s.span_context.span_id().to_bytes())).collect()
    }

    #[test]
    fn the_oldest_trace_makes_room_as_a_whole() {
        let mut ring = ring(4, usize::MAX);
        for (trace, id) in [(1, 10), (2, 20), (1, 11), (2, 21)] {
            assert!(ring.insert(span(trace, id, true, None)).1.is_empty());
        }
        assert_eq!((ring.spans(), ring.traces()), (4, 2));
        let (_, evicted) = ring.insert(span(3, 30, true, None));
        assert_eq!(ids(&evicted), [10, 11]);
        assert_eq!((ring.spans(), ring.traces()), (3, 2));
        assert!(ring.spans_of(TraceId::from(1)).is_empty());
        assert_eq!(ids(&ring.spans_of(TraceId::from(2))), [20, 21]);
    }

    #[test]
    fn bytes_are_bounded_with_the_text_of_attributes() {
        let long = "x".repeat(3_000);
        let mut ring = ring(usize::MAX, 10_000);
        for trace in 1..=20 {
            ring.insert(span(trace, 1, true, Some(&long)));
            assert!(ring.bytes() <= 10_000, "{}", ring.bytes());
        }
        assert_eq!(ring.traces(), 2, "a third span of 3,000 bytes and its own size would be too much");
        // Verdicts on traces without spans are bounded as well.
        (100..1_000).for_each(|trace| drop(ring.keep(TraceId::from(trace as u128))));
        assert!(ring.bytes() <= 10_000 && ring.spans() == 0, "{ring:?}");
    }

    #[test]
    fn bytes_are_bounded_with_what_a_caller_adds_to_its_trace() {
        let state = TraceState::from_key_value((0..20).map(|i| (format!("key{i}"), "x".repeat(250)))).unwrap();
        let mut ring = ring(usize::MAX, 19_000);
        for trace in 1..=20 {
            let mut span = Arc::unwrap_or_clone(span(trace, 1, true, None));
            let of = &span.span_context;
            span.span_context = SpanContext::new(of.trace_id(), of.span_id(), of.trace_flags(), true, state.clone());
            ring.insert(Arc::new(span));
        }
        assert_eq!(ring.traces(), 2, "a third span with over 6,000 bytes of trace state would be too much");
    }

    #[test]
    fn one_trace_holds_so_many_spans_and_no_more() {
        let mut ring = ring(usize::MAX, usize::MAX);
        let spans = TRACE_SPANS_MAX as u64;
        let evicted: Vec<_> = (0..spans + 5).flat_map(|id| ring.insert(span(1, id, true, None)).1).collect();
        assert_eq!(ids(&evicted), (spans..spans + 5).collect::<Vec<_>>());
        assert_eq!(ring.spans(), TRACE_SPANS_MAX);
    }

    #[test]
    fn a_kept_trace_gives_each_span_once_and_none_that_was_chosen_before() {
        let mut ring = ring(10, usize::MAX);
        assert!(!ring.insert(span(1, 10, false, None)).0);
        ring.insert(span(1, 11, true, None));
        ring.insert(span(2, 20, false, None));
        let one = TraceId::from(1);
        assert_eq!(ids(&ring.keep(one).0), [10]);
        assert!(ring.keep(one).0.is_empty(), "a second verdict exports nothing again");
        assert!(ring.insert(span(1, 12, false, None)).0, "what ends later is kept too");
        assert!(!ring.insert(span(2, 21, false, None)).0);
        // A verdict may arrive before the first span.
        assert!(ring.keep(TraceId::from(3)).0.is_empty());
        assert!(ring.insert(span(3, 30, false, None)).0);
    }

    #[test]
    fn the_newest_of_one_name_is_found() {
        let mut ring = ring(10, usize::MAX);
        for (trace, request) in [(1, "a"), (2, "b"), (3, "a")] {
            ring.insert(span(trace, 1, false, Some(request)));
        }
        assert_eq!(ring.trace_with("id", "a"), Some(TraceId::from(3)));
        assert_eq!(ring.trace_with("id", "b"), Some(TraceId::from(2)));
        assert_eq!(ring.trace_with("id", "c"), None);
        assert_eq!(ring.trace_with("other", "a"), None);
        ring.insert(span(4, 1, false, None));
        assert_eq!(ring.traces_with("id", 2), [3, 2].map(TraceId::from));
        assert_eq!(ring.traces_with("other", 2), []);
    }

    #[test]
    fn a_ring_of_nothing_holds_nothing() {
        let mut ring = ring(0, usize::MAX);
        assert_eq!(ring.insert(span(1, 1, false, None)).1.len(), 1);
        ring.keep(TraceId::from(1));
        assert_eq!((ring.spans(), ring.traces(), ring.bytes()), (0, 0, 0));
    }
}
