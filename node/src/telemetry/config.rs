//! The section `telemetry`.

use crate::config::{ByteSize, Check, Checker};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for human readers.
    #[default]
    Pretty,
    /// One JSON object per line.
    Json,
}

/// Settings in the section `telemetry`: logs and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// Filter of log lines, in the syntax of `RUST_LOG`.
    pub log: String,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// OTLP collector (gRPC), e.g. `http://localhost:4317`, or `https://` for one with a certificate. Without it no
    /// traces are exported.
    pub otlp_url: Option<String>,
    /// PEM file of the authorities that sign the collector's certificate, read at start; by default those that the host
    /// trusts.
    pub otlp_ca_file: Option<PathBuf>,
    /// Share of new traces that are exported, 0 to 1; a request that arrives with a trace follows the sampling decision
    /// of that trace.
    pub trace_sample_ratio: f64,
    /// Whether failed requests are exported independent of the share. Routers decide, and notify the workers.
    pub keep_errors: bool,
    /// The same for slow requests.
    pub keep_slow: bool,
    /// A request is slow if its first token took longer than this.
    pub slow_first_token_ms: u64,
    /// A request is slow if it took longer than this from its arrival to its end.
    pub slow_ms: u64,
    /// Most ended spans that are stored for `baton trace` and for tail sampling; 0 stores none. The oldest trace is
    /// evicted first.
    pub ring_spans_max: usize,
    /// Most memory of those, estimated.
    pub ring_bytes_max: ByteSize,
    /// Most ended spans that wait for export; further ones are dropped and counted.
    pub queue_spans_max: usize,
    /// Most spans sent at once.
    pub batch_spans_max: usize,
    /// Longest wait before an incomplete batch is sent.
    pub batch_ms_max: u64,
    /// Longest export of one batch; after it the batch is dropped and counted.
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
            // Longer than a prompt of about ten thousand tokens takes on an idle device: the request was queued.
            slow_first_token_ms: 5_000,
            // Longer than an answer of a thousand tokens takes at reading speed.
            slow_ms: 60_000,
            // Spans of about a thousand requests: the last minutes of a busy process.
            ring_spans_max: 8192,
            ring_bytes_max: ByteSize(8 << 20),
            // About ten spans per request: room for a few hundred requests that end while the collector is slow.
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
        // A configured authority is meant to be verified; over http:// no certificate would be.
        let asked = self.otlp_url.as_ref().is_none_or(|url| url.starts_with("https://"));
        at.require("otlp_ca_file", asked || self.otlp_ca_file.is_none(), "unset where telemetry.otlp_url is http://");
    }
}
