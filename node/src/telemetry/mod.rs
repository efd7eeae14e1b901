//! Logs and traces of a process.
//!
//! Spans of Baton's own crates become OpenTelemetry spans, whether or not a collector is configured: a response can
//! always carry its trace id. Exporting never blocks and never fails a request; lost spans are counted
//! ([`ExportCounters`]). Spans of recent requests are also stored ([`Traces`]), whether exported or not. Log lines
//! include the fields of their spans; [`log_span`] adds the request and its trace to every line within it. A callsite
//! that logs too often is rate-limited, and the log reports it.

mod config;
mod export;
mod log;
mod propagation;
mod rate_limit;
mod recorder;
mod ring;
mod sampler;

#[cfg(test)]
mod tests;

pub use config::{LogFormat, TelemetryConfig};
pub use export::ExportCounters;
pub use log::log_span;
pub use opentelemetry::trace::TraceId;
pub use propagation::{
    head_of, inject, inject_call, inject_http, parent_of, request_of, set_parent, set_parent_http, trace_id_of,
};
pub use recorder::Traces;

use crate::identity::TrustError;
use export::Exporter;
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use rate_limit::{RateLimit, RateLimitWatch};
use recorder::Recorder;
use ring::RingLimits;
use sampler::HeadSampler;
use std::io::IsTerminal as _;
use std::time::Duration;
use tracing::{Dispatch, Level, Metadata};
use tracing_subscriber::filter::{EnvFilter, FilterExt, filter_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};

/// Why telemetry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log filter cannot be parsed.
    #[error("telemetry.log: {0:?} is not a log filter; write e.g. \"info\" or \"info,baton_router=debug\"")]
    Filter(String),
    /// The collector's address cannot be used.
    #[error("telemetry.otlp_url: cannot export to {url:?}: {problem}")]
    Otlp {
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The certificate of an `https://` collector could not be verified.
    #[error("telemetry.otlp_ca_file: {0}")]
    Trust(TrustError),
    /// The exporter's thread cannot be started.
    #[error("cannot start the telemetry thread")]
    Thread(#[from] std::io::Error),
    /// `init` was called twice.
    #[error("telemetry is already initialized")]
    Twice,
}

/// Keeps telemetry alive. Dropping it flushes spans for at most `flush_ms_max`.
#[must_use = "dropping the guard ends the export of traces"]
#[derive(Debug)]
pub struct TelemetryGuard {
    provider: SdkTracerProvider,
    exporter: Option<Exporter>,
    traces: Traces,
    counters: ExportCounters,
    flush: Duration,
    _rate_limit: RateLimitWatch,
}

impl TelemetryGuard {
    /// Recent traces of this process.
    pub fn traces(&self) -> Traces {
        self.traces.clone()
    }

    /// Spans exported, held and lost, for `/metrics`.
    pub fn counters(&self) -> ExportCounters {
        self.counters.clone()
    }

    /// Records spans whose times are known only after they end; see [`parent_of`] for their parent.
    pub fn tracer(&self) -> SdkTracer {
        self.provider.tracer("baton")
    }

    /// Waits until all spans that ended so far were exported or counted as lost; `false` if that took too long. It
    /// blocks the calling thread, so call it where nothing else runs: at the end of main, or in tests from
    /// `spawn_blocking`.
    pub fn flush(&self, within: Duration) -> bool {
        self.exporter.as_ref().is_none_or(|exporter| exporter.flush(within))
    }
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        self.flush(self.flush);
        // Nothing is left to flush here: the processor's own shutdown returns at once.
        let _ = self.provider.shutdown();
    }
}

/// Starts telemetry for this process; `service_name` is e.g. `baton-router`.
pub fn init(service_name: &'static str, config: &TelemetryConfig) -> Result<TelemetryGuard, TelemetryError> {
    let (dispatch, guard) = build(service_name, config)?;
    tracing::dispatcher::set_global_default(dispatch).map_err(|_| TelemetryError::Twice)?;
    Ok(guard)
}

/// Like [`init`], without installing it globally: for tests that run several services in one process.
pub fn build(
    service_name: &'static str,
    config: &TelemetryConfig,
) -> Result<(Dispatch, TelemetryGuard), TelemetryError> {
    let mut filter = config.log.clone();
    if !filter.contains("opentelemetry") {
        // The SDK's exporter logs each lost batch; ours logs once per outage.
        filter.push_str(",opentelemetry=off");
    }
    let filter = EnvFilter::try_new(filter).map_err(|_| TelemetryError::Filter(config.log.clone()))?;
    // Our spans pass any filter, so that a warning still names its request.
    let rate_limit = RateLimit::new();
    let shown = filter.or(filter_fn(is_own_span)).and(rate_limit.clone());
    let logs = match config.log_format {
        LogFormat::Pretty => {
            // Colours are for terminals; files and pipes get plain text.
            let layer = tracing_subscriber::fmt::layer().with_ansi(std::io::stderr().is_terminal());
            layer.with_writer(std::io::stderr).with_filter(shown).boxed()
        }
        LogFormat::Json => {
            tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr).with_filter(shown).boxed()
        }
    };

    // The SDK also honours OTEL_RESOURCE_ATTRIBUTES, as every OpenTelemetry process does.
    let resource = Resource::builder().with_service_name(service_name).with_attributes([
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("host.name", crate::id::hostname()),
    ]);
    let counters = ExportCounters::default();
    let (mut exporter, mut queue) = (None, None);
    if let Some(url) = &config.otlp_url {
        let (started, its_queue) = Exporter::start(url, config, counters.clone())?;
        (exporter, queue) = (Some(started), Some(its_queue));
    }
    let bytes_max = usize::try_from(config.ring_bytes_max.0).unwrap_or(usize::MAX);
    let limits = RingLimits { spans_max: config.ring_spans_max, bytes_max };
    let traces = Traces::new(limits, queue, counters.clone());
    let sampler = HeadSampler::new(config.trace_sample_ratio, config.ring_spans_max > 0);
    let provider = SdkTracerProvider::builder().with_resource(resource.build()).with_sampler(sampler);
    let provider = provider.with_span_processor(Recorder(traces.clone())).build();
    let layer = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("baton"))
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        // No code here asks OpenTelemetry for the current span, and the poll times of a future are not phases of a
        // request.
        .with_context_activation(false)
        .with_tracked_inactivity(false)
        .with_filter(filter_fn(is_phase));
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer).with(logs));
    let flush = Duration::from_millis(config.flush_ms_max);
    let rate_limit = rate_limit.watch(&dispatch)?;
    Ok((dispatch, TelemetryGuard { provider, exporter, traces, counters, flush, _rate_limit: rate_limit }))
}

/// Spans of libraries (HTTP/2 frames, connections) are not phases of a request.
fn is_own(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("baton")
}

/// Spans and events that belong in traces.
fn is_phase(metadata: &Metadata<'_>) -> bool {
    is_own(metadata) && metadata.target() != log::LOG_ONLY && *metadata.level() <= Level::INFO
}

fn is_own_span(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && is_own(metadata) && *metadata.level() <= Level::INFO
}
