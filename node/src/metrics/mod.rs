//! The metrics registry of a process, and the metrics of every process.
//!
//! Names are `baton_*`, units last; labels are bounded.

mod text;

use crate::admin::Health;
use crate::telemetry::ExportCounters;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A shared registry. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Mutex<Registries>>);

#[derive(Debug)]
struct Registries {
    /// Names get the prefix `baton_`.
    own: Registry,
    /// Names of other projects, whole.
    foreign: Registry,
}

impl Metrics {
    /// A registry with the metrics of every process: `baton_build_info` and `baton_process_start_time_seconds`.
    pub fn new(service: &'static str) -> Self {
        let mut registry = Registry::with_prefix("baton");
        let build = Info::new(vec![("service", service), ("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "What is running", build);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        registry.register(
            "process_start_time_seconds",
            "Start of the process, seconds since 1970",
            ConstGauge::new(started),
        );
        Self(Arc::new(Mutex::new(Registries { own: registry, foreign: Registry::default() })))
    }

    /// Registers metrics; names get the prefix `baton_`.
    pub fn register<T>(&self, with: impl FnOnce(&mut Registry) -> T) -> T {
        with(&mut self.0.lock().own)
    }

    /// Registers metrics whose names get no prefix: those of other projects that readers know.
    pub fn register_as_named<T>(&self, with: impl FnOnce(&mut Registry) -> T) -> T {
        with(&mut self.0.lock().foreign)
    }

    /// A new counter `baton_{name}_total`.
    pub fn counter(&self, name: &str, help: &str) -> Counter {
        let counter = Counter::default();
        self.0.lock().own.register(name, help, counter.clone());
        counter
    }

    /// A new gauge `baton_{name}`.
    pub fn gauge(&self, name: &str, help: &str) -> Gauge {
        let gauge = Gauge::default();
        self.0.lock().own.register(name, help, gauge.clone());
        gauge
    }

    /// Registers the counters of trace spans: `baton_spans_exported_total` and `baton_spans_lost_total{reason}`; for
    /// spans in the ring also `baton_spans_held`, `baton_spans_held_bytes` and `baton_spans_evicted_total`.
    pub fn register_export(&self, counters: &ExportCounters) {
        let registry = &mut self.0.lock().own;
        registry.register("spans_exported", "Trace spans sent to the collector", counters.exported.clone());
        registry.register("spans_held", "Trace spans of recent requests in memory", counters.held.clone());
        registry.register("spans_held_bytes", "Memory of those, by estimate", counters.held_bytes.clone());
        registry.register("spans_evicted", "Trace spans that made room in memory", counters.evicted.clone());
        let lost = [("queue_full", &counters.lost_queue_full), ("export_failed", &counters.lost_export_failed)];
        registry.register_collector(Box::new(LostSpans(lost.map(|(reason, counter)| (reason, counter.clone())))));
    }

    /// Registers the results of the probes: `baton_live` and `baton_ready`, 0 or 1.
    pub fn register_health(&self, health: &Health) {
        self.0.lock().own.register_collector(Box::new(Probes(health.clone())));
    }

    /// All metrics, in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing into a String cannot fail.
        let registries = self.0.lock();
        let _ = encode_registry(&mut text, &registries.own);
        let _ = encode_registry(&mut text, &registries.foreign);
        let _ = encode_eof(&mut text);
        text
    }

    /// All metrics, and their content type: OpenMetrics if `accept` names it, else Prometheus' older text format.
    pub fn encode_for(&self, accept: &str) -> (&'static str, String) {
        let text = self.encode();
        if text::is_open_metrics(accept) { (text::OPEN_METRICS, text) } else { (text::PLAIN, text::plain(&text)) }
    }
}

/// The probes, evaluated at each scrape.
#[derive(Debug)]
struct Probes(Health);

impl Collector for Probes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let answers = [
            ("live", "1 while /healthz says that a restart would not help", self.0.is_live()),
            ("ready", "1 while /readyz says that a request would be served", self.0.is_ready()),
        ];
        answers.into_iter().try_for_each(|(name, help, yes)| {
            ConstGauge::new(i64::from(yes)).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
        })
    }
}

/// Counters that are older than the registry, exported as one family.
#[derive(Debug)]
struct LostSpans([(&'static str, Counter); 2]);

impl Collector for LostSpans {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Trace spans that never reached the collector";
        let mut family = encoder.encode_descriptor("spans_lost", help, None, MetricType::Counter)?;
        for (reason, counter) in &self.0 {
            counter.encode(family.encode_family(&[("reason", *reason)])?)?;
        }
        Ok(())
    }
}
