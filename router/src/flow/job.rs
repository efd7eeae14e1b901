//! One request that runs: what all its samples share.

use super::prepare::Prepared;
use crate::metrics::RequestMetrics;
use crate::workers::WorkerHandle;
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::Span;

/// A prepared request, and what becomes of it.
pub(super) struct Job {
    request: Arc<Prepared>,
    pub(super) span: Span,
    pub(super) metrics: RequestMetrics,
    /// Whether the first token of any sample left.
    started: AtomicBool,
    /// Whether a place was looked for.
    looked: AtomicBool,
    /// Workers that were called, in order.
    called: Mutex<Vec<Arc<WorkerHandle>>>,
}

impl Deref for Job {
    type Target = Prepared;

    fn deref(&self) -> &Prepared {
        &self.request
    }
}

impl Job {
    pub(super) fn new(request: Arc<Prepared>, span: Span, metrics: RequestMetrics) -> Self {
        let (started, looked) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { request, span, metrics, started, looked, called: Mutex::default() }
    }

    /// Remembers a worker that is called: it holds a part of the trace. Attempts are bounded, so these are.
    pub(super) fn calls(&self, worker: &Arc<WorkerHandle>) {
        self.called.lock().push(worker.clone());
    }

    /// Workers that were called.
    pub(super) fn called(&self) -> Vec<Arc<WorkerHandle>> {
        self.called.lock().clone()
    }

    /// Whether this is the first time that a place is looked for.
    pub(super) fn is_first_look(&self) -> bool {
        !self.looked.swap(true, Ordering::Relaxed)
    }

    /// Whether this is the first time that a token of the request leaves.
    pub(super) fn starts(&self) -> bool {
        !self.started.swap(true, Ordering::Relaxed)
    }
}
