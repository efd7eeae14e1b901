//! One admitted request: what all its samples share.

use crate::metrics::RequestMetrics;
use crate::request::PrefillPolicy;
use crate::workers::{ServedModel, WorkerHandle};
use baton_kv_cache::PrefixHash;
use baton_text::StopMatcher;
use baton_types::{CacheUse, RequestId, SamplingParams, TenantId, TokenId};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tracing::Span;

/// A request with its tokens.
pub(super) struct Job {
    pub(super) id: RequestId,
    pub(super) tenant: TenantId,
    pub(super) model: Arc<ServedModel>,
    pub(super) tokens: Arc<[TokenId]>,
    /// How it uses prefix caches; `None` shares nothing.
    pub(super) cache: Option<CacheUse>,
    /// What could be cached of its prompt.
    pub(super) names: Arc<[PrefixHash]>,
    pub(super) sampling: SamplingParams,
    pub(super) stops: StopMatcher,
    pub(super) policy: PrefillPolicy,
    pub(super) priority: i32,
    pub(super) received: Instant,
    pub(super) deadline: Instant,
    pub(super) span: Span,
    pub(super) metrics: RequestMetrics,
    /// Whether the first token of any sample left.
    started: AtomicBool,
    /// Whether a place was looked for.
    looked: AtomicBool,
    /// Workers that were asked, in order.
    asked: Mutex<Vec<Arc<WorkerHandle>>>,
}

/// What [`Job::new`] takes besides what is in the request.
pub(super) struct Prepared {
    pub(super) model: Arc<ServedModel>,
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) cache: Option<CacheUse>,
    pub(super) names: Arc<[PrefixHash]>,
    pub(super) sampling: SamplingParams,
    pub(super) stops: StopMatcher,
    pub(super) metrics: RequestMetrics,
    pub(super) span: Span,
}

impl Job {
    pub(super) fn new(request: &crate::request::GenerationRequest, policy: PrefillPolicy, prepared: Prepared) -> Self {
        let Prepared { model, tokens, cache, names, sampling, stops, metrics, span } = prepared;
        let (id, tenant, priority) = (request.id.clone(), request.tenant.clone(), request.priority);
        let (received, deadline) = (request.received, request.deadline);
        Self {
            id,
            tenant,
            model,
            tokens,
            cache,
            names,
            sampling,
            stops,
            policy,
            priority,
            received,
            deadline,
            span,
            metrics,
            started: AtomicBool::new(false),
            looked: AtomicBool::new(false),
            asked: Mutex::default(),
        }
    }

    /// Remembers a worker that is asked: it holds a part of the trace. Attempts are bounded, so these are.
    pub(super) fn asks(&self, worker: &Arc<WorkerHandle>) {
        self.asked.lock().push(worker.clone());
    }

    /// Workers that were asked.
    pub(super) fn asked(&self) -> Vec<Arc<WorkerHandle>> {
        self.asked.lock().clone()
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
