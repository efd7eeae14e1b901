//! A router as a whole: listeners, services, supervision, and its end.

use crate::RouterConfig;
use crate::admission::Admission;
use crate::auth::{Access, KeysError};
use crate::cache_scope::CacheRules;
use crate::deadline::Deadlines;
use crate::flow::{Core, Tokenizing};
use crate::grpc::{AdminService, InferenceService, Whole, callers, operators};
use crate::http::{BodyLimits, HttpState, routes};
use crate::metrics::{
    AuthMetrics, CacheMetrics, IndexMetrics, IntakeMetrics, MembershipChanges, MembershipMetrics, PrefixMetrics,
    RouterMetrics,
};
use crate::models::TextCache;
use crate::placement::Experience;
use crate::prefixes::Prefixes;
use crate::quotas::Quotas;
use crate::readiness::readiness;
use crate::recovery::RetryBucket;
use crate::status::{ClusterStatus, StatusMetrics};
use crate::traces::{Tail, TailMetrics, deliver};
use crate::workers::{Supervisor, WorkerSet, supervise};
use baton_node::Shutdown;
use baton_node::admin::{self, Health};
use baton_node::announce::{Announcement, Announcer};
use baton_node::calls::Meter;
use baton_node::grpc;
use baton_node::identity::{Identity, IdentityError, Role};
use baton_node::intake::Intake;
use baton_node::listen::{BindError, Listener, PEER_GONE_MAX, serve_http};
use baton_node::membership::RouterBackend;
use baton_node::membership::embedded::LeaseConfig;
use baton_node::metrics::Metrics;
use baton_node::telemetry::Traces;
use baton_proto::v1::admin_server::{self, AdminServer};
use baton_proto::v1::inference_server::{self, InferenceServer};
use baton_proto::v1::membership_server;
use futures::FutureExt as _;
use http::request::Parts;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::interceptor::InterceptedService;

/// How often readiness is looked at for the health service.
const READINESS_EVERY: Duration = Duration::from_millis(100);
/// Requests that are ended get so long to say so, and servers to close.
const CLOSE_MAX: Duration = Duration::from_secs(2);
/// Clients have so long, from the end of the last request on, to read what lies ready for them: who takes nothing for so long is taken to be
/// gone elsewhere too.
const UNREAD_MAX: Duration = PEER_GONE_MAX;

/// Why a router does not run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// An address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The files that say who this router is cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The keys of those who may call cannot be read.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// A server ended on its own.
    #[error("the {0} server ended: {1}")]
    Server(&'static str, String),
}

/// Starts routers.
#[derive(Clone, Copy, Debug)]
pub struct Router;

/// A running router. Dropping it ends everything at once; [`RunningRouter::stop`] drains first.
#[derive(Debug)]
pub struct RunningRouter {
    /// Where gRPC listens for clients.
    pub grpc_addr: SocketAddr,
    /// Where workers join.
    pub cluster_addr: SocketAddr,
    /// Where HTTP listens.
    pub http_addr: SocketAddr,
    /// Where health and metrics have a port of their own, if they do.
    pub admin_addr: Option<SocketAddr>,
    core: Arc<Core>,
    membership: RouterBackend,
    ready: watch::Receiver<Result<(), String>>,
    servers: JoinSet<Result<(), RouterError>>,
    stop: CancellationToken,
}

impl Router {
    /// Starts a router; port 0 takes a free one.
    pub async fn start(config: RouterConfig) -> Result<RunningRouter, RouterError> {
        Self::start_with(config, Metrics::new("baton-router"), Traces::default()).await
    }

    /// Like [`Router::start`], with the metrics and the recent traces of the process.
    pub async fn start_with(
        config: RouterConfig,
        metrics: Metrics,
        traces: Traces,
    ) -> Result<RunningRouter, RouterError> {
        let stop = CancellationToken::new();
        let identity = Identity::start(&config.identity, Role::Router).await?;
        let auth_metrics = metrics.register(AuthMetrics::register);
        let access = Access::start(&config.auth, !identity.is_set(), auth_metrics, stop.clone()).await?;
        let grpc_listener = grpc::bind(&config.grpc).await?;
        let cluster_listener = grpc::bind(&config.cluster).await?;
        let cluster_addr = cluster_listener.address();
        let http_listener = Listener::bind(config.http.listen, config.http.connections_max).await?;
        let (grpc_addr, http_addr) = (grpc_listener.address(), http_listener.address());

        let silent_max = Duration::from_millis(config.placement.load_stale_ms_max);
        let counters = metrics.register(TailMetrics::register);
        let (tail, verdicts) = Tail::new(&config.telemetry, traces.clone(), counters);
        tokio::spawn(deliver(verdicts, tail.lost()));
        if config.auth.keys_file.is_some() && config.cache.enabled && config.cache.secret.is_none() {
            tracing::warn!(
                "cache.secret is unset: who reaches workers past the routers can work out the salts of tenants"
            );
        }
        // Where keys are asked for, whoever reaches the clients' port reads what it exports, without one.
        let cache_metrics = CacheMetrics::new(config.auth.keys_file.is_none() || config.admin.listen.is_some());
        let collector = Box::new(cache_metrics.clone());
        metrics.register(|registry| registry.register_collector(collector));
        let blocks_max = config.cache.index_blocks_max;
        let prefixes = Arc::new(Prefixes::new(blocks_max, metrics.register(PrefixMetrics::register)));
        metrics.register(|registry| registry.register_collector(Box::new(IndexMetrics(prefixes.clone()))));
        tokio::spawn(prefixes.clone().sweep(stop.clone()));
        let core = Arc::new(Core {
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
            cache_metrics,
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
        metrics.register(|registry| registry.register_collector(Box::new(budgets)));
        let deadlines = Deadlines {
            default: Duration::from_millis(config.limits.deadline_ms_default),
            max: Duration::from_millis(config.limits.deadline_ms_max),
        };
        let etcd = config.identity.for_etcd(&config.membership.etcd);
        let leases = LeaseConfig { etcd, ..config.membership.clone() };
        let membership = RouterBackend::start(&leases, &identity);
        let members = MembershipMetrics::new(membership.clone(), core.workers.clone());
        let changes = metrics.register(|registry| {
            registry.register_collector(Box::new(members));
            MembershipChanges::register(registry)
        });
        let supervisor = Supervisor {
            membership: membership.membership(),
            identity: identity.clone(),
            workers: core.workers.clone(),
            changes,
            prefixes: Some(prefixes).filter(|_| blocks_max > 0),
            texts: Arc::new(TextCache::default()),
            name: format!("{}:{}", baton_node::id::hostname(), grpc_addr.port()),
            silent_max,
        };
        tokio::spawn(supervise(supervisor, stop.clone()));

        let mut servers = JoinSet::new();
        let (reporter, health) = grpc::health();
        let head_max = Duration::from_millis(config.limits.head_ms_max);
        let inference = InferenceServer::new(InferenceService::new(core.clone(), deadlines, head_max))
            .max_decoding_message_size(config.grpc.message_max());
        let inference = Whole::new(inference, config.grpc.message_max());
        let status = ClusterStatus::new(core.clone(), membership.clone());
        metrics.register(|registry| registry.register_collector(Box::new(StatusMetrics(status.clone()))));
        tokio::spawn(status.clone().follow(stop.clone()));
        let admin = AdminServer::new(AdminService::new(core.workers.clone(), status, traces));
        let meter: Meter = {
            let (intake, access) = (core.intake.clone(), access.clone());
            Arc::new(move |call: &Parts| intake.hold(access.client(&call.headers, &call.extensions)))
        };
        let grpc_router = grpc::server_counting(&config.grpc, meter.clone())
            .add_service(InterceptedService::new(inference, callers(access.clone())))
            .add_service(InterceptedService::new(admin.clone(), operators(access.clone())))
            .add_service(health.clone());
        let services = [inference_server::SERVICE_NAME, admin_server::SERVICE_NAME];
        let grpc_router = grpc::with_reflection(grpc_router, &services);
        let grpc_server = grpc::serve(grpc_router, grpc_listener, Identity::default(), stop.clone());
        servers.spawn(async move { grpc_server.await.map_err(|e| RouterError::Server("gRPC", e.to_string())) });

        // Where nobody shows a certificate, operators show keys, at the other port.
        let admin = identity.is_set().then_some(admin);
        let mut services = Vec::from_iter(admin.as_ref().map(|_| admin_server::SERVICE_NAME));
        services.extend(membership.service().map(|_| membership_server::SERVICE_NAME));
        let cluster_router = grpc::server(&config.cluster)
            .add_service(health)
            .add_optional_service(membership.service())
            .add_optional_service(admin);
        let cluster_router = grpc::with_reflection(cluster_router, &services);
        let cluster_server = grpc::serve(cluster_router, cluster_listener, identity, stop.clone());
        servers.spawn(async move { cluster_server.await.map_err(|e| RouterError::Server("cluster", e.to_string())) });

        let (ready_sender, ready) = watch::channel(readiness(&core));
        servers.spawn(watch_readiness(core.clone(), ready_sender, reporter, stop.clone()));

        let state = HttpState {
            core: core.clone(),
            access,
            deadlines,
            body: BodyLimits {
                bytes_max: usize::try_from(config.http.body_bytes_max.0).unwrap_or(usize::MAX),
                time_max: Duration::from_millis(config.http.body_ms_max),
            },
            sse_keepalive: Duration::from_millis(config.http.sse_keepalive_ms),
        };
        let health = Health::new(|| Ok(()), {
            let core = core.clone();
            move || readiness(&core)
        });
        metrics.register_health(&health);
        let (mut admin_addr, mut open) = (None, admin::routes(health.clone(), metrics.clone()));
        if let Some(address) = config.admin.listen {
            let listener = admin::bind(address).await?;
            admin_addr = Some(listener.address());
            // Clients reach the other port: who reads metrics is decided by who reaches this one.
            let all = std::mem::replace(&mut open, admin::probes(health));
            servers.spawn(admin::serve(listener, all, stop.clone()).map(Ok));
        }
        let idle_max = Duration::from_millis(config.http.idle_ms_max);
        let server = serve_http(http_listener, routes(state, meter, open), idle_max, stop.clone());
        servers.spawn(server.map(Ok));
        tracing::info!(grpc = %grpc_addr, http = %http_addr, cluster = %cluster_addr, "listens");
        Ok(RunningRouter { grpc_addr, cluster_addr, http_addr, admin_addr, core, membership, ready, servers, stop })
    }
}

async fn watch_readiness(
    core: Arc<Core>,
    ready: watch::Sender<Result<(), String>>,
    reporter: tonic_health::server::HealthReporter,
    stop: CancellationToken,
) -> Result<(), RouterError> {
    let mut told = None;
    while !stop.is_cancelled() {
        let now = readiness(&core);
        let status = match now {
            Ok(()) => tonic_health::ServingStatus::Serving,
            Err(_) => tonic_health::ServingStatus::NotServing,
        };
        // Each report goes to whoever watches, and anybody may.
        if told.replace(now.is_ok()) != Some(now.is_ok()) {
            reporter.set_service_status("", status).await;
            reporter.set_service_status(inference_server::SERVICE_NAME, status).await;
        }
        ready.send_if_modified(|known| std::mem::replace(known, now.clone()) != now);
        tokio::select! {
            () = stop.cancelled() => {}
            () = sleep(READINESS_EVERY) => {}
        }
    }
    Ok(())
}

impl RunningRouter {
    /// Waits until a request of some model would be served.
    pub async fn ready(&self) {
        let mut ready = self.ready.clone();
        // The sender lives as long as the router.
        let _ = ready.wait_for(Result::is_ok).await;
    }

    /// Requests running or queued.
    pub fn requests(&self) -> usize {
        self.core.admission.inside()
    }

    /// What its requests share.
    #[cfg(test)]
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// Ends on its own only when a server fails.
    async fn failed(&mut self) -> RouterError {
        match self.servers.join_next().await {
            Some(Ok(Err(error))) => error,
            Some(Err(panic)) => RouterError::Server("router", panic.to_string()),
            Some(Ok(Ok(()))) | None => RouterError::Server("router", "without a reason".into()),
        }
    }

    /// Refuses new requests, waits for those that run, for a bounded time also for answers that are still read, and closes. The caller bounds
    /// the whole.
    pub async fn drain(&mut self) {
        self.core.draining.cancel();
        self.core.tasks.close();
        self.core.tasks.wait().await;
        self.core.unread.close();
        let read = async {
            self.core.unread.wait().await;
            // What clients have not read of an answer may be with their connections alone.
            self.close().await;
        };
        if timeout(UNREAD_MAX, read).await.is_err() {
            tracing::info!("leaves connections whose clients have read nothing to the end");
        }
    }

    /// Leaves the cluster, takes no more connections, and waits until those there are have nothing left to say.
    async fn close(&mut self) {
        self.membership.close();
        self.stop.cancel();
        while self.servers.join_next().await.is_some() {}
    }

    /// Ends requests that still run, tells workers and clients, and closes.
    pub async fn stop(mut self) {
        self.core.draining.cancel();
        self.core.abort.cancel();
        self.core.tasks.close();
        let _ = timeout(CLOSE_MAX, self.core.tasks.wait()).await;
        let _ = timeout(CLOSE_MAX, self.close()).await;
        self.servers.shutdown().await;
    }
}

impl Drop for RunningRouter {
    fn drop(&mut self) {
        self.core.abort.cancel();
        self.stop.cancel();
    }
}

/// Runs a router until `shutdown` is requested, then drains it.
pub async fn run(
    config: RouterConfig,
    shutdown: Shutdown,
    announcer: Announcer,
    metrics: Metrics,
    traces: Traces,
) -> Result<(), RouterError> {
    let mut router = Router::start_with(config, metrics, traces).await?;
    let cluster = Some(router.cluster_addr);
    announcer.say(&Announcement::Listening { grpc: router.grpc_addr, http: router.http_addr, cluster });
    let mut ready = router.ready.clone();
    let announce = async {
        if ready.wait_for(Result::is_ok).await.is_ok() {
            announcer.say(&Announcement::Ready);
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = shutdown.requested() => {}
        error = router.failed() => return Err(error),
        () = announce => {}
    }
    if shutdown.drain(router.drain()).await.is_none() {
        tracing::warn!(requests = router.requests(), "ends requests that outlasted the drain");
    }
    router.stop().await;
    Ok(())
}
