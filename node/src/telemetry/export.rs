//! Export of ended spans: a bounded queue, and a separate thread that sends batches.
//!
//! The SDK's batch processor does not report how many spans it dropped, so this module has its own queue. The thread
//! has its own runtime: neither a busy nor an ending runtime of the process delays it, and a flush may block without a
//! deadlock.

use super::ring::Finished;
use super::{TelemetryConfig, TelemetryError};
use crate::identity::client_tls;
use opentelemetry_otlp::{SpanExporter as OtlpExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

/// Counts of what happened to ended spans.
#[derive(Clone, Debug, Default)]
pub struct ExportCounters {
    /// Sent to the collector.
    pub exported: Counter,
    /// Lost because the queue was full.
    pub lost_queue_full: Counter,
    /// Lost because the collector did not accept them.
    pub lost_export_failed: Counter,
    /// Evicted from the ring of recent traces.
    pub evicted: Counter,
    /// In the ring now.
    pub held: Gauge,
    /// Estimated memory of those.
    pub held_bytes: Gauge,
}

enum Item {
    Span(Finished),
    Flush(std::sync::mpsc::SyncSender<()>),
}

/// The sending end of the queue.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    items: mpsc::Sender<Item>,
    counters: ExportCounters,
    resource: Arc<Mutex<Option<Resource>>>,
}

impl Queue {
    /// Queues a span, or counts it as lost.
    pub(super) fn push(&self, span: Finished) {
        if self.items.try_send(Item::Span(span)).is_err() {
            self.counters.lost_queue_full.inc();
        }
    }

    /// Sets the description of the process for the collector.
    pub(super) fn set_resource(&self, resource: &Resource) {
        if let Ok(mut slot) = self.resource.lock() {
            *slot = Some(resource.clone());
        }
    }
}

/// A handle of the exporting thread.
#[derive(Debug)]
pub(super) struct Exporter(Queue);

impl Exporter {
    /// Starts the thread. The connection is opened at first use, and again after it breaks.
    pub(super) fn start(
        url: &str,
        config: &TelemetryConfig,
        counters: ExportCounters,
    ) -> Result<(Self, Queue), TelemetryError> {
        let secure = url.starts_with("https://");
        let tls =
            secure.then(|| client_tls(config.otlp_ca_file.as_deref())).transpose().map_err(TelemetryError::Trust)?;
        let (items, receiver) = mpsc::channel(config.queue_spans_max);
        let queue = Queue { items, counters: counters.clone(), resource: Default::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let export = Duration::from_millis(config.export_ms_max);
        let entered = runtime.enter(); // The lazy connection wants a runtime.
        let mut builder = OtlpExporter::builder().with_tonic().with_endpoint(url).with_timeout(export);
        if let Some(tls) = tls {
            builder = builder.with_tls_config(tls);
        }
        let built = builder.build();
        drop(entered);
        let exporter = match built {
            Ok(exporter) => exporter,
            Err(error) => {
                // A plain drop would block, which asynchronous callers must not.
                runtime.shutdown_background();
                return Err(TelemetryError::Otlp { url: url.into(), problem: error.to_string() });
            }
        };
        let sender = Sender {
            exporter,
            resource: queue.resource.clone(),
            counters,
            batch_max: config.batch_spans_max,
            linger: Duration::from_millis(config.batch_ms_max),
            export,
            failing: false,
        };
        std::thread::Builder::new()
            .name("baton-telemetry".into())
            .spawn(move || runtime.block_on(sender.run(receiver)))?;
        Ok((Self(queue.clone()), queue))
    }

    /// Exports what is queued; `false` if it took longer than `within`.
    pub(super) fn flush(&self, within: Duration) -> bool {
        let (done, flushed) = std::sync::mpsc::sync_channel(1);
        let deadline = std::time::Instant::now() + within;
        let mut item = Item::Flush(done);
        // A full queue has room again within one export; there is nothing to do meanwhile.
        while let Err(mpsc::error::TrySendError::Full(back)) = self.0.items.try_send(item) {
            if std::time::Instant::now() >= deadline {
                return false;
            }
            item = back;
            std::thread::sleep(Duration::from_millis(5));
        }
        flushed.recv_timeout(deadline.saturating_duration_since(std::time::Instant::now())).is_ok()
    }
}

struct Sender {
    exporter: OtlpExporter,
    resource: Arc<Mutex<Option<Resource>>>,
    counters: ExportCounters,
    batch_max: usize,
    linger: Duration,
    export: Duration,
    failing: bool,
}

impl Sender {
    /// Ends when the last [`Queue`] is gone.
    async fn run(mut self, mut items: mpsc::Receiver<Item>) {
        while let Some(first) = items.recv().await {
            if let Ok(mut slot) = self.resource.lock()
                && let Some(resource) = slot.take()
            {
                self.exporter.set_resource(&resource);
            }
            let mut batch = Vec::new();
            let mut flush = None;
            let full_at = Instant::now() + self.linger;
            let mut next = Some(first);
            while let Some(item) = next.take() {
                match item {
                    Item::Span(span) => batch.push(Arc::unwrap_or_clone(span)),
                    Item::Flush(done) => flush = Some(done),
                }
                if flush.is_none() && batch.len() < self.batch_max {
                    next = timeout_at(full_at, items.recv()).await.ok().flatten();
                }
            }
            self.send(batch).await;
            if let Some(done) = flush {
                let _ = done.send(());
            }
        }
    }

    async fn send(&mut self, batch: Vec<SpanData>) {
        let spans = batch.len() as u64;
        if spans == 0 {
            return;
        }
        let problem = match timeout(self.export, self.exporter.export(batch)).await {
            Ok(Ok(())) => {
                self.counters.exported.inc_by(spans);
                self.failing = false;
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} ms", self.export.as_millis()),
        };
        self.counters.lost_export_failed.inc_by(spans);
        // Once per outage: the counter shows the rest.
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(problem, "cannot export traces; spans are lost until the collector answers");
        }
    }
}
