//! A worker process, put together: listeners first, then the engine, the data plane, the services, and last the registration, so that a
//! router never hears of a worker that cannot serve.

use crate::bring_up::{self, Loaded};
use crate::config::WorkerConfig;
use crate::metrics::WorkerMetrics;
use crate::service::{ClaimedTokens, WorkerService};
use anyhow::Context;
use baton_engine::{EngineHandle, SequenceGate};
use baton_kv_transfer::{KvTransfer, NoHooks, SinkHandler, TransferConfig, TransferHooks};
use baton_node::admin::{self, Health};
use baton_node::announce::{Announcement, Announcer};
use baton_node::membership::{self, RegistrationHandle};
use baton_node::metrics::Metrics;
use baton_node::telemetry::ExportCounters;
use baton_node::{Shutdown, grpc, id};
use baton_proto::v1::worker_server::{self, WorkerServer};
use baton_proto::{PROTOCOL_MAX, PROTOCOL_MIN};
use baton_types::{InstanceRecord, Party, ProtocolRange, Role, Shard};
use opentelemetry_sdk::trace::SdkTracer;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;

/// Longest wait for peers' acknowledgements when the data plane stops.
const TRANSFER_STOP_MS_MAX: u64 = 1_000;
/// Longest wait for routers to hear that this worker leaves.
const LEAVE_MS_MAX: u64 = 1_000;

/// One of the two things that a worker does.
pub trait WorkerRole: Send + 'static {
    /// Which one.
    fn role(&self) -> Role;
    /// Joins it with the engine that it will run on; called within the runtime.
    fn bind(self, engine: &EngineHandle) -> BoundRole;
}

/// What a role adds to a worker.
pub struct BoundRole {
    /// Takes handoffs in.
    pub sink: Arc<dyn SinkHandler>,
    /// Tokens claimed, for load reports.
    pub claimed: ClaimedTokens,
    /// Name of the role's gRPC service.
    pub service_name: &'static str,
    /// Adds the role's service to the server.
    pub serve: Box<dyn FnOnce(Router, Parts) -> Router + Send>,
}

/// What a role's service is made of.
#[derive(Clone)]
pub struct Parts {
    /// The engine.
    pub engine: EngineHandle,
    /// The data plane.
    pub transfer: KvTransfer,
    /// Records spans.
    pub tracer: SdkTracer,
    /// Longest call.
    pub call_max: Duration,
    /// Largest message.
    pub message_max: usize,
}

/// What a worker is started with beside its configuration.
pub struct Surroundings {
    /// Records spans.
    pub tracer: SdkTracer,
    /// Fate of exported spans, for `/metrics`.
    pub export: Option<ExportCounters>,
    /// Tells the starter.
    pub announcer: Announcer,
    /// Holds sequences in a phase, in tests.
    pub gate: Option<Arc<dyn SequenceGate>>,
    /// Takes hold of the transfer, in tests.
    pub hooks: Arc<dyn TransferHooks>,
}

impl Surroundings {
    /// Spans go to `tracer`; nothing is held and nobody is told.
    pub fn new(tracer: SdkTracer) -> Self {
        Self { tracer, export: None, announcer: Announcer::default(), gate: None, hooks: Arc::new(NoHooks) }
    }
}

/// A running worker. Dropping it leaves tasks behind; [`RunningWorker::stop`] ends them.
pub struct RunningWorker {
    /// Where its gRPC listens.
    pub grpc: SocketAddr,
    /// Where health and metrics are served.
    pub http: SocketAddr,
    /// Which start of which instance it is.
    pub party: Party,
    /// Engine and pool.
    pub loaded: Loaded,
    /// Data plane.
    pub transfer: KvTransfer,
    registration: RegistrationHandle,
    draining: Arc<AtomicBool>,
    stop: CancellationToken,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Parts of the health answers that exist only once the worker is up.
#[derive(Default)]
struct Up {
    engine: OnceLock<EngineHandle>,
    transfer: OnceLock<KvTransfer>,
    ready: OnceLock<Box<dyn Fn() -> Result<(), String> + Send + Sync>>,
}

impl RunningWorker {
    /// Starts a worker. Returns once it serves and has begun to register.
    pub async fn start<R: WorkerRole>(config: WorkerConfig, role: R, around: Surroundings) -> anyhow::Result<Self> {
        let listener = grpc::bind(config.grpc.listen).await?;
        let admin_listen = config.admin.listen.unwrap_or_else(|| SocketAddr::new(config.grpc.listen.ip(), 0));
        let admin_listener = grpc::bind(admin_listen).await?;
        let (grpc_addr, http) = (listener.local_addr()?, admin_listener.local_addr()?);
        around.announcer.say(&Announcement::Listening { grpc: grpc_addr, http });

        let (up, metrics) = (Arc::new(Up::default()), Metrics::new(service_name(role.role())));
        let role_name = role.role();
        if let Some(counters) = &around.export {
            metrics.register_export(counters);
        }
        let stop = CancellationToken::new();
        tokio::spawn(admin::serve(admin_listener, admin::routes(health(&up), metrics.clone()), stop.clone()));

        let loaded = load(&config, around.announcer).await?;
        let _ = up.engine.set(loaded.engine.clone());
        loaded.engine.set_gate(around.gate);
        let instance = config.instance.id.clone().unwrap_or_else(|| id::default_instance_id(role_name.name()));
        let party = Party { instance, incarnation: id::incarnation() };
        let BoundRole { sink, claimed, service_name, serve } = role.bind(&loaded.engine);
        let transfer = start_transfer(&config, &party, &loaded, sink, around.hooks).await?;
        let _ = up.transfer.set(transfer.clone());
        let collector =
            WorkerMetrics::new(loaded.engine.clone(), transfer.clone(), &loaded.card.id, &config.instance.pool);
        metrics.register(|registry| registry.register_collector(Box::new(collector)));

        let draining = Arc::new(AtomicBool::new(false));
        let bundle = loaded.card.bundle.zip(loaded.bundle.clone());
        let service = WorkerService {
            party: party.clone(),
            engine: loaded.engine.clone(),
            transfer: transfer.clone(),
            bundle,
            claimed,
            draining: draining.clone(),
        };
        let parts = Parts {
            engine: loaded.engine.clone(),
            transfer: transfer.clone(),
            tracer: around.tracer,
            call_max: Duration::from_millis(config.instance.call_ms_max),
            message_max: config.grpc.message_max(),
        };
        let (_, health_service) = grpc::health();
        let worker_service = WorkerServer::new(service).max_decoding_message_size(config.grpc.message_max());
        let server = grpc::server(&config.grpc).add_service(health_service).add_service(worker_service);
        let server = grpc::with_reflection(server, &[worker_server::SERVICE_NAME, service_name]);
        let server = tokio::spawn(grpc::serve(serve(server, parts), listener, stop.clone()));

        let endpoint = config.grpc.advertise.clone().unwrap_or_else(|| grpc_addr.to_string());
        let record = record(role_name, &config, &party, endpoint, &loaded, &transfer);
        let registration = membership::worker(&config.membership).register(record);
        watch_readiness(&registration, &up, (&loaded.engine, &transfer), around.announcer);
        Ok(Self { grpc: grpc_addr, http, party, loaded, transfer, registration, draining, stop, server })
    }

    /// Whether a router admitted it.
    pub fn is_ready(&self) -> bool {
        self.registration.is_ready() && moves(&self.loaded.engine, &self.transfer).is_ok()
    }

    /// Waits for the wish to stop, or for the death of a part, which is an error.
    pub async fn until_stopped(&mut self, shutdown: &Shutdown) -> anyhow::Result<()> {
        tokio::select! {
            () = shutdown.requested() => Ok(()),
            ended = &mut self.server => match ended {
                Ok(Ok(())) => anyhow::bail!("the gRPC server ended"),
                Ok(Err(error)) => Err(error).context("the gRPC server failed"),
                Err(error) => Err(error).context("the gRPC server panicked"),
            },
        }
    }

    /// Takes no new work, lets running calls end within the drain, then stops everything.
    pub async fn stop(self, shutdown: &Shutdown) {
        self.draining.store(true, Ordering::Relaxed);
        self.registration.leave(Duration::from_millis(LEAVE_MS_MAX)).await;
        self.stop.cancel();
        if !self.server.is_finished() && shutdown.drain(self.server).await.is_none() {
            tracing::warn!("ends calls that did not end within the drain");
        }
        let deadline = Instant::now() + Duration::from_millis(TRANSFER_STOP_MS_MAX);
        let (transfer, engine) = (self.transfer, self.loaded.engine);
        let stopped = tokio::task::spawn_blocking(move || {
            transfer.stop(deadline);
            engine.stop()
        });
        let _ = stopped.await;
    }
}

/// Service name in telemetry and metrics.
pub const fn service_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "baton-prefill-worker",
        Role::Decode => "baton-decode-worker",
    }
}

fn health(up: &Arc<Up>) -> Health {
    let (live, ready) = (up.clone(), up.clone());
    Health::new(
        move || match (live.engine.get(), live.transfer.get()) {
            (Some(engine), Some(transfer)) => moves(engine, transfer),
            // Loading is life: the startup probe bounds it, not this one.
            _ => Ok(()),
        },
        move || ready.ready.get().map_or_else(|| Err("loads the model".into()), |ready| ready()),
    )
}

/// Whether the threads that do a worker's work are at it; only a restart helps one that is not.
fn moves(engine: &EngineHandle, transfer: &KvTransfer) -> Result<(), String> {
    match (engine.healthy(), transfer.healthy()) {
        (false, _) => Err("the engine's loop does not move".into()),
        (_, false) => Err("a thread of the data plane panicked".into()),
        (true, true) => Ok(()),
    }
}

async fn load(config: &WorkerConfig, announcer: Announcer) -> anyhow::Result<Loaded> {
    let (model, engine) = (config.model.clone(), config.engine.clone());
    let progress =
        move |what: &str, fraction: f32| announcer.say(&Announcement::Progress { what: what.into(), fraction });
    let loaded = tokio::task::spawn_blocking(move || bring_up::load(&model, &engine, &progress)).await?;
    loaded.with_context(|| format!("cannot serve model {:?}", config.model.model))
}

async fn start_transfer(
    config: &WorkerConfig,
    party: &Party,
    loaded: &Loaded,
    sink: Arc<dyn SinkHandler>,
    hooks: Arc<dyn TransferHooks>,
) -> anyhow::Result<KvTransfer> {
    let transport = bring_up::transport(&config.transfer);
    let settings = TransferConfig::new(party.clone(), loaded.compatibility.clone(), loaded.map.clone(), transport);
    let (limits, advertise) = (config.transfer.limits.clone(), config.transfer.advertise);
    let settings = TransferConfig { hooks, limits, advertise, ..settings };
    let region = loaded.region.clone();
    let started = tokio::task::spawn_blocking(move || KvTransfer::start(settings, region, sink)).await?;
    started.context("cannot start the data plane")
}

fn record(
    role: Role,
    config: &WorkerConfig,
    party: &Party,
    endpoint: String,
    loaded: &Loaded,
    transfer: &KvTransfer,
) -> InstanceRecord {
    let layout = loaded.map.layout().clone();
    let layers = layout.groups().iter().map(|g| g.layers.len() as u32).sum();
    let kv_heads = layout.groups()[0].planes[0].heads();
    InstanceRecord {
        party: party.clone(),
        role,
        labels: config.instance.labels.clone(),
        pool: config.instance.pool.clone(),
        endpoint,
        card: loaded.card.clone(),
        protocol: ProtocolRange { min: PROTOCOL_MIN, max: PROTOCOL_MAX },
        capacity_tokens: u64::from(loaded.map.blocks()) * u64::from(layout.block_tokens()),
        layout,
        class: loaded.compatibility.class.clone(),
        running_max: config.engine.running_max as u32,
        waiting_max: config.engine.waiting_max as u32,
        shards: vec![Shard {
            transfer_address: transfer.address().to_bytes(),
            layers: 0..layers,
            kv_heads: 0..kv_heads,
        }],
        capabilities: Vec::new(),
    }
}

/// Publishes readiness, and announces the first time.
fn watch_readiness(
    registration: &RegistrationHandle,
    up: &Arc<Up>,
    (engine, transfer): (&EngineHandle, &KvTransfer),
    announcer: Announcer,
) {
    let (mut state, seen) = (registration.state(), registration.state());
    let (engine, transfer) = (engine.clone(), transfer.clone());
    let _ = up.ready.set(Box::new(move || {
        moves(&engine, &transfer)?;
        match &*seen.borrow() {
            state if state.is_ready() => Ok(()),
            state => Err(format!("no router has admitted this worker: {state:?}")),
        }
    }));
    tokio::spawn(async move {
        if state.wait_for(|s| s.is_ready()).await.is_ok() {
            announcer.say(&Announcement::Ready);
        }
    });
}
