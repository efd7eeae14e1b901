//! What every request shares: the router without its servers.
//!
//! [`Core::start`] takes what it stands on ([`Outside`]) and follows the workers of the membership; [`Core::generate`] takes a request and
//! gives the stream of its answer; [`Core::drain`] and [`Core::abort`] end it. None of them names gRPC, HTTP or tokio's time: a simulation
//! gives its own `Runtime`, `Connector` and membership, and runs all of this in one thread (`tests/port.rs` is the smallest one).

use super::prepare::Prepared;
use super::tokenize::Tokenizing;
use crate::RouterConfig;
use crate::admission::Admission;
use crate::cache_scope::CacheRules;
use crate::metrics::{CacheMetrics, IndexMetrics, IntakeMetrics, MembershipChanges, PrefixMetrics, RouterMetrics};
use crate::placement::{Experience, Thresholds};
use crate::port::Connector;
use crate::prefixes::Prefixes;
use crate::prices::PricesConfig;
use crate::quotas::Quotas;
use crate::recovery::{ProbationLimits, RetryBucket, RetryLimits};
use crate::request::PrefillPolicy;
use crate::traces::{Tail, TailMetrics, deliver};
use crate::workers::{Supervisor, WorkerSet, supervise};
use baton_node::intake::Intake;
use baton_node::membership::RouterMembership;
use baton_node::metrics::Metrics;
use baton_node::telemetry::Traces;
use baton_types::{Party, Runtime};
use futures::FutureExt as _;
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
pub struct Core {
    /// Time, tasks and chance.
    pub(crate) runtime: Arc<dyn Runtime>,
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
    pub(crate) prices: PricesConfig,
    /// What answers so far teach.
    pub(crate) experience: Experience,
    /// Prompts that become tokens.
    pub(crate) tokenizing: Tokenizing,
    pub(crate) workers: Arc<WorkerSet>,
    /// What they have cached.
    pub(crate) prefixes: Arc<Prefixes>,
    pub(crate) metrics: RouterMetrics,
    /// What prefix caches spared.
    pub(crate) cache_metrics: CacheMetrics,
    /// What becomes of traces.
    pub(crate) tail: Tail,
    /// No new requests any more.
    pub(crate) draining: CancellationToken,
    /// Requests still running are ended.
    pub(crate) abort: CancellationToken,
    pub(crate) placements: AtomicU64,
    /// Times that KV without room was left to wait where it was.
    #[cfg(test)]
    pub(crate) stays: AtomicU64,
    /// Tasks of running requests.
    pub(crate) tasks: TaskTracker,
    /// Answers that their clients have not read to the end.
    pub(crate) unread: TaskTracker,
}

/// What a core stands on: in a process tokio, gRPC and the configured membership; in a simulation its own.
pub struct Outside {
    /// Time, tasks and chance.
    pub runtime: Arc<dyn Runtime>,
    /// How workers are reached.
    pub connector: Arc<dyn Connector>,
    pub membership: Arc<dyn RouterMembership>,
    /// Recent traces of the process.
    pub traces: Traces,
    /// Name of this router, for the workers' logs.
    pub name: String,
    /// Cancelled, it ends what the core does without requests.
    pub stop: CancellationToken,
}

impl Core {
    /// Starts a core, which follows the workers of the membership from now on.
    pub fn start(config: &RouterConfig, outside: Outside, metrics: &Metrics) -> Arc<Self> {
        let Outside { runtime, connector, membership, traces, name, stop } = outside;
        let (tail, verdicts) = Tail::new(&config.telemetry, traces, metrics.register(TailMetrics::register));
        runtime.spawn(deliver(runtime.clone(), verdicts, tail.lost()).boxed());
        // Where keys are asked for, whoever reaches the clients' port reads what it exports, without one.
        let cache_metrics = CacheMetrics::new(config.auth.keys_file.is_none() || config.admin.listen.is_some());
        let prefixes =
            Arc::new(Prefixes::new(config.cache.index_blocks_max, metrics.register(PrefixMetrics::register)));
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
            tokenizing: Tokenizing::new(),
            workers: Arc::new(WorkerSet::new(silent_max)),
            prefixes: prefixes.clone(),
            metrics: metrics.register(RouterMetrics::register),
            cache_metrics: cache_metrics.clone(),
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

    /// Of each worker that tells of its cache, how many tokens of a request's prompt it has, as far as this router knows.
    #[doc(hidden)] // For simulations.
    pub fn known_of(&self, request: &Prepared) -> Vec<(Party, usize)> {
        let found = self.prefixes.lookup(&request.hashes, &*self.runtime);
        let mut known: Vec<_> = found.all().map(|(party, tokens)| (party.clone(), tokens)).collect();
        known.sort();
        known
    }

    /// Requests running or queued.
    pub fn requests(&self) -> usize {
        self.admission.inside()
    }

    /// Takes no new requests, and waits until those that there are have ended. The caller bounds the wait.
    pub async fn drain(&self) {
        self.draining.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Takes no new requests, and ends those that there are; [`Core::drain`] waits until that is done.
    pub fn abort(&self) {
        self.draining.cancel();
        self.abort.cancel();
    }
}
