//! One running request: the state that all its samples share.

use super::prepare::Prepared;
use crate::metrics::RequestMetrics;
use crate::workers::WorkerHandle;
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::Span;

/// A prepared request, and its progress.
pub(super) struct Job {
    request: Arc<Prepared>,
    pub(super) span: Span,
    pub(super) metrics: RequestMetrics,
    /// Whether the first token of any sample was sent.
    started: AtomicBool,
    /// Whether placement has been tried.
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

    /// Records a worker that is called, since it holds a part of the trace. Attempts are bounded, so this list is.
    pub(super) fn calls(&self, worker: &Arc<WorkerHandle>) {
        self.called.lock().push(worker.clone());
    }

    /// Workers that were called.
    pub(super) fn called(&self) -> Vec<Arc<WorkerHandle>> {
        self.called.lock().clone()
    }

    /// Whether this is the first placement of the request.
    pub(super) fn is_first_look(&self) -> bool {
        !self.looked.swap(true, Ordering::Relaxed)
    }

    /// Whether this is the first token sent of the request.
    pub(super) fn starts(&self) -> bool {
        !self.started.swap(true, Ordering::Relaxed)
    }
}
