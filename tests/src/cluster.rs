//! The fixture: a router, prefill workers and decode workers on free ports.

use crate::gates::Gates;
use anyhow::{Context, ensure};
use baton_decode_worker::DecodeRole;
use baton_node::{DrainConfig, Shutdown};
use baton_prefill_worker::PrefillRole;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::{Router, RouterConfig, RunningRouter};
use baton_types::InstanceId;
use baton_worker::config::WorkerConfig;
use baton_worker::process::{RunningWorker, Surroundings};
use opentelemetry_sdk::trace::SdkTracerProvider;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// Longest wait for a cluster to serve.
const START_MAX: Duration = Duration::from_secs(120);

/// The processes to start.
#[derive(Clone)]
pub struct ClusterSpec {
    /// The router; its addresses become free ports.
    pub router: RouterConfig,
    /// One configuration per prefill worker; addresses and routers are filled in.
    pub prefill: Vec<WorkerConfig>,
    /// One configuration per decode worker.
    pub decode: Vec<WorkerConfig>,
    /// Holds phases open.
    pub gates: Arc<Gates>,
}

impl ClusterSpec {
    /// `prefill` and `decode` workers with one configuration.
    pub fn new(prefill: usize, decode: usize, worker: &WorkerConfig) -> Self {
        let (prefill, decode) = (vec![worker.clone(); prefill], vec![worker.clone(); decode]);
        Self { router: RouterConfig::default(), prefill, decode, gates: Arc::default() }
    }
}

/// A worker configuration for tests: `model`, one compute thread, a small pool.
pub fn worker(model: &str) -> WorkerConfig {
    let mut config = WorkerConfig::default();
    config.model.model = model.into();
    config.engine.threads = 1.into();
    config.engine.kv_cache_bytes = baton_node::config::ByteSize(64 << 20);
    config
}

/// A running cluster. Stop it with [`Cluster::stop`]; if it is dropped, its tasks run until the test's runtime ends.
pub struct Cluster {
    pub router: RunningRouter,
    /// Prefill workers, in the order of the specification.
    pub prefill: Vec<RunningWorker>,
    pub decode: Vec<RunningWorker>,
    /// Holds phases open.
    pub gates: Arc<Gates>,
}

impl Cluster {
    /// Starts a cluster and waits until every worker is admitted.
    pub async fn start(spec: ClusterSpec) -> anyhow::Result<Self> {
        let mut router = spec.router;
        router.grpc.listen.set_port(0);
        router.http.listen.set_port(0);
        router.cluster.listen.set_port(0);
        let router = Router::start(router).await?;
        let address = router.cluster_addr.to_string();
        let mut cluster = Self { router, prefill: Vec::new(), decode: Vec::new(), gates: spec.gates };
        for (index, config) in spec.decode.into_iter().enumerate() {
            let config = placed(config, &address, format!("decode-{index}"))?;
            let role = DecodeRole::new(&config);
            cluster.decode.push(RunningWorker::start(config, role, cluster.around()).await?);
        }
        for (index, config) in spec.prefill.into_iter().enumerate() {
            let config = placed(config, &address, format!("prefill-{index}"))?;
            cluster.prefill.push(RunningWorker::start(config, PrefillRole, cluster.around()).await?);
        }
        cluster.wait_ready().await?;
        Ok(cluster)
    }

    fn around(&self) -> Surroundings {
        use opentelemetry::trace::TracerProvider as _;
        let mut around = Surroundings::new(SdkTracerProvider::builder().build().tracer("baton"));
        around.gate = Some(self.gates.clone());
        around.hooks = self.gates.clone();
        around
    }

    /// Starts one more worker, prefill or decode, and waits until it is admitted.
    pub async fn add(&mut self, prefills: bool, config: &WorkerConfig, name: &str) -> anyhow::Result<()> {
        let config = placed(config.clone(), &self.router.cluster_addr.to_string(), name.to_owned())?;
        let (around, role) = (self.around(), DecodeRole::new(&config));
        if prefills {
            self.prefill.push(RunningWorker::start(config, PrefillRole, around).await?);
        } else {
            self.decode.push(RunningWorker::start(config, role, around).await?);
        }
        self.wait_ready().await
    }

    /// Prefill and decode workers.
    pub fn workers(&self) -> impl Iterator<Item = &RunningWorker> {
        self.prefill.iter().chain(&self.decode)
    }

    async fn wait_ready(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_MAX;
        while !self.workers().all(RunningWorker::is_ready) {
            ensure!(Instant::now() < deadline, "the workers were not admitted in {START_MAX:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// A gRPC client of the router.
    pub async fn client(&self) -> anyhow::Result<InferenceClient<Channel>> {
        let url = format!("http://{}", self.router.grpc_addr);
        InferenceClient::connect(url).await.context("the router does not answer")
    }

    /// Base address of the OpenAI API.
    pub fn http(&self) -> String {
        format!("http://{}/v1", self.router.http_addr)
    }

    /// Stops everything, workers first.
    pub async fn stop(self) {
        let shutdown = Shutdown::new(&DrainConfig { drain_ms_max: 2_000, ..DrainConfig::default() });
        shutdown.request("the test ends");
        for worker in self.prefill.into_iter().chain(self.decode) {
            worker.stop(&shutdown).await;
        }
        self.router.stop().await;
    }
}

fn placed(mut config: WorkerConfig, router: &str, name: String) -> anyhow::Result<WorkerConfig> {
    config.membership.routers = vec![router.to_owned()];
    config.instance.id = Some(InstanceId::try_new(name)?);
    Ok(config)
}
