//! A complete router: listeners, services, supervision and shutdown.

use crate::RouterConfig;
use crate::auth::{Access, KeysError};
use crate::deadline::Deadlines;
use crate::flow::{Core, Outside};
use crate::grpc::{self as services, AdminService, GrpcConnector, InferenceService, KserveService};
use crate::http::{Admitted, BodyLimits, HttpState, cors, routes};
use crate::meter::meter;
use crate::metrics::{AuthMetrics, MembershipMetrics, VllmKvUsage};
use crate::page::{self, Page};
use crate::status::{ClusterStatus, StatusMetrics};
use baton_node::Shutdown;
use baton_node::admin::{self, Health};
use baton_node::announce::{Announcement, Announcer};
use baton_node::grpc;
use baton_node::identity::{ClientProtocol, Identity, IdentityError, Role, ServerTls};
use baton_node::listen::{BindError, Callers, Listener, PEER_GONE_MAX, serve_http};
use baton_node::membership::RouterBackend;
use baton_node::membership::embedded::LeaseConfig;
use baton_node::metrics::Metrics;
use baton_node::runtime::TokioRuntime;
use baton_node::telemetry::Traces;
use futures::FutureExt as _;
use http::request::Parts;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// How often readiness is checked for the health service.
const READINESS_EVERY: Duration = Duration::from_millis(100);
/// Time for aborted requests to report their end, and for servers to close.
const CLOSE_MAX: Duration = Duration::from_secs(2);
/// Time for clients to read what is ready for them, counted from the end of the last request. A client that reads
/// nothing for this long also counts as gone elsewhere.
const UNREAD_MAX: Duration = PEER_GONE_MAX;

/// Why a router does not run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// An address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// This router's identity files cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The keys file cannot be read.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// A server ended unexpectedly.
    #[error("the {0} server ended: {1}")]
    Server(&'static str, String),
}

#[derive(Clone, Copy, Debug)]
pub struct Router;

/// A running router. Dropping it ends everything at once; [`RunningRouter::stop`] drains first.
#[derive(Debug)]
pub struct RunningRouter {
    /// The gRPC address for clients.
    pub grpc_addr: SocketAddr,
    /// The address where workers register.
    pub cluster_addr: SocketAddr,
    pub http_addr: SocketAddr,
    /// The address of health and metrics, if they have a separate port.
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
        let tls = ServerTls::start(&config.tls).await?;
        let clients = |protocol| Callers::Clients(tls.clone(), protocol);
        let auth_metrics = metrics.register(AuthMetrics::register);
        let access = Access::start(&config.auth, !identity.is_set(), auth_metrics, stop.clone()).await?;
        let grpc_listener = grpc::bind(&config.grpc).await?;
        let cluster_listener = grpc::bind(&config.cluster).await?;
        let cluster_addr = cluster_listener.address();
        let http_listener = Listener::bind(config.http.listen, config.http.connections_max).await?;
        let (grpc_addr, http_addr) = (grpc_listener.address(), http_listener.address());

        if config.auth.has_keys() && config.cache.enabled && config.cache.secret.is_none() {
            tracing::warn!(
                "cache.secret is unset: who reaches workers past the routers can work out the salts of tenants"
            );
        }
        let etcd = config.identity.for_etcd(&config.membership.etcd);
        let leases = LeaseConfig { etcd, ..config.membership.clone() };
        let membership = RouterBackend::start(&leases, &identity);
        let connector = GrpcConnector::new(identity.clone());
        let outside = Outside {
            runtime: Arc::new(TokioRuntime::current()),
            connector: Arc::new(connector.clone()),
            membership: membership.membership(),
            traces: traces.clone(),
            name: format!("{}:{}", baton_node::id::hostname(), grpc_addr.port()),
            index_secret: rand::random(),
            stop: stop.clone(),
        };
        let core = Core::start(&config, outside, &metrics);
        let members = Box::new(MembershipMetrics::new(membership.clone(), core.workers.clone()));
        metrics.register(|registry| registry.register_collector(members));
        let deadlines = Deadlines {
            default: Duration::from_millis(config.limits.deadline_ms_default),
            max: Duration::from_millis(config.limits.deadline_ms_max),
        };

        let mut servers = JoinSet::new();
        let (reporter, health) = grpc::health();
        let head_max = Duration::from_millis(config.limits.head_ms_max);
        let inference = InferenceService::new(core.clone(), deadlines, head_max);
        let kserve = KserveService::new(core.clone(), deadlines, config.http.strict_fields, stop.clone());
        let status = ClusterStatus::new(core.clone(), membership.clone());
        metrics.register(|registry| registry.register_collector(Box::new(StatusMetrics(status.clone()))));
        if config.metrics.vllm_names {
            let usage = Box::new(VllmKvUsage(status.clone()));
            metrics.register_as_named(|registry| registry.register_collector(usage));
        }
        tokio::spawn(status.clone().follow(stop.clone()));
        let admin = AdminService::new(core.workers.clone(), connector, status, traces);
        let page = config.page.enabled.then(|| {
            let page = Page::new(admin.clone(), core.clone(), access.clone(), &config.page, stop.clone());
            page::routes(page)
        });
        let meter = {
            let access = access.clone();
            let client = move |call: &Parts| access.client(&call.headers, &call.extensions);
            meter(core.intake.clone(), config.standard_intake(), client)
        };
        let grpc_router = grpc::server_counting(&config.grpc, meter.clone())
            .add_service(services::inference(inference, &config.grpc, access.clone()))
            .add_service(services::kserve(kserve, &config.grpc, access.clone()))
            .add_service(services::guarded_admin(admin.clone(), access.clone()))
            .add_service(health.clone());
        let grpc_router = grpc::with_reflection(grpc_router, &[services::INFERENCE, services::KSERVE, services::ADMIN]);
        let grpc_server = grpc::serve(grpc_router, grpc_listener, clients(ClientProtocol::Grpc), stop.clone());
        servers.spawn(async move { grpc_server.await.map_err(|e| RouterError::Server("gRPC", e.to_string())) });

        // Without client certificates, operators use keys on the other port.
        let admin = identity.is_set().then(|| services::admin(admin));
        let mut names = Vec::from_iter(admin.as_ref().map(|_| services::ADMIN));
        names.extend(membership.service().map(|_| services::MEMBERSHIP));
        let joins = membership.service().map(|joins| joins.max_decoding_message_size(config.cluster.message_max()));
        let cluster_router =
            grpc::server(&config.cluster).add_service(health).add_optional_service(joins).add_optional_service(admin);
        let cluster_router = grpc::with_reflection(cluster_router, &names);
        let cluster_server = grpc::serve(cluster_router, cluster_listener, Callers::Peers(identity), stop.clone());
        servers.spawn(async move { cluster_server.await.map_err(|e| RouterError::Server("cluster", e.to_string())) });

        let (ready_sender, ready) = watch::channel(core.ready());
        servers.spawn(watch_readiness(core.clone(), ready_sender, reporter, stop.clone()));

        let state = HttpState {
            core: core.clone(),
            admitted: Admitted { access, origins: config.http.cors_origins.clone().into() },
            deadlines,
            body: BodyLimits {
                bytes_max: usize::try_from(config.http.body_bytes_max.0).unwrap_or(usize::MAX),
                time_max: Duration::from_millis(config.http.body_ms_max),
            },
            sse_keepalive: Duration::from_millis(config.http.sse_keepalive_ms),
            strict_fields: config.http.strict_fields,
            wall: (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
            cors: cors(&config.http.cors_origins),
        };
        let health = Health::new(|| Ok(()), {
            let core = core.clone();
            move || core.ready()
        });
        metrics.register_health(&health);
        let mut admin_addr = None;
        let mut open = admin::routes(health.clone(), metrics.clone());
        if let Some(address) = config.admin.listen {
            let listener = admin::bind(address).await?;
            admin_addr = Some(listener.address());
            // Clients use the other port: whoever can reach this one may read metrics.
            let all = std::mem::replace(&mut open, admin::probes(health));
            servers.spawn(admin::serve(listener, all, stop.clone()).map(Ok));
        }
        let open = page.into_iter().fold(open, axum::Router::merge);
        let idle_max = Duration::from_millis(config.http.idle_ms_max);
        let server = serve_http(
            http_listener,
            clients(ClientProtocol::Http),
            routes(state, meter, open),
            idle_max,
            stop.clone(),
        );
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
        let now = core.ready();
        let status = match now {
            Ok(()) => tonic_health::ServingStatus::Serving,
            Err(_) => tonic_health::ServingStatus::NotServing,
        };
        // Each change goes to all watchers, and any client may watch.
        if told.replace(now.is_ok()) != Some(now.is_ok()) {
            reporter.set_service_status("", status).await;
            reporter.set_service_status(services::INFERENCE, status).await;
            reporter.set_service_status(services::KSERVE, status).await;
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
        self.core.requests()
    }

    /// State that its requests share.
    #[cfg(test)]
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// Returns only when a server fails.
    async fn failed(&mut self) -> RouterError {
        match self.servers.join_next().await {
            Some(Ok(Err(error))) => error,
            Some(Err(panic)) => RouterError::Server("router", panic.to_string()),
            Some(Ok(Ok(()))) | None => RouterError::Server("router", "without a reason".into()),
        }
    }

    /// Refuses new requests, waits for running ones, and for a bounded time for answers that clients still read; then
    /// closes. The caller bounds the whole.
    pub async fn drain(&mut self) {
        self.core.drain().await;
        self.core.unread.close();
        let read = async {
            self.core.unread.wait().await;
            // The unread rest of an answer may be buffered in the connections only.
            self.close().await;
        };
        if timeout(UNREAD_MAX, read).await.is_err() {
            tracing::info!("leaves connections whose clients have read nothing to the end");
        }
    }

    /// Leaves the cluster, accepts no more connections, and waits until the open ones have sent everything and the known
    /// workers are remembered for the next start.
    async fn close(&mut self) {
        self.membership.close();
        self.stop.cancel();
        let Self { membership, servers, .. } = self;
        let served = async { while servers.join_next().await.is_some() {} };
        let ((), remembered) = tokio::join!(served, timeout(CLOSE_MAX, membership.remembered()));
        if remembered.is_err() {
            tracing::warn!("ends before it has remembered the members (membership.cache_dir)");
        }
    }

    /// Ends running requests, notifies workers and clients, and closes.
    pub async fn stop(mut self) {
        self.core.abort();
        let _ = timeout(CLOSE_MAX, self.core.drain()).await;
        let _ = timeout(CLOSE_MAX, self.close()).await;
        self.servers.shutdown().await;
    }
}

impl Drop for RunningRouter {
    fn drop(&mut self) {
        self.core.abort();
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
