//! The section `telemetry`.

use crate::config::{ByteSize, Check, Checker};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Pretty,
    /// One JSON object a line.
    Json,
}

/// Logs and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// Filter of log lines, in the syntax of `RUST_LOG`.
    pub log: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// OTLP collector (gRPC), e.g. `http://localhost:4317`, or `https://` for one with a certificate. Traces go nowhere without it.
    pub otlp_url: Option<String>,
    /// PEM file of the authorities that sign the collector's certificate, read at start; by default those that the host trusts.
    pub otlp_ca_file: Option<PathBuf>,
    /// Share of new traces that are exported, 0 to 1; a request that comes with a trace follows its decision.
    pub trace_sample_ratio: f64,
    /// Requests that failed are exported whatever the share. Routers decide, and tell the workers.
    pub keep_errors: bool,
    /// The same for slow requests.
    pub keep_slow: bool,
    /// A request is slow whose first token took longer than this.
    pub slow_first_token_ms: u64,
    /// A request is slow that took longer than this from its arrival to its end.
    pub slow_ms: u64,
    /// Most ended spans that are held for `baton trace` and for what is kept at the end of a request; 0 holds none. The oldest trace
    /// makes room.
    pub ring_spans_max: usize,
    /// Most memory of those, by estimate.
    pub ring_bytes_max: ByteSize,
    /// Most ended spans that wait for export; more are lost and counted.
    pub queue_spans_max: usize,
    /// Most spans sent at once.
    pub batch_spans_max: usize,
    /// Longest wait before an incomplete batch is sent.
    pub batch_ms_max: u64,
    /// Longest export of one batch; then it is lost and counted.
    pub export_ms_max: u64,
    /// Longest flush at the end of the process.
    pub flush_ms_max: u64,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            log: "info".into(),
            log_format: LogFormat::Pretty,
            otlp_url: None,
            otlp_ca_file: None,
            trace_sample_ratio: 1.0,
            keep_errors: true,
            keep_slow: true,
            // Longer than a prompt of some ten thousand tokens takes on a device of its own: there was a queue.
            slow_first_token_ms: 5_000,
            // Longer than an answer of a thousand tokens takes at reading speed.
            slow_ms: 60_000,
            // Some thousand requests: the last minutes of a busy process.
            ring_spans_max: 8192,
            ring_bytes_max: ByteSize(8 << 20),
            // About ten spans a request: room for some hundred requests that end while the collector is slow.
            queue_spans_max: 8192,
            batch_spans_max: 512,
            batch_ms_max: 500,
            export_ms_max: 5_000,
            flush_ms_max: 2_000,
        }
    }
}

impl Check for TelemetryConfig {
    fn check(&self, at: &mut Checker) {
        at.range("trace_sample_ratio", self.trace_sample_ratio, 0.0..=1.0)
            .range("slow_first_token_ms", self.slow_first_token_ms, 1..=86_400_000)
            .range("slow_ms", self.slow_ms, 1..=86_400_000)
            .range("ring_spans_max", self.ring_spans_max, 0..=1 << 20)
            .range("ring_bytes_max", self.ring_bytes_max.0, 1 << 16..=1 << 30)
            .range("queue_spans_max", self.queue_spans_max, 1..=1 << 20)
            .range("batch_spans_max", self.batch_spans_max, 1..=8192)
            .range("batch_ms_max", self.batch_ms_max, 1..=60_000)
            .range("export_ms_max", self.export_ms_max, 1..=60_000)
            .range("flush_ms_max", self.flush_ms_max, 0..=60_000);
        if let Some(url) = &self.otlp_url {
            let ok = url.starts_with("http://") || url.starts_with("https://");
            at.require("otlp_url", ok, "a URL that starts with http:// or https://");
        }
        // Whoever names an authority wants it asked: over http:// nobody would be.
        let asked = self.otlp_url.as_ref().is_none_or(|url| url.starts_with("https://"));
        at.require("otlp_ca_file", asked || self.otlp_ca_file.is_none(), "unset where telemetry.otlp_url is http://");
    }
}
