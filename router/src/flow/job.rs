//! One running request: the state that all its samples share.

use super::prepare::Prepared;
use crate::metrics::RequestMetrics;
use crate::workers::WorkerHandle;
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::SetOnce;
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
    /// Of each prompt, whether its first sample has its first token.
    begun: Vec<SetOnce<()>>,
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
        let begun = request.prompts.iter().map(|_| SetOnce::new()).collect();
        Self { request, span, metrics, started, looked, begun, called: Mutex::default() }
    }

    /// Records a worker that is called, since it holds a part of the trace. Attempts are bounded, so this list is.
    pub(super) fn calls(&self, worker: &Arc<WorkerHandle>) {
        self.called.lock().push(worker.clone());
    }

    /// Workers that were called.
    pub(super) fn called(&self) -> Vec<Arc<WorkerHandle>> {
        self.called.lock().clone()
    }

    /// The first sample of a prompt has its first token.
    pub(super) fn has_begun(&self, prompt: usize) {
        // Later attempts say it again.
        let _ = self.begun[prompt].set(());
    }

    /// Waits for that.
    pub(super) async fn begun(&self, prompt: usize) {
        self.begun[prompt].wait().await;
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
