//! What every request shares: the router without its servers.
//!
//! [`Core::start`] takes its dependencies ([`Outside`]) and follows the workers of the membership. [`Core::generate`]
//! takes a request and returns the stream of its answer. [`Core::drain`] and [`Core::abort`] end it. None of them uses
//! gRPC, HTTP or tokio's clock: a simulation passes its own `Runtime`, `Connector` and membership, and runs all of this
//! in one thread (`tests/port.rs` is the smallest one).

use super::prepare::Prepared;
use super::tokenize::Tokenizing;
use crate::RouterConfig;
use crate::admission::Admission;
use crate::cache_scope::CacheRules;
use crate::metrics::{
    CacheMetrics, IndexMetrics, IntakeMetrics, MembershipChanges, PrefixMetrics, RouterMetrics, VllmMetrics,
};
use crate::placement::{Experience, Thresholds};
use crate::port::Connector;
use crate::prefixes::Prefixes;
use crate::prices::PricesConfig;
use crate::quotas::Quotas;
use crate::recovery::{ProbationLimits, RetryBucket, RetryLimits};
use crate::request::PrefillPolicy;
use crate::status::Handoffs;
use crate::traces::{Tail, TailMetrics, deliver};
use crate::workers::{Supervisor, WorkerSet, supervise};
use baton_node::intake::Intake;
use baton_node::membership::RouterMembership;
use baton_node::metrics::Metrics;
use baton_node::telemetry::Traces;
use baton_types::{Party, Runtime};
use futures::FutureExt as _;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Limits of every request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Where prompts are prefilled unless the request sets it.
    pub(crate) policy: PrefillPolicy,
    pub(crate) placement: Thresholds,
    /// Retry limits of one request.
    pub(crate) retry: RetryLimits,
    /// How long workers that failed are avoided.
    pub(crate) probation: ProbationLimits,
    /// Longest wait for a decode worker's claim.
    pub(crate) claim_max: Duration,
    /// Events held for a client that does not read.
    pub(crate) client_events_max: usize,
    /// A client that reads nothing for this long is cancelled.
    pub(crate) client_stall_max: Duration,
}

impl Limits {
    /// Events that may wait for the reader of an answer with this many samples; the ends have slots of their own.
    pub(crate) fn events_max(&self, samples: u32) -> usize {
        self.client_events_max + samples as usize
    }
}

/// State that all requests share.
#[derive(Debug)]
pub struct Core {
    /// Clock, tasks and random numbers.
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) limits: Limits,
    /// Running and queued requests.
    pub(crate) admission: Admission,
    /// Budget for bytes of requests that are not parsed yet.
    pub(crate) intake: Intake,
    /// Budget for bytes of answers that are gathered before they are sent, or are not read yet.
    pub(crate) answers: Intake,
    /// What each key has in flight.
    pub(crate) quotas: Quotas,
    /// Retry budget of all requests.
    pub(crate) retries: RetryBucket,
    /// How requests use prefix caches.
    pub(crate) cache: CacheRules,
    pub(crate) prices: PricesConfig,
    /// Measured times and lengths of past answers.
    pub(crate) experience: Experience,
    /// Runs tokenization outside of the tasks that serve requests.
    pub(crate) tokenizing: Tokenizing,
    pub(crate) workers: Arc<WorkerSet>,
    /// Index of what workers have cached.
    pub(crate) prefixes: Arc<Prefixes>,
    pub(crate) metrics: RouterMetrics,
    /// Savings by prefix caches.
    pub(crate) cache_metrics: CacheMetrics,
    /// Handoffs of KV between workers, now and in the last minute.
    pub(crate) handoffs: Handoffs,
    /// Tail sampling of traces.
    pub(crate) tail: Tail,
    /// Cancelled: no new requests are accepted.
    pub(crate) draining: CancellationToken,
    /// Cancelled: running requests are ended.
    pub(crate) abort: CancellationToken,
    pub(crate) placements: AtomicU64,
    /// How often a request without room for its KV waited on its decode worker.
    #[cfg(test)]
    pub(crate) stays: AtomicU64,
    /// Tasks of running requests.
    pub(crate) tasks: TaskTracker,
    /// Answers that clients have not read to the end.
    pub(crate) unread: TaskTracker,
}

/// Dependencies of a core: in a process tokio, gRPC and the configured membership; in a simulation its own.
pub struct Outside {
    /// Clock, tasks and random numbers.
    pub runtime: Arc<dyn Runtime>,
    /// How to connect to workers.
    pub connector: Arc<dyn Connector>,
    pub membership: Arc<dyn RouterMembership>,
    /// Recent traces of the process.
    pub traces: Traces,
    /// Name of this router, for the workers' logs.
    pub name: String,
    /// Two random numbers that no worker knows, for the index of prefixes.
    pub index_secret: [u64; 2],
    /// Cancelled, it ends the core's background tasks.
    pub stop: CancellationToken,
}

impl Core {
    /// Starts a core, which follows the workers of the membership from then on.
    pub fn start(config: &RouterConfig, outside: Outside, metrics: &Metrics) -> Arc<Self> {
        let Outside { runtime, connector, membership, traces, name, index_secret, stop } = outside;
        let (tail, verdicts) = Tail::new(&config.telemetry, traces, metrics.register(TailMetrics::register));
        runtime.spawn(deliver(runtime.clone(), verdicts, tail.lost()).boxed());
        // With keys, callers without a key can read the metrics on the clients' port.
        let shows_cache = !config.auth.has_keys() || config.admin.listen.is_some();
        let cache_metrics = CacheMetrics::new(shows_cache);
        let vllm = |registry: &mut Registry| VllmMetrics::register(registry, shows_cache);
        let vllm = config.metrics.vllm_names.then(|| metrics.register_as_named(vllm));
        let prefix_metrics = metrics.register(PrefixMetrics::register);
        let prefixes = Arc::new(Prefixes::new(config.cache.index_blocks_max, index_secret, prefix_metrics));
        runtime.spawn(prefixes.clone().sweep(runtime.clone(), stop.clone()).boxed());
        let silent_max = Duration::from_millis(config.placement.load_stale_ms_max);
        let core = Arc::new(Self {
            runtime: runtime.clone(),
            limits: config.flow_limits(),
            admission: Admission::new(config.limits.running_max, config.limits.queued_max),
            intake: config.intake(),
            answers: Intake::new(config.limits.answers_bytes_max.0, config.limits.answers_share_bytes_max.0),
            quotas: Quotas::default(),
            retries: RetryBucket::new(config.retry.burst_max, config.retry.per_s),
            cache: CacheRules::new(&config.cache),
            prices: config.prices.clone(),
            experience: Experience::default(),
            tokenizing: Tokenizing::new(config.limits.intake_bytes_max.0),
            workers: Arc::new(WorkerSet::new(silent_max)),
            prefixes: prefixes.clone(),
            metrics: metrics.register(RouterMetrics::register).with_vllm(vllm),
            cache_metrics: cache_metrics.clone(),
            handoffs: Handoffs::default(),
            tail,
            draining: CancellationToken::new(),
            abort: CancellationToken::new(),
            placements: AtomicU64::new(0),
            #[cfg(test)]
            stays: AtomicU64::new(0),
            tasks: TaskTracker::new(),
            unread: TaskTracker::new(),
        });
        let budgets = IntakeMetrics { requests: core.intake.clone(), answers: core.answers.clone() };
        let changes = metrics.register(|registry| {
            registry.register_collector(Box::new(cache_metrics));
            registry.register_collector(Box::new(IndexMetrics(prefixes.clone())));
            registry.register_collector(Box::new(budgets));
            MembershipChanges::register(registry)
        });
        let supervisor = Supervisor {
            membership,
            runtime: runtime.clone(),
            connector,
            workers: core.workers.clone(),
            changes,
            prefixes: Some(prefixes).filter(|_| config.cache.index_blocks_max > 0),
            texts: Arc::default(),
            name,
            silent_max,
        };
        runtime.spawn(supervise(supervisor, stop).boxed());
        core
    }

    /// For each worker that reports its cache: how many tokens of the request's prompt it has cached, as far as this
    /// router knows.
    #[doc(hidden)] // For simulations.
    pub fn known_of(&self, request: &Prepared) -> Vec<(Party, usize)> {
        let found = self.prefixes.lookup(request.hashes(), &*self.runtime);
        let mut known: Vec<_> = found.all().map(|(party, tokens)| (party.clone(), tokens)).collect();
        known.sort();
        known
    }

    /// Cacheable blocks that count as being computed on a worker.
    #[doc(hidden)] // For simulations.
    pub fn prefixes_in_progress(&self) -> usize {
        self.prefixes.in_progress()
    }

    /// Requests running or queued.
    pub fn requests(&self) -> usize {
        self.admission.inside()
    }

    /// Accepts no new requests, and waits until the current ones have ended. The caller bounds the wait.
    pub async fn drain(&self) {
        self.draining.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Accepts no new requests, and ends the current ones; [`Core::drain`] waits until they have ended.
    pub fn abort(&self) {
        self.draining.cancel();
        self.abort.cancel();
    }
}
