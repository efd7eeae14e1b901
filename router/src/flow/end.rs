//! What is recorded when a request ends.

use super::core::Core;
use super::job::Job;
use crate::output::Finished;
use crate::prices::Cost;
use crate::traces::End;
use baton_types::{ErrorKind, PhaseTimings, RequestError, Usage};
use std::time::{Duration, Instant};

/// All samples of a request together.
pub(super) struct Summary<'a> {
    pub(super) usage: Usage,
    pub(super) cost: Option<&'a Cost>,
    /// How long the first of them was queued.
    pub(super) queued: Duration,
    /// When the first token of any sample was sent.
    pub(super) first_token: Option<Instant>,
    pub(super) moved: Option<Moved>,
}

/// KV that moved for a request, all samples together: their bytes, and the longest times.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moved {
    bytes: u64,
    transfer_us: u64,
    exposed_us: u64,
}

impl Moved {
    /// `None` if no KV moved.
    pub(super) fn of_all<'a>(timings: impl Iterator<Item = &'a PhaseTimings>) -> Option<Self> {
        let moved = timings.fold(Self::default(), |all, of| Self {
            bytes: all.bytes.saturating_add(of.transfer_bytes.unwrap_or(0)),
            transfer_us: all.transfer_us.max(of.transfer_us.unwrap_or(0)),
            exposed_us: all.exposed_us.max(of.exposed_us.unwrap_or(0)),
        });
        (moved.bytes > 0).then_some(moved)
    }
}

/// Records metrics, span, trace and log line of one request.
pub(super) fn record(core: &Core, job: &Job, result: &Result<Finished, RequestError>, summary: &Summary<'_>) {
    let Summary { usage, cost, queued, first_token, moved } = summary;
    let (span, now) = (&job.span, core.runtime.now());
    let took = now.saturating_duration_since(job.received);
    span.record("gen_ai.usage.input_tokens", usage.prompt_tokens);
    span.record("gen_ai.usage.output_tokens", usage.completion_tokens);
    span.record("baton.cached_tokens", usage.cached_tokens);
    span.record("baton.cache_write_tokens", usage.cache_write_tokens);
    span.record("baton.recomputed_tokens", usage.recomputed_tokens);
    span.record("baton.queue_ms", queued.as_secs_f64() * 1e3);
    if let Some(first) = *first_token {
        span.record("baton.ttft_ms", (first - job.received).as_secs_f64() * 1e3);
    }
    if let Some(moved) = moved {
        span.record("baton.kv.bytes", moved.bytes);
        span.record("baton.kv.transfer_ms", moved.transfer_us as f64 / 1e3);
        span.record("baton.kv.exposed_ms", moved.exposed_us as f64 / 1e3);
    }
    let end = End {
        failed: result.as_ref().err().map(|error| error.kind),
        took,
        first_token: first_token.map(|first| first - job.received),
    };
    core.tail.ended(span, end, &job.called());
    job.metrics.ended(usage, result.as_ref().map(Finished::reason_name).map_err(|error| error.kind), took, now);
    if first_token.is_some() {
        core.cache_metrics.ended(&job.model.card.id, &job.tenant, usage, *cost, now);
    }
    match result {
        Ok(finished) => {
            span.record("gen_ai.response.finish_reasons", finished.reason_name());
        }
        Err(error) => {
            failed(span, error);
            if error.kind == ErrorKind::Internal {
                tracing::error!(request = %job.id, tenant = %job.tenant, %error, "a request failed");
            } else {
                tracing::debug!(request = %job.id, tenant = %job.tenant, %error, kind = error.kind.name(), "a request ended early");
            }
        }
    }
}

/// Marks a request's span as failed.
pub(super) fn failed(span: &tracing::Span, error: &RequestError) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", error.kind.name());
}
