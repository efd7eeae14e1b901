//! What every request shares.

use super::tokenize::Tokenizing;
use crate::RouterConfig;
use crate::admission::Admission;
use crate::cache::CacheRules;
use crate::metrics::{CacheMetrics, RouterMetrics};
use crate::placement::{Experience, Thresholds};
use crate::prefixes::Prefixes;
use crate::prices::PricesConfig;
use crate::quotas::Quotas;
use crate::recovery::{ProbationLimits, RetryBucket, RetryLimits};
use crate::request::PrefillPolicy;
use crate::traces::Tail;
use crate::workers::WorkerSet;
use baton_node::intake::Intake;
use baton_types::Runtime;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Bounds of every request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Where prompts are prefilled unless the request says otherwise.
    pub(crate) policy: PrefillPolicy,
    /// Thresholds of placement.
    pub(crate) placement: Thresholds,
    /// Retries of one request.
    pub(crate) retry: RetryLimits,
    /// How long workers that failed are avoided.
    pub(crate) probation: ProbationLimits,
    /// Longest wait for a decode worker's claim.
    pub(crate) claim_max: Duration,
    /// Events held for a client that does not read.
    pub(crate) client_events_max: usize,
    /// A client that takes nothing for so long is cancelled.
    pub(crate) client_stall_max: Duration,
}

impl Limits {
    /// Events that may wait for the reader of an answer with so many samples: ends have slots of their own.
    pub(crate) fn events_max(&self, samples: u32) -> usize {
        self.client_events_max + samples as usize
    }
}

/// What every request shares.
#[derive(Debug)]
pub(crate) struct Core {
    /// Time, tasks and chance.
    pub(crate) runtime: Arc<dyn Runtime>,
    /// Bounds.
    pub(crate) limits: Limits,
    /// Running and queued requests.
    pub(crate) admission: Admission,
    /// What the bytes of requests are taken from that are not read yet.
    pub(crate) intake: Intake,
    /// What the bytes of answers are taken from that are gathered before they are sent, or wait for their reader.
    pub(crate) answers: Intake,
    /// What keys have in flight.
    pub(crate) quotas: Quotas,
    /// Retries of all requests.
    pub(crate) retries: RetryBucket,
    /// How requests use prefix caches.
    pub(crate) cache: CacheRules,
    /// What tokens cost.
    pub(crate) prices: PricesConfig,
    /// What answers so far teach.
    pub(crate) experience: Experience,
    /// Prompts that become tokens.
    pub(crate) tokenizing: Tokenizing,
    /// The workers.
    pub(crate) workers: Arc<WorkerSet>,
    /// What they have cached.
    pub(crate) prefixes: Arc<Prefixes>,
    /// Router-side metrics.
    pub(crate) metrics: RouterMetrics,
    /// What prefix caches spared.
    pub(crate) cache_metrics: CacheMetrics,
    /// What becomes of traces.
    pub(crate) tail: Tail,
    /// No new requests any more.
    pub(crate) draining: CancellationToken,
    /// Requests still running are ended.
    pub(crate) abort: CancellationToken,
    /// Placements so far.
    pub(crate) placements: AtomicU64,
    /// Times that KV without room was left to wait where it was.
    #[cfg(test)]
    pub(crate) stays: AtomicU64,
    /// Tasks of running requests.
    pub(crate) tasks: TaskTracker,
    /// Answers that their clients have not read to the end.
    pub(crate) unread: TaskTracker,
}

/// What a core is made of besides its configuration.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) workers: Arc<WorkerSet>,
    pub(crate) prefixes: Arc<Prefixes>,
    pub(crate) metrics: RouterMetrics,
    pub(crate) cache_metrics: CacheMetrics,
    pub(crate) tail: Tail,
}

impl Core {
    /// A core without requests.
    pub(crate) fn new(config: &RouterConfig, parts: Parts) -> Self {
        let Parts { runtime, workers, prefixes, metrics, cache_metrics, tail } = parts;
        Self {
            runtime,
            limits: config.flow_limits(),
            admission: Admission::new(config.limits.running_max, config.limits.queued_max),
            intake: config.intake(),
            answers: Intake::new(config.limits.answers_bytes_max.0, config.limits.answers_share_bytes_max.0),
            quotas: Quotas::default(),
            retries: RetryBucket::new(config.retry.burst_max, config.retry.per_s),
            cache: CacheRules::new(&config.cache),
            prices: config.prices.clone(),
            experience: Experience::default(),
            tokenizing: Tokenizing::new(),
            workers,
            prefixes,
            metrics,
            cache_metrics,
            tail,
            draining: CancellationToken::new(),
            abort: CancellationToken::new(),
            placements: AtomicU64::new(0),
            #[cfg(test)]
            stays: AtomicU64::new(0),
            tasks: TaskTracker::new(),
            unread: TaskTracker::new(),
        }
    }
}
