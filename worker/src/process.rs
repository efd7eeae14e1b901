//! A worker process: starts the listeners first, then the engine, the data plane and the services, and registers last. So a router never
//! sees a worker that cannot serve.

use crate::bring_up::{self, Loaded};
use crate::config::WorkerConfig;
use crate::credentials;
use crate::data_plane;
use crate::drain::Drain;
use crate::hang;
use crate::health::Vitals;
use crate::lora::Adapters;
use crate::metrics::WorkerMetrics;
use crate::phases::Phases;
use crate::report::cache_changes;
use crate::role::Parts;
use crate::role::{BoundRole, WorkerRole};
use crate::service::WorkerService;
use anyhow::Context;
use baton_engine::SequenceGate;
use baton_kernels::device::Device;
use baton_kv_cache::PoolShape;
use baton_kv_transfer::{KvTransfer, NoHooks, TransferHooks};
use baton_node::admin;
use baton_node::announce::{Announcement, Announcer};
use baton_node::grpc;
use baton_node::identity::{self, Identity};
use baton_node::listen::Callers;
use baton_node::membership;
use baton_node::membership::embedded::JoinConfig;
use baton_node::metrics::Metrics;
use baton_node::telemetry::{ExportCounters, Traces};
use baton_node::{Shutdown, TokioRuntime, id};
use baton_text::grammar;
use baton_types::{
    InstanceRecord, PROMPT_LOGPROBS, Party, ProtocolRange, Role, SAMPLING_CONSTRAINTS, SAMPLING_MIN_P, Shard,
};
use opentelemetry_sdk::trace::SdkTracer;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Longest wait for peers' acknowledgements when the data plane stops.
const TRANSFER_STOP_MS_MAX: u64 = 1_000;
/// Time that routers that read slowly have to receive the last answers, once no call runs.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// Time that cut-off calls have to send their error, routers to receive the deregistration, and connections to close.
const CUT_OFF_MAX: Duration = Duration::from_secs(3);

/// Inputs of a worker's start, apart from its configuration.
pub struct Surroundings {
    pub tracer: SdkTracer,
    /// Counts of exported and lost spans, for `/metrics`.
    pub export: Option<ExportCounters>,
    /// Recent traces, for routers.
    pub traces: Traces,
    pub announcer: Announcer,
    /// Stops sequences in a phase, in tests.
    pub gate: Option<Arc<dyn SequenceGate>>,
    /// Intercepts the transfer, in tests.
    pub hooks: Arc<dyn TransferHooks>,
    /// Replaces the configured device, in tests.
    pub device: Option<Arc<dyn Device>>,
    /// Protocol versions supported; other than this build's in tests.
    pub protocol: ProtocolRange,
}

impl Surroundings {
    /// Exports spans to `tracer`; without test hooks and without announcements.
    pub fn new(tracer: SdkTracer) -> Self {
        Self {
            tracer,
            export: None,
            traces: Traces::default(),
            announcer: Announcer::default(),
            gate: None,
            hooks: Arc::new(NoHooks),
            device: None,
            protocol: ProtocolRange::CURRENT,
        }
    }
}

/// A running worker. Dropping it does not end its tasks; [`RunningWorker::stop`] does.
pub struct RunningWorker {
    /// Address of its gRPC server.
    pub grpc: SocketAddr,
    /// Address of health and metrics.
    pub http: SocketAddr,
    /// Which instance, and which start of it.
    pub party: Party,
    pub loaded: Loaded,
    pub transfer: KvTransfer,
    pub drain: Drain,
    adapters: Option<Adapters>,
    vitals: Arc<Vitals>,
    stop: CancellationToken,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl RunningWorker {
    /// Starts a worker. Returns once it serves and has started to register.
    pub async fn start<R: WorkerRole>(config: WorkerConfig, role: R, around: Surroundings) -> anyhow::Result<Self> {
        let config = config.of_role(role.role());
        let identity = Identity::start(&config.identity, identity::Role::Worker).await?;
        let listener = grpc::bind(&config.grpc).await?;
        let admin_listen = config.admin.listen.unwrap_or_else(|| SocketAddr::new(config.grpc.listen.ip(), 0));
        let admin_listener = admin::bind(admin_listen).await?;
        let (grpc_addr, http) = (listener.address(), admin_listener.address());
        around.announcer.say(&Announcement::Listening { grpc: grpc_addr, http, cluster: None });

        let vitals = Arc::new(Vitals::default());
        let metrics = Metrics::new(service_name(role.role()));
        let role_name = role.role();
        if let Some(counters) = &around.export {
            metrics.register_export(counters);
        }
        let stop = CancellationToken::new();
        let runtime = Arc::new(TokioRuntime::current());
        metrics.register_health(&vitals.health());
        tokio::spawn(admin::serve(admin_listener, admin::routes(vitals.health(), metrics.clone()), stop.clone()));

        let loaded = load(&config, around.announcer, around.device).await?;
        loaded.engine.set_gate(around.gate);
        let adapters = adapters(&config, &loaded, runtime.clone()).await?;
        let etcd = config.identity.for_etcd(&config.membership.etcd);
        let membership = membership::worker(&JoinConfig { etcd, ..config.membership.clone() }, &identity);
        let instance = config.instance.id.clone().unwrap_or_else(|| id::default_instance_id(role_name.name()));
        let party = Party { instance, incarnation: id::incarnation() };
        let BoundRole { sink, claimed, service_name, serve } =
            role.bind(&loaded.engine, membership.members(), runtime.clone());
        let mut settings = data_plane::transfer_config(&config, &party, &loaded)?;
        (settings.hooks, settings.protocol) = (around.hooks, around.protocol);
        settings.credentials = credentials::of(&identity);
        let memory = loaded.memory.clone();
        let transfer = tokio::task::spawn_blocking(move || KvTransfer::start(settings, memory, sink)).await?;
        let transfer = transfer.context("cannot start the data plane")?;
        data_plane::check_name(config.instance.id.is_some(), transfer.fences(), &config.transfer)?;
        vitals.works(&loaded.engine, &transfer);
        if let (Some(adapters), true) = (adapters.clone(), config.engine.lora.folder.is_some()) {
            let every = Duration::from_millis(config.engine.lora.reread_ms);
            tokio::spawn(stop.clone().run_until_cancelled_owned(adapters.follow_folder(every)));
        }
        tokio::spawn(stop.clone().run_until_cancelled_owned(hang::tell(loaded.engine.clone(), runtime.clone())));
        let (model, pool) = (loaded.card.id.as_str(), config.instance.pool.as_str());
        let collector = WorkerMetrics::new(loaded.engine.clone(), loaded.device.clone(), transfer.clone(), model, pool);
        let collector = collector.with_adapters(adapters.clone());
        let phases = metrics.register(|registry| {
            registry.register_collector(Box::new(collector));
            Phases::register(registry, model, pool)
        });

        let drain = Drain::new(runtime.clone());
        let bundle = loaded.card.bundle.zip(loaded.bundle.clone());
        let endpoint = config.grpc.reached_at(grpc_addr)?;
        let record = record(role_name, around.protocol, &config, &party, endpoint, &loaded, &transfer);
        let service = WorkerService {
            party: party.clone(),
            record: record.clone(),
            engine: loaded.engine.clone(),
            transfer: transfer.clone(),
            bundle,
            claimed,
            cache_changed: cache_changes(&loaded.engine.pool()),
            adapters: adapters.as_ref().map(Adapters::cards),
            drain: drain.clone(),
            drain_max: Duration::from_millis(config.drain.drain_ms_max),
            stop: stop.clone(),
            runtime: runtime.clone(),
        };
        let parts = Parts {
            engine: loaded.engine.clone(),
            transfer: transfer.clone(),
            drain: drain.clone(),
            tracer: around.tracer,
            phases,
            call_max: Duration::from_millis(config.instance.call_ms_max),
            message_max: config.grpc.message_max(),
            model: loaded.card.fingerprint,
            adapters: adapters.clone(),
            runtime,
        };
        let server = crate::grpc::router(&config.grpc, service, around.traces, service_name);
        let server =
            tokio::spawn(grpc::serve(serve(server, parts), listener, Callers::Peers(identity.clone()), stop.clone()));

        let registration = membership.register(record);
        let drained_max = Duration::from_millis(config.drain.drained_ms_max);
        vitals.registered(&registration, &drain, drained_max, around.announcer);
        drain.registered(registration);
        Ok(Self { grpc: grpc_addr, http, party, loaded, transfer, drain, adapters, vitals, stop, server })
    }

    /// Whether a router has admitted it.
    pub fn is_ready(&self) -> bool {
        self.vitals.is_ready().is_ok()
    }

    /// Its LoRA adapters, if it serves any.
    pub fn adapters(&self) -> Option<&Adapters> {
        self.adapters.as_ref()
    }

    /// Waits for a request to stop, or for the failure of a component, which is an error.
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

    /// Drains within the bounds of `shutdown`, unless it has drained before, then stops everything.
    pub async fn stop(self, shutdown: &Shutdown) {
        self.drain.start(std::future::pending());
        let server = self.server.abort_handle();
        let mut ended = pin!(async {
            self.drain.drained().await;
            self.stop.cancel();
            if !self.server.is_finished() {
                let _ = timeout(CLOSE_MAX, self.server).await;
            }
        });
        if shutdown.drain(&mut ended).await.is_none() {
            tracing::warn!("cuts off calls that did not end within the drain");
            self.drain.cut_off();
            let _ = timeout(CUT_OFF_MAX, ended).await;
        }
        self.stop.cancel();
        server.abort();
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

async fn load(config: &WorkerConfig, announcer: Announcer, device: Option<Arc<dyn Device>>) -> anyhow::Result<Loaded> {
    let (model, engine) = (config.model.clone(), config.engine.clone());
    let progress =
        move |what: &str, fraction: f32| announcer.say(&Announcement::Progress { what: what.into(), fraction });
    let load = move || match device {
        Some(device) => bring_up::load_on(device, &model, &engine, &progress),
        None => bring_up::load(&model, &engine, &progress),
    };
    let loaded = tokio::task::spawn_blocking(load).await?;
    loaded.with_context(|| format!("cannot serve model {:?}", config.model.model))
}

/// Reads the adapters of the settings, if there are any.
async fn adapters(
    config: &WorkerConfig,
    loaded: &Loaded,
    runtime: Arc<TokioRuntime>,
) -> anyhow::Result<Option<Adapters>> {
    let (settings, engine, spec) = (config.engine.lora.clone(), loaded.engine.clone(), loaded.spec.clone());
    let names = loaded.card.names().map(str::to_owned).collect();
    let start = move || Adapters::start(&settings, &engine, spec, names, runtime);
    tokio::task::spawn_blocking(start).await?.context("cannot serve the adapters")
}

fn record(
    role: Role,
    protocol: ProtocolRange,
    config: &WorkerConfig,
    party: &Party,
    endpoint: String,
    loaded: &Loaded,
    transfer: &KvTransfer,
) -> InstanceRecord {
    let layout = loaded.map.layout().clone();
    let layers = layout.groups().iter().map(|g| g.layers.len() as u32).sum();
    let planes = layout.groups().iter().flat_map(|group| &group.planes);
    let kv_heads = planes.map(|plane| plane.heads()).max().unwrap_or(0);
    let grammars = loaded.engine.has_grammars().then_some(grammar::REVISION);
    let of_all = [SAMPLING_CONSTRAINTS, SAMPLING_MIN_P, PROMPT_LOGPROBS].into_iter();
    let capabilities = of_all.chain(loaded.device.info().sampling.iter().copied()).chain(grammars);
    InstanceRecord {
        party: party.clone(),
        role,
        labels: config.instance.labels.clone(),
        pool: config.instance.pool.clone(),
        endpoint,
        card: loaded.card.clone(),
        protocol,
        capacity_tokens: u64::from(PoolShape::from(&loaded.map).limiting().blocks) * u64::from(layout.block_tokens()),
        layout,
        class: loaded.compatibility.class.clone(),
        running_max: config.engine.running_max as u32,
        waiting_max: config.engine.waiting_max as u32,
        shards: vec![Shard {
            transfer_address: transfer.address().to_bytes(),
            layers: 0..layers,
            kv_heads: 0..kv_heads,
        }],
        capabilities: capabilities.map(str::to_owned).collect(),
    }
}
