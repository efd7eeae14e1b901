//! The end of a request's trace: whether tail sampling exports it although head sampling did not, which workers must be
//! notified, and where to find its spans.

mod tell;
mod verdict;

pub(crate) use tell::deliver;

use crate::workers::WorkerHandle;
use baton_node::telemetry::{TelemetryConfig, TraceId, Traces, head_of};
use baton_types::ErrorKind;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::Duration;
use tell::Verdict;
use tokio::sync::mpsc;
use tracing::Span;
use verdict::{Kept, TailPolicy};

/// Verdicts queued for workers; further ones are dropped and counted.
const VERDICTS_MAX: usize = 4096;

/// Counts of verdicts.
#[derive(Clone, Debug, Default)]
pub(crate) struct TailMetrics {
    kept_errors: Counter,
    kept_slow: Counter,
    lost: Counter,
}

impl TailMetrics {
    /// Registers `baton_router_traces_kept_{errors,slow}_total` and `baton_router_trace_verdicts_lost_total`.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Traces exported for their failed request, which the sampling had left out";
        registry.register("router_traces_kept_errors", help, metrics.kept_errors.clone());
        let help = "Traces exported for their slow request, which the sampling had left out";
        registry.register("router_traces_kept_slow", help, metrics.kept_slow.clone());
        let help = "Requests to workers to export a trace that did not arrive: their spans of it are missing";
        registry.register("router_trace_verdicts_lost", help, metrics.lost.clone());
        metrics
    }
}

/// How a request ended, for the verdict.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) failed: Option<ErrorKind>,
    /// Time since its arrival.
    pub(crate) took: Duration,
    /// Time from its arrival to its first token; `None` without a token.
    pub(crate) first_token: Option<Duration>,
}

/// Makes verdicts and distributes them.
#[derive(Debug)]
pub(crate) struct Tail {
    policy: TailPolicy,
    traces: Traces,
    verdicts: mpsc::Sender<Verdict>,
    metrics: TailMetrics,
}

impl Tail {
    /// A tail sampler, and the input of [`deliver`].
    pub(crate) fn new(
        config: &TelemetryConfig,
        traces: Traces,
        metrics: TailMetrics,
    ) -> (Self, mpsc::Receiver<Verdict>) {
        let (verdicts, receiver) = mpsc::channel(VERDICTS_MAX);
        (Self { policy: TailPolicy::new(config), traces, verdicts, metrics }, receiver)
    }

    /// Marks the span of a request that ends, and exports its trace if the verdict is to keep it. Never waits.
    pub(crate) fn ended(&self, span: &Span, end: End, workers: &[Arc<WorkerHandle>]) {
        let slow = self.policy.is_slow(&end);
        if slow {
            span.record("baton.slow", true);
        }
        let Some(kept) = self.policy.keeps(&end) else { return };
        // Traces chosen by head sampling are exported in any case.
        let Some((trace, false)) = head_of(span) else { return };
        match kept {
            Kept::Error => self.metrics.kept_errors.inc(),
            Kept::Slow => self.metrics.kept_slow.inc(),
        };
        self.keep(trace, workers);
    }

    fn keep(&self, trace: TraceId, workers: &[Arc<WorkerHandle>]) {
        self.traces.keep(trace);
        for (index, worker) in workers.iter().enumerate() {
            let is_told = workers[..index].iter().any(|told| told.party() == worker.party());
            if !is_told && self.verdicts.try_send(Verdict { trace, worker: worker.clone() }).is_err() {
                self.metrics.lost.inc();
            }
        }
    }

    /// What [`deliver`] counts as lost.
    pub(crate) fn lost(&self) -> Counter {
        self.metrics.lost.clone()
    }
}
